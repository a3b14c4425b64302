"""MESA: the trajectory loss against the outputs of the model's own moving average."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from saltflat._term import ONE_LOGIT, TrajectoryTerm
from saltflat.teacher import EMATeacher, scale_factor


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
        warmup: Whether the decay starts small, so that the random initialisation is forgotten at
            once.
        average_std: Whether the teacher averages BatchNorm's variances as standard deviations.
        rescale: Whether to scale the teacher's logits by the least-squares factor, clipped at 0;
            see `saltflat.teacher.scale_factor`. An average is surer of training images than the
            model, and a pull to its larger outputs makes both grow.
        freeze_epoch: The first epoch, counted from 0, in which the teacher stays as it is; None:
            none. Begin with half of the training: an average that goes on memorises the training
            set with the model, and has nothing to add.
        process_group: The processes that train together, whose teachers are kept the same; the
            default group unless given. With `rescale`, all of them call this equally often.

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
        warmup: bool = False,
        average_std: bool = False,
        rescale: bool = False,
        freeze_epoch: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            weight=weight, temperature=temperature, start_epoch=start_epoch, tau_squared=tau_squared
        )
        if freeze_epoch is not None and (type(freeze_epoch) is not int or freeze_epoch < 1):
            raise ValueError(f"freeze_epoch must be a whole number from 1, got {freeze_epoch!r}")
        self.freeze_epoch = freeze_epoch
        self.rescale = rescale
        self.teacher = EMATeacher(
            model,
            decay=decay,
            warmup=warmup,
            average_std=average_std,
            process_group=process_group,
        )

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
        if not self.started or not self.training:
            return self._no_loss(logits)
        reference = self.teacher(*inputs, **kwargs)
        reference = getattr(reference, "logits", reference)
        if not isinstance(reference, Tensor) or reference.shape != logits.shape:
            got = getattr(reference, "shape", type(reference).__name__)
            raise ValueError(
                f"the teacher must return logits of shape {tuple(logits.shape)}, got {got}: "
                "give MESA a model that returns the tensor of logits itself, or has it as .logits"
            )
        logits, reference = logits.flatten(0, -2), reference.flatten(0, -2)
        if self.rescale:
            factor = scale_factor(reference, logits, self.teacher.process_group)
            reference = reference.to(factor.dtype) * factor
        return self._loss(logits, reference, self._finite_rows(logits, reference))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rescale={self.rescale}, freeze_epoch={self.freeze_epoch}"

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
        self.teacher.update(model)
