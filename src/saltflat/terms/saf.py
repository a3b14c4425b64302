"""SAF: the trajectory loss against each sample's own outputs some epochs ago."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat.core.registry import register
from saltflat.memory.ring import Ring
from saltflat.terms.base import ONE_LOGIT, Batch, TrajectoryTerm


@register("term", "saf", passes="1 + 1", paper="Du et al., NeurIPS 2022")
class SAF(TrajectoryTerm):
    r"""Sharpness-Aware training for Free, as a term to add to the loss.

    .. math:: L = L_B(f_\theta) + \lambda L^{tra}_B(f_\theta, Y^{(e - \tilde E)})
        \qquad \text{(Algorithm 1)}

    Each call reads the batch's outputs of `lag` epochs ago and records those of now. A sample that
    has none exactly `lag` epochs old adds nothing. An epoch's first outputs of a sample are the
    ones that later epochs read, so every call of a closure sees the same reference.

    With several processes each keeps the whole memory, and `set_epoch` merges what they recorded.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of logits, at least 2.
        weight: The paper's lambda.
        temperature: The paper's tau.
        lag: The paper's E tilde, in epochs.
        start_epoch: The first epoch, counted from 0, in which the loss is added. The paper: 5 on
            CIFAR, 10 for ResNets on ImageNet, 150 of 300 for ViT.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        storage: How outputs are stored: "float32", "float16" or "uint8".
        device: Where they are stored. None: with the logits. "cpu": on the host.
        process_group: The processes that train together. Default: all.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
        >>> import torch
        >>> saf = SAF(num_samples=4, num_classes=2, lag=1, start_epoch=1, temperature=1.0)
        >>> index, logits = torch.tensor([0, 3]), torch.zeros(2, 2)
        >>> saf.set_epoch(0)
        >>> saf(logits, index)  # nothing to compare with yet
        tensor(0.)
        >>> saf.set_epoch(1)
        >>> saf(torch.log(torch.tensor([[1.0, 3.0], [1.0, 3.0]])), index)  # 0.3 * 0.1438
        tensor(0.0432)

    References:
        Du et al., Sharpness-Aware Training for Free, NeurIPS 2022.
    """

    needs_index = True
    accepts_mixed = False
    memory: Ring

    def __init__(
        self,
        num_samples: int,
        num_classes: int,
        *,
        weight: float = 0.3,
        temperature: float = 5.0,
        lag: int = 3,
        start_epoch: int = 5,
        tau_squared: bool = True,
        storage: str = "float16",
        device: torch.device | str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if num_classes == 1:
            raise ValueError(f"num_classes must be at least 2, got 1: {ONE_LOGIT}")
        super().__init__(
            weight=weight,
            temperature=temperature,
            start_epoch=start_epoch,
            tau_squared=tau_squared,
            memory=Ring(num_samples, num_classes, lag=lag, storage=storage, device=device),
            process_group=process_group,
        )
        self.lag = self.memory.lag
        if start_epoch < lag:
            warnings.warn(
                f"start_epoch={start_epoch}, but with lag={lag} references exist from epoch {lag}: "
                "until then the loss is 0",
                stacklevel=2,
            )

    def reference(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The outputs of `lag` epochs ago."""
        assert batch.index is not None
        return self.memory.read(batch.index, outputs.device)

    def record(self, outputs: Tensor, batch: Batch, keep: Tensor) -> None:
        """Write the outputs of this epoch."""
        assert batch.index is not None
        self.memory.write(batch.index, outputs, keep)

    @staticmethod
    def estimate_bytes(
        num_samples: int, num_classes: int, *, lag: int = 3, storage: str = "float16"
    ) -> int:
        """Bytes of the memory on each process.

        Example:
            >>> SAF.estimate_bytes(50_000, 100, storage="float32") / 2**20  # CIFAR-100, in MiB
            77.05...
        """
        return Ring(num_samples, num_classes, lag=lag, storage=storage).nbytes

    def extra_repr(self) -> str:
        memory = self.memory
        return (
            f"num_samples={memory.num_samples}, num_classes={memory.num_classes}, "
            f"{super().extra_repr()}, lag={self.lag}, storage={memory.storage!r}"
        )
