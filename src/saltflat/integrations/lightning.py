"""Trajectory terms and sharpness as Lightning callbacks, which leave the LightningModule as it is.

Lightning lets no callback change the loss. So a `TrajectoryCallback` wraps the module's
`training_step` while a fit runs. It takes the logits from the step's one call of the network, and
adds the term to the loss that the step returns. Backward pass, accumulation, clipping, precision
and strategy stay Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import ceil, isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_warn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torchmetrics import Metric, MetricCollection
except ImportError as error:
    raise ImportError("Lightning is missing: pip install 'saltflat[lightning]'") from error

from saltflat.integrations.hooks import Call, forward_calls, warn_if_never_active, wrap_method
from saltflat.memory.indexing import indexed_loader, split_index
from saltflat.sharpness import sam_sharpness
from saltflat.terms import MESA, SAF, Batch, TrajectoryTerm
from saltflat.terms.mesa import logits_of

__all__ = [
    "MESACallback",
    "SAFCallback",
    "SharpnessCallback",
    "TrajectoryCallback",
    "indexed_datamodule",
]


class TrajectoryCallback(Callback):
    """Adds a term to the loss, its state to the checkpoints and "trajectory_loss" to the log.

    If the term needs an index, training batches carry it: (index, ...), as a loader over
    `with_index(dataset)` and `indexed_datamodule` make them, or a dictionary with "index". The
    callback removes it before any hook of the LightningModule sees the batch.

    If the term replaces the loss, the one that `training_step` returns is dropped.

    Args:
        term: A term, for one fit. Or a function of the network that builds a term for each fit.
        network: The attribute of the LightningModule whose outputs are the logits; "" is the module
            itself, called as self(x). `training_step` must call it once.
        labels: Takes the labels out of a batch, for a term that needs them. Default:
            batch["labels"], or the last part of a list or tuple.
    """

    def __init__(
        self,
        term: TrajectoryTerm | Callable[[nn.Module], TrajectoryTerm],
        *,
        network: str = "",
        labels: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.network = network
        self.term: TrajectoryTerm | None = None
        """That of the last fit; built when the model is where it will be trained."""
        self.needs_index = getattr(term, "needs_index", False)
        self._given = term
        self._labels = labels or _labels
        self._index: Tensor | None = None
        self._module: LightningModule | None = None
        self._loaded: dict[str, Any] = {}
        self._steps = 0
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        continues = trainer.global_step > 0 and self._module is pl_module
        if stage == "fit" and not continues:  # what a checkpoint has is loaded after this
            self.term, self._loaded = None, {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _require_loss(self, pl_module, by_hand="the term")
        if sum(isinstance(each, TrajectoryCallback) for each in _callbacks(trainer)) > 1:
            raise ValueError("callbacks must hold one trajectory term at most, got several")
        if self.term is None:
            self.term = self._build(pl_module.get_submodule(self.network)).to(pl_module.device)
            self.needs_index, self._module = self.term.needs_index, pl_module
        if self._loaded:
            self.term.load_state_dict(self._loaded)
            self._loaded = {}
        self._wrap(pl_module, "training_step", partial(self._training_step, pl_module, self.term))
        if self.needs_index:
            name, owner = "on_before_batch_transfer", trainer.datamodule  # type: ignore[attr-defined]
            owner = owner if owner is not None and is_overridden(name, owner) else pl_module
            self._wrap(owner, name, partial(self._take_index, trainer))
        for copy in self.term.modules():
            if isinstance(copy, LightningModule):  # unknown to Lightning, but forward may ask it
                copy.trainer = trainer
                self._undo.append(partial(setattr, copy, "trainer", None))
                self._wrap(copy, "log", lambda *args, **kwargs: None)

    def _build(self, network: nn.Module) -> TrajectoryTerm:
        term = self._given
        if not isinstance(term, TrajectoryTerm):
            return term(network)
        if term.epoch is not None and not self._loaded:
            raise ValueError(
                f"term has trained before, up to epoch {term.epoch}: give the callback a new one, "
                "or a function that builds one for each fit"
            )
        return term

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._undo.append(wrap_method(owner, name, around))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._undo:
            self._undo.pop()()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, _: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loaders = trainer.train_dataloader
        if self.needs_index and isinstance(loaders, list | tuple | dict):
            raise ValueError(
                f"{type(self).__name__} takes one training loader, got a {type(loaders).__name__}: "
                "an index belongs to one dataset, so load several as one, ConcatDataset([...])"
            )
        term = cast(TrajectoryTerm, self.term)
        if (term.epoch or 0) <= trainer.current_epoch:  # resumed, an epoch may have no start
            term.set_epoch(trainer.current_epoch)
        warn_if_never_active(term, *_length(trainer))
        self._steps = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(TrajectoryTerm, self.term).set_epoch(trainer.current_epoch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._steps:  # it stays while gradients are accumulated
            cast(TrajectoryTerm, self.term).update(pl_module.get_submodule(self.network))
        self._steps = trainer.global_step

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        missing = self.state_key not in checkpoint["callbacks"]
        if missing and trainer.training and checkpoint["global_step"]:  # a tuner saves step 0
            rank_zero_warn(
                f"the checkpoint has no state of {type(self).__name__}: its term starts anew"
            )

    def state_dict(self) -> dict[str, Any]:
        if self.term is None:
            return self._loaded
        self.term.sync()  # Lightning asks every process
        return self.term.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.term is None:
            self._loaded = state_dict
        else:
            self.term.load_state_dict(state_dict)

    def _take_index(self, trainer: Trainer, hook: Any, batch: Any, dataloader_idx: int) -> Any:
        if trainer.training:
            self._index, batch = split_index(batch)
        return hook(batch, dataloader_idx)

    def _training_step(
        self, module: LightningModule, term: TrajectoryTerm, step: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not module.trainer.training:  # a validation_step that calls training_step
            return step(*args, **kwargs)
        with forward_calls(module.get_submodule(self.network)) as calls:
            output = step(*args, **kwargs)
        if output is None:  # the module leaves this batch out
            return None
        logits, inputs = self._logits(calls)
        batch = args[0] if args else kwargs["batch"]
        labels = self._labels(batch) if term.needs_labels else None
        loss = term(logits, Batch(self._index, inputs, labels))
        module.log("trajectory_loss", loss.detach())
        own = output["loss"] if isinstance(output, Mapping) else output
        total = loss if term.replaces_loss else own + loss
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def _logits(self, calls: list[Call]) -> tuple[Tensor, tuple[tuple[Any, ...], dict[str, Any]]]:
        """The logits and the inputs of the network's one call."""
        name = "self" + (self.network and f".{self.network}")
        remedy = f"name the network, as in {type(self).__name__}(..., network='model')"
        if len(calls) != 1:
            raise RuntimeError(
                f"training_step must call {name}(...) once, called it {len(calls)} times: {remedy}"
            )
        inputs, kwargs, output = calls[0]
        logits = logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise ValueError(
                f"{name}(...) must return logits (batch, ..., classes), or have them as .logits, "
                f"got a {type(logits).__name__}{shape}: {remedy}"
            )
        return logits, (inputs, kwargs)


def _saf(num_samples: int, num_classes: int, settings: dict[str, Any], _: nn.Module) -> SAF:
    return SAF(num_samples, num_classes, **settings)


class SAFCallback(TrajectoryCallback):
    """A `TrajectoryCallback` with a new `SAF` for each fit.

    Args:
        num_samples: See `saltflat.SAF`.
        num_classes: See `saltflat.SAF`.
        network: See `TrajectoryCallback`.
        **settings: Other arguments of `saltflat.SAF`.
    """

    def __init__(
        self, num_samples: int, num_classes: int, *, network: str = "", **settings: Any
    ) -> None:
        super().__init__(partial(_saf, num_samples, num_classes, settings), network=network)
        self.needs_index = True


class MESACallback(TrajectoryCallback):
    """A `TrajectoryCallback` with a new `MESA` for each fit; see `callback.term.teacher`.

    Args:
        network: See `TrajectoryCallback`; the teacher is its moving average.
        **settings: Arguments of `saltflat.MESA`, without the model.
    """

    def __init__(self, *, network: str = "", **settings: Any) -> None:
        super().__init__(partial(MESA, **settings), network=network)


def indexed_datamodule(datamodule: LightningDataModule) -> LightningDataModule:
    """Let a datamodule's training batches carry the index, in fits whose callback needs it.

    See `saltflat.indexed_loader` for what becomes of its training loader. In other fits, and in a
    tuner's, which has no callbacks, the loader stays. Returns the same datamodule.
    """
    method = partial(_train_dataloader, datamodule, datamodule.train_dataloader)
    datamodule.train_dataloader = method  # type: ignore[method-assign]
    return datamodule


def _train_dataloader(datamodule: LightningDataModule, method: Callable[[], Any]) -> Any:
    found = [c for c in _callbacks(datamodule.trainer) if isinstance(c, TrajectoryCallback)]
    return indexed_loader(method()) if any(c.needs_index for c in found) else method()


class SharpnessCallback(Callback):
    """Logs "sharpness": by how much the loss of each epoch's last batch rises within rho.

    The loss is that of `training_step`, in evaluation mode and without a trajectory term. It costs
    three passes an epoch. On several processes it is the mean over theirs. What the step logs
    meanwhile is dropped, and the module's metrics of torchmetrics do not count it. A batch for
    which the step returns None is left out.

    Args:
        rho: As for `saltflat.sharpness.sam_sharpness`.
    """

    def __init__(self, rho: float = 0.05) -> None:
        self.rho = rho

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _require_loss(self, pl_module, by_hand="saltflat.sharpness.sam_sharpness")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_last_batch or outputs.get("loss") is None:
            return
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        unwrap = wrap_method(pl_module, "log", lambda *args, **kwargs: None)
        try:
            with torch.random.fork_rng(devices), _metrics_kept(pl_module):
                step = _StepLoss(pl_module, batch_idx)
                rise = sam_sharpness(step, lambda loss, _: loss, [(batch, batch)], rho=self.rho)
        finally:
            unwrap()
        pl_module.log("sharpness", rise, sync_dist=True)


@contextmanager
def _metrics_kept(module: nn.Module) -> Iterator[None]:
    """While entered, the module's metrics count in copies of their states."""
    metrics = [each for each in module.modules() if isinstance(each, Metric | MetricCollection)]
    kept = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        states = metric.metric_state if isinstance(metric, Metric) else {}  # a collection has none
        for name, state in states.items():
            setattr(metric, name, state.clone() if isinstance(state, Tensor) else list(state))
    try:
        yield
    finally:
        for metric, own in zip(metrics, kept, strict=True):
            vars(metric).update(own)


class _StepLoss(nn.Module):
    """The loss of a module's own training_step, as a module."""

    def __init__(self, module: LightningModule, batch_idx: int) -> None:
        super().__init__()
        self.module = module
        self.batch_idx = batch_idx

    def forward(self, batch: Any) -> Tensor:
        step = type(self.module).training_step
        wants_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        output = step(self.module, batch, *([self.batch_idx] if wants_number else []))
        return cast(Tensor, output["loss"] if isinstance(output, Mapping) else output)


def _callbacks(trainer: Trainer | None) -> list[Callback]:
    return trainer.callbacks if trainer else []  # type: ignore[attr-defined]


def _require_loss(callback: Callback, module: LightningModule, *, by_hand: str) -> None:
    """Check that `training_step` gets a batch from Lightning and returns the loss to it."""
    name = type(callback).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} needs the loss that training_step returns, which automatic_optimization=False "
            f"does not use: call {by_hand} yourself"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} needs the batch, which training_step(self, dataloader_iter) fetches itself: "
            "write training_step(self, batch, batch_idx)"
        )


def _labels(batch: Any) -> Tensor:
    if isinstance(batch, Mapping) and "labels" in batch:
        return batch["labels"]
    if isinstance(batch, list | tuple) and isinstance(batch[-1], Tensor):
        return batch[-1]
    raise ValueError(
        f"no labels in a batch of type {type(batch).__name__}: say which they are, as in "
        "TrajectoryCallback(..., labels=lambda batch: batch['y'])"
    )


def _length(trainer: Trainer) -> tuple[float, str]:
    """How many epochs a fit has at most, and the setting that says so."""
    steps = trainer.num_training_batches / trainer.accumulate_grad_batches  # of an epoch
    limits = [(float("inf"), "")]
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:  # -1: without end
        limits.append((trainer.max_epochs, f"max_epochs={trainer.max_epochs}"))
    if isfinite(steps) and steps and trainer.max_steps >= 0:
        by_steps = f"max_steps={trainer.max_steps}, of {ceil(steps)} an epoch"
        limits.append((trainer.max_steps / ceil(steps), by_steps))
    return min(limits)
