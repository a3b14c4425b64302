"""SAF: the trajectory loss against every sample's own outputs some epochs ago."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat._term import TrajectoryTerm, can_fuse
from saltflat.memory import OutputMemory


class SAF(TrajectoryTerm):
    r"""Sharpness-Aware training for Free, as a term to add to the loss.

    .. math:: L = L_B(f_\theta) + \lambda L^{tra}_B(f_\theta, Y^{(e - \tilde E)})
        \qquad \text{(Algorithm 1)}

    Each call reads the batch's outputs of `lag` epochs ago, records those of now in their place,
    and returns the weighted trajectory loss between them. A sample that has none exactly `lag`
    epochs old gives no loss. In eval mode it records nothing and returns 0.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of logits.
        weight: The paper's lambda.
        temperature: The paper's tau.
        lag: The paper's E tilde, in epochs.
        start_epoch: The first epoch, counted from 0, in which the loss is added. The paper has 5
            on CIFAR, 10 for ResNets on ImageNet and 150 of 300 for ViT.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        storage: How outputs are stored: "float32", "float16" or "uint8".
        device: Where they are stored. None: with the logits; "cpu": in host memory.
        path: A file to store them in, for more than fits in memory.
        process_group: The processes that train together; the default group unless said.

    Raises:
        ValueError: If an argument is out of its range.
        RuntimeError: If several processes train together, which SAF cannot do yet.

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
        path: str | Path | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            weight=weight, temperature=temperature, start_epoch=start_epoch, tau_squared=tau_squared
        )
        self._process_group = process_group
        self._require_one_process()
        self.memory = OutputMemory(
            num_samples, num_classes, lag=lag, storage=storage, device=device, path=path
        )
        if start_epoch < lag:
            warnings.warn(
                f"start_epoch={start_epoch}, but with lag={lag} references exist from epoch {lag}: "
                "until then the loss is 0",
                stacklevel=2,
            )

    def forward(self, logits: Tensor, index: Tensor) -> Tensor:
        """Weighted trajectory loss of a batch; records its outputs.

        Args:
            logits: The outputs of the training-mode pass, of shape (batch, classes). For dense or
                token outputs (batch, ..., classes), each position is a sample of its own.
            index: Which samples they are: the shape of `logits` without the classes.

        Returns:
            A scalar to add to the loss; before `start_epoch` the constant 0.

        Raises:
            ValueError: If logits or index do not fit; nothing is recorded then.
            RuntimeError: If `set_epoch` was never called.
        """
        started = self._check(logits)
        if not self.training:
            return self._no_loss(logits)
        index = torch.as_tensor(index)
        if logits.dim() < 2 or logits.shape[-1] != self.memory.num_classes:
            raise ValueError(
                f"logits must be of shape (batch, ..., {self.memory.num_classes}), "
                f"got {tuple(logits.shape)}"
            )
        if index.shape != logits.shape[:-1]:
            raise ValueError(
                f"index must be of shape {tuple(logits.shape[:-1])} for logits of shape "
                f"{tuple(logits.shape)}, got {tuple(index.shape)}"
            )
        logits = logits.flatten(0, -2)
        index = index.flatten()
        if can_fuse(logits):
            source = self.memory.source(index, logits)
            loss, finite = self._fused_loss(logits, source, started=started)
            self.memory.sent(source, finite)
            return loss if started else loss.detach()
        location = self.memory.locate(index, logits.device)
        finite = self._finite_rows(logits)
        if not started:
            self.memory.write(location, logits, keep=finite)
            return self._no_loss(logits)
        reference, valid = self.memory.read(location, logits.device)
        self.memory.write(location, logits, keep=finite)
        return self._loss(logits, reference, valid & finite)

    def prefetch(self, index: Tensor, device: torch.device | str) -> None:
        """Begin to fetch a batch's references, before its forward pass.

        Worth a line where the outputs are stored in host memory or in a file and a step is short;
        elsewhere it does nothing. The loss is the same with it and without.

        Args:
            index: What the next call will be given.
            device: Where its logits will be.
        """
        if self._started and self.training:
            self.memory.prefetch(torch.as_tensor(index).flatten(), device)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; see `OutputMemory.set_epoch` for what it raises."""
        self._require_one_process()
        self.memory.set_epoch(epoch)
        super().set_epoch(epoch)

    @staticmethod
    def estimate_bytes(
        num_samples: int, num_classes: int, *, lag: int = 3, storage: str = "float16"
    ) -> int:
        """Bytes that the outputs of a training set take, stamps included.

        Example:
            >>> SAF.estimate_bytes(50_000, 100, storage="float32") / 2**20  # CIFAR-100, in MiB
            57.79...
        """
        return OutputMemory.estimate_bytes(num_samples, num_classes, lag=lag, storage=storage)

    def _require_one_process(self) -> None:
        """Refuse to be silently wrong: a table per process would miss most references."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_world_size(self._process_group) > 1:
            raise RuntimeError(
                "SAF does not yet share its outputs between processes, and samples move between "
                "them: train in one process, or use MESA, which needs no index"
            )
