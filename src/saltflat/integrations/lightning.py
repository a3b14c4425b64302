"""SAF and MESA as Lightning callbacks, which leave the LightningModule as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

try:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError("Lightning is missing: pip install 'saltflat[lightning]'") from error

from saltflat.indexed import indexed_loader, split_index
from saltflat.integrations._hooks import Call, stand_before
from saltflat.integrations._lightning import TermCallback
from saltflat.integrations._lightning_sharpness import SharpnessCallback
from saltflat.mesa import MESA
from saltflat.saf import SAF

__all__ = ["MESACallback", "SAFCallback", "SharpnessCallback", "indexed_datamodule"]


class SAFCallback(TermCallback):
    """Adds SAF to the loss, its memory to the checkpoints and "trajectory_loss" to the log.

    Training batches must carry their samples' index: (index, ...), as a loader over
    `with_index(dataset)` and `indexed_datamodule` make them, or a dictionary with "index". The
    index is taken off before any hook of the LightningModule sees the batch.

    Args:
        num_samples: As for `saltflat.SAF`.
        num_classes: Likewise.
        network: The attribute of the LightningModule whose outputs are the logits; unless said, the
            module itself, called as self(x). `training_step` must call it once.
        **settings: Others of `saltflat.SAF`.
    """

    def __init__(
        self, num_samples: int, num_classes: int, *, network: str = "", **settings: Any
    ) -> None:
        sizes = {"num_samples": num_samples, "num_classes": num_classes}
        super().__init__(network, {**sizes, **settings})
        self._index: Tensor | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        name, owner = "on_before_batch_transfer", trainer.datamodule  # type: ignore[attr-defined]
        if owner is None or not is_overridden(name, owner):
            owner = pl_module
        self._undo.append(stand_before(owner, name, partial(self._take_index, trainer)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        loader = trainer.train_dataloader
        if isinstance(loader, list | tuple | dict):
            raise ValueError(
                f"SAFCallback takes one training loader, got a {type(loader).__name__} of them: an "
                "index is a place in one dataset, so load several as one, ConcatDataset([...])"
            )

    def _build(self, network: nn.Module) -> SAF:
        return SAF(**self.settings)

    def _take_index(self, trainer: Trainer, hook: Any, batch: Any, dataloader_idx: int) -> Any:
        if trainer.training:
            self._index, batch = split_index(batch)
        return hook(batch, dataloader_idx)

    def _loss(self, term: Any, call: Call) -> Tensor:
        index, self._index = self._index, None
        if index is None:
            raise RuntimeError(
                "training_step ran twice on one batch, as under SAM or LBFGS, and SAF records a "
                "batch once: use it with a plain optimizer, or use MESACallback"
            )
        loss: Tensor = term(call.logits, index)
        return loss


class MESACallback(TermCallback):
    """Adds MESA to the loss, its teacher to the checkpoints and "trajectory_loss" to the log.

    The teacher is `callback.term.teacher`. It gets what the network got in `training_step`.

    Args:
        network: As for `SAFCallback`; the teacher is its moving average.
        **settings: Those of `saltflat.MESA`.
    """

    def __init__(self, *, network: str = "", **settings: Any) -> None:
        super().__init__(network, settings)
        self._steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        assert isinstance(self.term, MESA)
        copy = self.term.teacher.module
        if isinstance(copy, LightningModule):  # which Lightning does not know, but forward may ask
            copy.trainer = trainer
            self._undo.append(lambda: setattr(copy, "trainer", None))
            self._undo.append(stand_before(copy, "log", lambda *args, **kwargs: None))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._steps and isinstance(self.term, MESA):
            self.term.update(pl_module.get_submodule(self.network))
        self._steps = trainer.global_step  # which stays while gradients are accumulated

    def _build(self, network: nn.Module) -> MESA:
        return MESA(network, **self.settings)

    def _loss(self, term: Any, call: Call) -> Tensor:
        loss: Tensor = term(call.logits, *call.inputs, **call.kwargs)
        return loss


def indexed_datamodule(datamodule: LightningDataModule) -> LightningDataModule:
    """Have a datamodule's batches carry their samples' index where a SAFCallback takes it off.

    See `saltflat.indexed.indexed_loader` for what becomes of its training loader then. In other
    fits, and in a tuner's, which has no callbacks, the loader stays. Returns the same datamodule.
    """
    method = partial(_train_dataloader, datamodule, datamodule.train_dataloader)
    datamodule.train_dataloader = method  # type: ignore[method-assign]
    return datamodule


def _train_dataloader(datamodule: LightningDataModule, method: Any) -> Any:
    callbacks = datamodule.trainer.callbacks if datamodule.trainer else []  # type: ignore[attr-defined]
    indexed = any(isinstance(each, SAFCallback) for each in callbacks)
    return indexed_loader(method()) if indexed else method()
