"""MESA: the trajectory loss against the outputs of the model's own moving average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from saltflat.core.checks import flag, whole_number
from saltflat.core.registry import register
from saltflat.teacher import EMATeacher, scale_factor
from saltflat.terms.base import Batch, TrajectoryTerm


def logits_of(outputs: Any) -> Any:
    """The tensor itself, or its `.logits`, as Hugging Face's models return them."""
    return getattr(outputs, "logits", outputs)


@register("term", "mesa", passes="2 + 1", paper="Du et al., NeurIPS 2022")
class MESA(TrajectoryTerm):
    r"""Memory-Efficient Sharpness-Aware training, as a term to add to the loss.

    .. math:: L = L_B(f_\theta) + \lambda L^{tra}_B(f_\theta, f_{v_t}), \quad
        v_t = \beta v_{t-1} + (1 - \beta) \theta_t \qquad \text{(13), (10), Algorithm 1}

    Needs no index and no memory of samples. Costs one forward pass of the teacher a step, and none
    before `start_epoch` but for the first batch, which checks that the teacher's outputs fit.

    Args:
        model: The model to train. A copy becomes the teacher.
        weight: The paper's lambda: 0.8 on CIFAR, 0.3 on ImageNet.
        temperature: The paper's tau.
        decay: The paper's beta: 0.9995 on CIFAR, 0.9998 on ImageNet.
        start_epoch: The first epoch, counted from 0, in which the loss is added.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        warmup: Whether the decay starts small, so that the initial weights fade sooner.
        rescale: Whether to scale the teacher's logits by the least-squares factor, clipped at 0.
        average_std: Whether the teacher averages BatchNorm's standard deviations, not variances.
        freeze_epoch: The epoch, counted from 0, from which the teacher no longer changes. A teacher
            that keeps updating memorises the training set with the model. None: never.
        output: Takes the logits out of what the model returns. Default: the tensor or its
            `.logits`.
        class_dim: The dimension of the classes. Default: the last, for outputs of 2 or 3
            dimensions; more need it, for example 1 for (N, C, H, W).
        process_group: The processes that train together. Default: all.

    Raises:
        ValueError: If an argument is out of its range.
        TypeError: If the model is not a module.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 2)
        >>> mesa = MESA(model, start_epoch=0)
        >>> mesa.set_epoch(0)
        >>> x = torch.ones(1, 2)
        >>> mesa(model(x), x).item()  # the teacher still equals the model
        0.0
        >>> mesa.update(model)  # after optimizer.step()

    References:
        Du et al., Sharpness-Aware Training for Free, NeurIPS 2022.
    """

    needs_inputs = True

    def __init__(
        self,
        model: nn.Module,
        *,
        weight: float = 0.8,
        temperature: float = 5.0,
        decay: float = 0.9995,
        start_epoch: int = 5,
        tau_squared: bool = True,
        warmup: bool = False,
        rescale: bool = False,
        average_std: bool = False,
        freeze_epoch: int | None = None,
        output: Callable[[Any], Any] = logits_of,
        class_dim: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            weight=weight,
            temperature=temperature,
            start_epoch=start_epoch,
            tau_squared=tau_squared,
            process_group=process_group,
        )
        if freeze_epoch is not None:
            freeze_epoch = whole_number("freeze_epoch", freeze_epoch, 1)
        if not callable(output):
            raise TypeError(f"output must be a function of what the model returns, got {output!r}")
        self.rescale = flag("rescale", rescale)
        self.freeze_epoch = freeze_epoch
        self.output = output
        if class_dim is not None:
            self.class_dim = whole_number("class_dim", class_dim, -8, 8)
        self._tried = False  # whether the teacher ran once
        self.teacher = EMATeacher(
            model,
            decay=decay,
            warmup=warmup,
            average_std=average_std,
            process_group=process_group,
        )

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The teacher's outputs."""
        args, kwargs = batch.inputs
        reference = self.output(self.teacher(*args, **kwargs))
        if isinstance(reference, Tensor) and reference.dim() > 1:
            dim = -1 if self.class_dim is None else self.class_dim
            reference = reference.movedim(dim, -1).flatten(0, -2)
        if not isinstance(reference, Tensor) or reference.shape != outputs.shape:
            got = getattr(reference, "shape", type(reference).__name__)
            raise ValueError(
                f"the teacher must return logits of shape {tuple(outputs.shape)}, got {got}: give "
                "MESA what the model was called with, and output=lambda out: out[0] for a model "
                "that returns more than logits"
            )
        if self.rescale:
            factor = scale_factor(reference, outputs, self._group.it)
            reference = reference.to(factor.dtype) * factor
        return reference, reference.isfinite().all(-1)

    def record(self, outputs: Tensor, batch: Batch, keep: Tensor) -> None:
        """Run the teacher on the very first batch, so that a bad one fails at once."""
        if not self._tried:
            if not self.active:
                self.reference(outputs, batch)
            self._tried = True

    def update(self, model: nn.Module) -> None:
        """Average the model into the teacher; call it after every `optimizer.step()`."""
        self.teacher.update(model)

    def set_epoch(self, epoch: int) -> None:
        """See `TrajectoryTerm.set_epoch`; warns of an epoch without `update`."""
        previous = self.epoch
        super().set_epoch(epoch)
        later = self.teacher.frozen or (previous is not None and epoch > previous)
        if later and not self.teacher.updates:
            self._misuse.no_update()

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        if self.freeze_epoch is not None:
            self.teacher.frozen = epoch >= self.freeze_epoch

    @property
    def nbytes(self) -> int:
        """Bytes of the teacher."""
        return self.teacher.nbytes

    def extra_repr(self) -> str:
        own = f"rescale={self.rescale}, freeze_epoch={self.freeze_epoch}"
        return f"{super().extra_repr()}, {self.teacher.extra_repr()}, {own}"
