"""SAF: the trajectory loss against every sample's own outputs some epochs ago."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from saltflat._sharded import ShardedMemory
from saltflat._term import ONE_LOGIT, TrajectoryTerm, can_fuse
from saltflat.core import cuda_graph
from saltflat.core.distributed import Group, world
from saltflat.exchange import Exchange
from saltflat.memory import OutputMemory


class SAF(TrajectoryTerm):
    r"""Sharpness-Aware training for Free, as a term to add to the loss.

    .. math:: L = L_B(f_\theta) + \lambda L^{tra}_B(f_\theta, Y^{(e - \tilde E)})
        \qquad \text{(Algorithm 1)}

    Each call reads the batch's outputs of `lag` epochs ago, records those of now in their place,
    and returns the weighted trajectory loss between them. A sample that has none exactly `lag`
    epochs old gives no loss. In eval mode it records nothing and returns 0.

    Where torch.distributed is initialised, before SAF is built, the same lines do on W processes
    what they would do on one with the batches of all. Each process keeps 1/W of the outputs and its
    own part of `state_dict()` (`sharded_state_dict` is for checkpoints of all), and the loss is
    such that the mean of the processes' gradients, as DistributedDataParallel takes it, is the
    gradient of the mean over all their rows. (The mean in a cross-entropy is over a process's own:
    that sum is right for batches of one size.) Each process must make as many calls in an epoch as
    the others, and none with a batch larger than the largest of the first calls. torch.compile
    leaves the calls out of its graphs.

    Args:
        num_samples: The length of the training set.
        num_classes: The length of one row of logits, at least 2.
        weight: The paper's lambda.
        temperature: The paper's tau.
        lag: The paper's E tilde, in epochs.
        start_epoch: The first epoch, counted from 0, in which the loss is added. The paper has 5
            on CIFAR, 10 for ResNets on ImageNet and 150 of 300 for ViT.
        tau_squared: Whether to multiply by the squared temperature, as the released code does.
        storage: How outputs are stored: "float32", "float16" or "uint8".
        device: Where they are stored. None: with the logits; "cpu": in host memory.
        path: A file to store them in, for more than fits in memory; with several processes, each
            adds its rank to the name.
        process_group: The processes that train together; the default group unless said.
        exchange: Which samples a process may be sent. "any": any, as by a DistributedSampler; each
            step exchanges outputs with the others. "own": only those that it keeps, as by
            `StickySampler`; nothing is exchanged, and the loss is the mean over its own rows.

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
        exchange: Literal["any", "own"] = "any",
    ) -> None:
        super().__init__(
            weight=weight, temperature=temperature, start_epoch=start_epoch, tau_squared=tau_squared
        )
        if num_classes == 1:
            raise ValueError(f"num_classes must be at least 2, got 1: {ONE_LOGIT}")
        if exchange not in ("any", "own"):
            raise ValueError(f'exchange must be "any" or "own", got {exchange!r}')
        self.exchange = exchange
        self._group = Group(process_group)
        self._world = world(process_group)
        self._exchange = Exchange(num_samples, process_group) if self._world[1] > 1 else None
        self._agreed = False
        how: dict[str, Any] = {"lag": lag, "storage": storage, "device": device, "path": path}
        if self._exchange is not None and path is not None:
            how["path"] = f"{path}.{self._exchange.rank}"
        self.memory: OutputMemory
        if self._exchange is None:
            self.memory = OutputMemory(num_samples, num_classes, **how)
        elif exchange == "own":
            self.memory = OutputMemory(num_samples, num_classes, block=self._exchange.block, **how)
        else:
            self.memory = ShardedMemory(self._exchange, num_classes, **how)
        if start_epoch < lag:
            warnings.warn(
                f"start_epoch={start_epoch}, but with lag={lag} references exist from epoch {lag}: "
                "until then the loss is 0",
                stacklevel=2,
            )

    @property
    def first_epoch(self) -> int:
        """The first epoch that can have a loss: one with outputs of `lag` epochs ago."""
        return max(self.start_epoch, self.memory.lag)

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
            RuntimeError: If `set_epoch` was never called; if processes have different settings; or
                if one of them does not answer.
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
        if self._exchange is None:
            return self._compared(logits, index, started)
        together = self._compared_together
        if torch.compiler.is_compiling():
            together = torch.compiler.disable(together)
        return together(self._exchange, logits, index, started)

    def _compared(self, logits: Tensor, index: Tensor, started: bool) -> Tensor:
        """The loss of rows of logits, which are recorded."""
        # A source fetches references, which before the start are not worth a message.
        if can_fuse(logits) and (started or not isinstance(self.memory, ShardedMemory)):
            source = self.memory.source(index, logits)
            loss, finite = self._fused_loss(logits, source, started=started)
            if source.mode == "staged":
                loss = self._mean(loss, source.valid, finite != 0)
            self.memory.sent(source, finite)
            return loss if started else loss.detach()
        location = self.memory.locate(index, logits.device)
        finite = self._finite_rows(logits)
        if not started:
            self.memory.write(location, logits, keep=finite)
            return self._no_loss(logits)
        reference, valid = self.memory.read(location, logits.device)
        loss = self._mean(self._loss(logits, reference, valid & finite), valid, finite)
        self.memory.write(location, logits, keep=finite)
        return loss

    def _compared_together(
        self, exchange: Exchange, logits: Tensor, index: Tensor, started: bool
    ) -> Tensor:
        """Likewise, with several processes; the first call sees whether they are alike."""
        if not (self._agreed or cuda_graph.capturing()):
            exchange.agree(len(index), self._settings(), logits.device)
            self._agreed = True
        return self._compared(logits, index, started)

    def _mean(self, loss: Tensor, valid: Tensor, finite: Tensor) -> Tensor:
        """From the mean over these rows to a part of that over all processes' rows."""
        if self._exchange is None or self.exchange == "own":
            return loss
        return self._exchange.mean(loss, valid & finite)

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all processes."""
        names = ("weight", "temperature", "start_epoch", "tau_squared", "exchange", "epoch")
        sizes = ("num_samples", "num_classes", "lag", "storage")
        return {
            **{name: getattr(self.memory, name) for name in sizes},
            **{name: getattr(self, name) for name in names},
        }

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

    def settle(self) -> None:
        """Have in the memory what was written so far.

        Needed in one place: with several processes, between steps that are taken one operation at
        a time and the capture or replay of a CUDA graph, which cannot wait for what they sent.
        """
        self.memory.settle()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins; see `OutputMemory.set_epoch` for what it raises."""
        if world(self._group.it) != self._world:
            raise RuntimeError(
                f"SAF was built as (rank, processes) {self._world}, and now is "
                f"{world(self._group.it)}: build it after init_process_group"
            )
        self.memory.set_epoch(epoch)
        super().set_epoch(epoch)

    def whole_state_dict(self) -> dict[str, Any]:
        """The state of all processes as one process would have it, for a checkpoint in one file.

        `load_state_dict` takes it on any number of processes, each its own part. Every process must
        call this; rank 0 gets the state, in host memory, and the others an empty one. In one
        process it is `state_dict()`.
        """
        state = self.state_dict()
        if self._exchange is None:
            return state
        whole = {**state, "_nonfinite": self._exchange.total(self._nonfinite)}
        for name in _RINGS:
            whole[name] = self._exchange.joined(state[name])
        whole.pop("memory.block", None)
        return whole if self._exchange.rank == 0 else {}

    def _take_part(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Leave of a state of all processes what belongs to this one."""
        table = state_dict.get(f"{prefix}memory.table")
        if self._exchange is None or table is None or f"{prefix}memory.block" in state_dict:
            return
        if table.shape[1:2] != (self.memory.num_samples,):
            return  # and so of another training set, which is refused
        block = self._exchange.block
        for name in _RINGS:
            state_dict[prefix + name] = state_dict[prefix + name][:, block.start : block.stop]
        if len(block) < self.memory.num_samples:
            state_dict[f"{prefix}memory.block"] = self.state_dict()["memory.block"]
        if self._exchange.rank > 0:  # rank 0 continues the count of all
            state_dict[f"{prefix}_nonfinite"] = torch.zeros_like(self._nonfinite)

    def _begin(self, epoch: int | None) -> None:
        super()._begin(epoch)
        if self.exchange == "any":  # batches may be larger in this epoch
            self._agreed = False

    def sharded_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with the memory of all processes, as DTensors of which each has a part.

        It is for torch.distributed.checkpoint, whose checkpoints any number of processes can load:
        let `load` fill what this returns there, and give it to `load_state_dict`. On one process
        it is `state_dict()` itself.
        """
        state = self.state_dict()
        if self._exchange is not None:
            state.update(self.memory.shards("memory.", self._group.it))
            state.pop("memory.block", None)
        return state

    def _check_loaded(self, state_dict: dict[str, Any], prefix: str) -> None:
        self.memory.take_shards(state_dict, f"{prefix}memory.")
        self._take_part(state_dict, prefix)
        super()._check_loaded(state_dict, prefix)
        self.memory.refuse_another_block(state_dict, f"{prefix}memory.")

    @staticmethod
    def estimate_bytes(
        num_samples: int, num_classes: int, *, lag: int = 3, storage: str = "float16"
    ) -> int:
        """Bytes that the outputs of a training set take on all processes, stamps included.

        Example:
            >>> SAF.estimate_bytes(50_000, 100, storage="float32") / 2**20  # CIFAR-100, in MiB
            57.79...
        """
        return OutputMemory.estimate_bytes(num_samples, num_classes, lag=lag, storage=storage)


_RINGS = ("memory.table", "memory.stamps")
"""What of the state each process has a part of, in its second dimension."""
