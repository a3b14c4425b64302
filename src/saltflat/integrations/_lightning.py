"""What SAF's and MESA's Lightning callbacks share: standing before `training_step`.

Lightning lets no callback change the loss, so while a fit runs the callback stands before the
module's `training_step`: it lets the step run, takes the logits from the one call of the network in
it, and adds the trajectory term to the loss that comes back. Backward pass, accumulation, clipping,
precision and strategy stay Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil, isfinite
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from saltflat.integrations._hooks import Call, calls_of, stand_before
from saltflat.integrations._lightning_step import check_step
from saltflat.mesa import MESA
from saltflat.saf import SAF


class TermCallback(Callback):
    """Adds a trajectory term to the loss of a fit.

    Args:
        network: The attribute of the LightningModule whose outputs are the logits; "": itself.
        settings: Of the term.
    """

    def __init__(self, network: str, settings: dict[str, Any]) -> None:
        self.network = network
        self.settings = settings
        self.term: SAF | MESA | None = None
        """Built when the model is where it will be trained."""
        self._module: LightningModule | None = None
        self._loaded: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        continues = trainer.global_step > 0 and self._module is pl_module
        if stage == "fit" and not continues:  # what a checkpoint has is loaded after this
            self.term, self._loaded = None, {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_step(self, pl_module, by_hand="saltflat.SAF or saltflat.MESA")
        if sum(isinstance(other, TermCallback) for other in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("a fit takes one SAFCallback or MESACallback, not several")
        if self.term is None:
            self.term = self._build(pl_module.get_submodule(self.network))
            self._module = pl_module
        if self._loaded:
            self.term.load_state_dict(self._loaded)
            self._loaded = {}
        step = partial(self._training_step, pl_module, self.term)
        self._undo = [stand_before(pl_module, "training_step", step)]

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._undo:
            self._undo.pop()()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, _: BaseException) -> None:
        self.on_fit_end(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.term is not None
        if (self.term.epoch or 0) <= trainer.current_epoch:  # resumed, an epoch may have no start
            self.term.set_epoch(trainer.current_epoch)
        _warn_if_in_vain(self.term, trainer, type(self).__name__)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.term is not None
        self.term.set_epoch(trainer.current_epoch)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        missing = self.state_key not in checkpoint["callbacks"]
        if missing and trainer.training and checkpoint["global_step"]:  # a tuner saves step 0
            rank_zero_warn(
                f"the checkpoint holds no state of {type(self).__name__}: its past outputs, "
                "or its teacher, begin with this fit"
            )

    def state_dict(self) -> dict[str, Any]:
        return self._loaded if self.term is None else self.term.whole_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.term is None:
            self._loaded = state_dict
        else:
            self.term.load_state_dict(state_dict)

    def _training_step(
        self, module: LightningModule, term: Any, step: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not module.trainer.training:  # but in a validation_step that calls training_step
            return step(*args, **kwargs)
        with calls_of(module.get_submodule(self.network)) as calls:
            output = step(*args, **kwargs)
        if output is None:  # the module leaves this batch out
            return None
        loss = self._loss(term, self._only(calls))
        module.log("trajectory_loss", loss.detach())
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] + loss}
        return output + loss

    def _only(self, calls: list[Call]) -> Call:
        """The one call of the network, if it returned logits."""
        name = "self" + (self.network and f".{self.network}")
        remedy = f"name the network, as in {type(self).__name__}(..., network='model')"
        if len(calls) != 1:
            raise RuntimeError(
                f"training_step called {name}(...) {len(calls)} times; the logits are those of one "
                f"call: {remedy}"
            )
        logits = calls[0].logits
        if not isinstance(logits, Tensor) or logits.dim() < 2:
            shape = f" of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else ""
            raise ValueError(
                f"{name}(...) returned a {type(logits).__name__}{shape}; the logits are a "
                f"tensor (batch, ..., classes), or what the output has as .logits: {remedy}"
            )
        return calls[0]

    def _build(self, network: nn.Module) -> SAF | MESA:
        raise NotImplementedError

    def _loss(self, term: Any, call: Call) -> Tensor:
        raise NotImplementedError


def _warn_if_in_vain(term: SAF | MESA, trainer: Trainer, name: str) -> None:
    first = term.first_epoch
    steps = trainer.num_training_batches / trainer.accumulate_grad_batches  # of an epoch
    if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= first:  # -1: without end
        end = f"max_epochs={trainer.max_epochs}"
    elif isfinite(steps) and 0 <= trainer.max_steps <= first * ceil(steps):
        end = f"max_steps={trainer.max_steps}, of {ceil(steps)} an epoch"
    else:
        return
    rank_zero_warn(
        f"{name} will add nothing: it begins in epoch {first}, and the fit ends with {end}: lower "
        f"start_epoch{' or lag' if isinstance(term, SAF) else ''}, or train for longer"
    )
