"""MESA: the trajectory loss against the outputs of the model's own moving average."""

from __future__ import annotations

import operator
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from saltflat import _match
from saltflat._sources import Given
from saltflat._term import ONE_LOGIT, TrajectoryTerm, can_fuse
from saltflat.core import cuda_graph
from saltflat.teacher import EMATeacher


class MESA(TrajectoryTerm):
    r"""Memory-Efficient Sharpness-Aware training, as a term to add to the loss.

    .. math:: L = L_B(f_\theta) + \lambda L^{tra}_B(f_\theta, f_{v_t}), \quad
        v_t = \beta v_{t-1} + (1 - \beta) \theta_t \qquad \text{(13), (10), Algorithm 1}

    Needs no index and no memory of samples; costs one forward pass of the teacher, and none before
    `start_epoch`. In eval mode it returns 0 without running the teacher.

    Args:
        model: The model to train, which returns logits, or something that has them as `.logits`, as
            Hugging Face's models do. A copy of it becomes the teacher; the model is not kept.
        weight: The paper's lambda: 0.8 on CIFAR, 0.3 on ImageNet.
        temperature: The paper's tau.
        decay: The paper's beta: 0.9995 on CIFAR, 0.9998 on ImageNet. `decay_for_half_life` makes
            one from a number of epochs.
        start_epoch: The first epoch, counted from 0, in which the loss is added.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        warmup: Whether the decay starts small, so that the random initialisation does not linger.
        deviations: Whether the teacher averages BatchNorm's variances as standard deviations.
        batch_statistics: Whether the teacher's BatchNorm normalises by the batch, as the model's
            does in training, instead of by averaged statistics; `teacher.fold()` then saves
            nothing.
        match: By what number the teacher's outputs are multiplied, one for the batch of all
            processes and a constant to the gradient. "none": by 1, as in the paper; but an average
            is surer of training images than the model, and a pull to its larger outputs makes both
            grow. "spread": so that they spread over the classes as far as the model's. "nearest":
            so that they are as near to the model's as a multiple of at least 0 can be; at a high
            temperature little then pulls along the teacher's outputs, and the less these agree with
            the model's, the more the pull is one to equal outputs.
        freeze_epoch: The first epoch, counted from 0, in which the teacher stays as it is; None:
            none. Begin with half of the training: an average that goes on learns the training set
            by heart with the model, and has nothing to add.
        interval: Of so many steps, one has the loss, so many times as heavy, and the others have
            none: less work for the teacher, and the same loss on average. A step ends with
            `update`.
        process_group: The processes that train together, whose teachers are kept the same; the
            default group unless said. All of them call this equally often, unless `match` is
            "none".

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> mesa = MESA(model, start_epoch=0)
        >>> mesa.set_epoch(0)
        >>> x = torch.ones(1, 2)
        >>> mesa(model(x), x).item()  # the teacher still is the model
        0.0
        >>> mesa.update(model)  # after optimizer.step()

    References:
        Du et al., Sharpness-Aware Training for Free, NeurIPS 2022.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.8,
        temperature: float = 5.0,
        decay: float = 0.9995,
        start_epoch: int = 5,
        tau_squared: bool = True,
        warmup: bool = True,
        deviations: bool = True,
        batch_statistics: bool = False,
        match: str = "nearest",
        freeze_epoch: int | None = None,
        interval: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            weight=weight, temperature=temperature, start_epoch=start_epoch, tau_squared=tau_squared
        )
        if isinstance(interval, bool) or operator.index(interval) < 1:
            raise ValueError(f"interval must be a whole number of at least 1, got {interval!r}")
        if freeze_epoch is not None and (type(freeze_epoch) is not int or freeze_epoch < 1):
            raise ValueError(f"freeze_epoch must be a whole number from 1, got {freeze_epoch!r}")
        if match not in _match.MATCHES:
            raise ValueError(f"match must be one of {', '.join(_match.MATCHES)}, got {match!r}")
        self.freeze_epoch = freeze_epoch
        self.interval = interval
        self.batch_statistics = batch_statistics
        self.match = match
        self.teacher = EMATeacher(
            model,
            decay=decay,
            warmup=warmup,
            deviations=deviations,
            process_group=process_group,
        )
        self._ahead: _Ahead | None = None
        self._sides: dict[torch.device, torch.cuda.Stream] = {}

    def forward(self, logits: Tensor, *inputs: Any, **kwargs: Any) -> Tensor:
        """Weighted trajectory loss of a batch.

        Args:
            logits: The model's outputs, of shape (batch, ..., classes).
            *inputs: What the model was called with, for the teacher, or the same samples augmented
                anew.
            **kwargs: Likewise.

        Returns:
            A scalar to add to the loss; in steps without it the constant 0.

        Raises:
            ValueError: If there is one class alone, or the teacher's outputs are not of the logits'
                shape.
            RuntimeError: If `set_epoch` was never called.
        """
        self._check(logits)
        if logits.dim() < 2 or logits.shape[-1] == 1:
            raise ValueError(
                "logits must be of shape (batch, ..., classes) with 2 or more classes, got "
                f"{tuple(logits.shape)}: {ONE_LOGIT}"
            )
        if not self.pulls or not self.training:
            return self._no_loss(logits)
        if self._ahead is not None and self._ahead.fits(inputs, kwargs):
            reference = self._ahead.taken()
            self._ahead = None
        else:
            self._drop()
            reference = self._reference(inputs, kwargs)
        if not isinstance(reference, Tensor) or reference.shape != logits.shape:
            got = getattr(reference, "shape", type(reference).__name__)
            raise ValueError(
                f"the teacher must return logits of shape {tuple(logits.shape)}, got {got}: "
                "give MESA a model that returns the tensor of logits itself, or has it as .logits"
            )
        logits, reference = logits.flatten(0, -2), reference.flatten(0, -2)
        fused, sums = can_fuse(logits), None
        if fused:
            reference = reference.contiguous()
        if self.match != "none":
            group = self.teacher.process_group
            sums = _match.sums(reference, logits, self.match, group, fused=fused)
        if fused:
            return self._fused_loss(logits, Given(reference, self.match, sums))[0]
        if sums is not None:
            reference = reference.to(sums.dtype) * _match.multiple(sums, self.match)
        return self._loss(logits, reference, self._finite_rows(logits, reference))

    def prefetch(self, *inputs: Any, **kwargs: Any) -> None:
        """Start the teacher's pass; on a GPU it runs beside whatever comes next.

        Called with the model's inputs before the model itself, it lets the two passes share a GPU,
        which pays where one leaves part of it idle. The next call of MESA with the same inputs
        takes the outputs. The loss is the same with it and without.
        """
        self._drop()
        tensors = [x for x in (*inputs, *kwargs.values()) if isinstance(x, Tensor) and x.dim()]
        if not (self.pulls and self.training and tensors):
            return
        device, side = tensors[0].device, None
        if device.type == "cuda" and not torch.compiler.is_compiling():
            if device not in self._sides:
                self._sides[device] = torch.cuda.Stream(device)
            side = self._sides[device]
            side.wait_stream(torch.cuda.current_stream(device))
        with nullcontext() if side is None else torch.cuda.stream(side):
            reference = self._reference(inputs, kwargs)
        self._ahead = _Ahead(inputs, kwargs, _versions(inputs, kwargs), reference, side)

    @property
    def pulls(self) -> bool:
        """Whether the step to come has the loss."""
        return self.started and (self.interval == 1 or self.teacher.updates % self.interval == 0)

    @property
    def _factor(self) -> float:
        return self.weight * self.interval

    def _reference(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        teacher = self.teacher.by_batch if self.batch_statistics else self.teacher
        outputs = teacher(*inputs, **kwargs)
        return getattr(outputs, "logits", outputs)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, batch_statistics={self.batch_statistics}, "
            f"match={self.match!r}, freeze_epoch={self.freeze_epoch}, interval={self.interval}"
        )

    def _drop(self) -> None:
        """Forget what was started early, when it has ended."""
        if self._ahead is not None:
            self._ahead.taken()
            self._ahead = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None, "_sides": {}}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._drop()
        super()._load_from_state_dict(*args, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; a whole epoch without `update` is worth a warning."""
        previous = self.epoch
        super().set_epoch(epoch)
        later = self.teacher.frozen or (previous is not None and epoch > previous)
        if later and not self.teacher.updates:
            warnings.warn(
                "the teacher still is the initial model: call mesa.update(model) after every "
                "optimizer.step()",
                stacklevel=2,
            )

    def _begin(self, epoch: int | None) -> None:
        super()._begin(epoch)
        if self.freeze_epoch is not None:
            self.teacher.frozen = epoch is not None and epoch >= self.freeze_epoch

    def update(self, model: nn.Module) -> None:
        """Average the model into the teacher; call it after every optimizer step."""
        self._drop()
        self.teacher.update(model)


class _Ahead(NamedTuple):
    """The teacher's outputs of a batch to come."""

    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    """How often PyTorch had changed each input."""
    reference: Any
    side: torch.cuda.Stream | None
    """Where they are computed, if it is not where the model runs."""

    def fits(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are the very inputs, as they were."""
        ours, theirs = (*self.inputs, *self.kwargs.values()), (*inputs, *kwargs.values())
        return (
            len(self.inputs) == len(inputs)
            and self.kwargs.keys() == kwargs.keys()
            and all(a is b for a, b in zip(ours, theirs, strict=True))
            and self.versions == _versions(inputs, kwargs)
        )

    def taken(self) -> Any:
        """The outputs, when the current stream gets there."""
        if self.side is not None:
            stream = torch.cuda.current_stream(self.side.device)
            stream.wait_stream(self.side)
            if isinstance(self.reference, Tensor) and not cuda_graph.capturing():
                self.reference.record_stream(stream)
        return self.reference


def _versions(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    tensors = (x for x in (*inputs, *kwargs.values()) if isinstance(x, Tensor))
    return [0 if x.is_inference() else x._version for x in tensors]
