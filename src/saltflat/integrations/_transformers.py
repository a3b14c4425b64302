"""A callback that keeps a term in step with the Trainer: epoch, teacher and checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from saltflat.mesa import MESA
from saltflat.saf import SAF

STATE = "trajectory.pt"
"""The file of a checkpoint's folder that holds the term."""


class HasTerm(Protocol):
    """A Trainer with a term, which may be given another."""

    model: Any
    term: SAF | MESA


class Follow(TrainerCallback):
    """Tells a trainer's term the epoch, averages MESA's teacher, and saves the term."""

    def __init__(self, trainer: HasTerm) -> None:
        self.trainer = trainer
        self.epoch = 0
        """The next one. The Trainer's own is a fraction of what it took for the epoch's length."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        term = self.trainer.term.to(args.device)
        self.epoch = int(state.epoch or 0)
        if term.epoch is not None and term.epoch > self.epoch:
            raise ValueError(
                f"the term is in epoch {term.epoch}, and training begins in epoch {self.epoch}: "
                "give the Trainer a new one, trainer.term = ..., or resume_from_checkpoint"
            )
        first = term.first_epoch
        if first >= state.num_train_epochs:
            warnings.warn(
                f"the trajectory loss begins in epoch {first}, and training ends after "
                f"{state.num_train_epochs} epochs: nothing is added. Lower start_epoch, or SAF's "
                "lag, or train for longer",
                stacklevel=1,
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.term.set_epoch(self.epoch)
        self.epoch += 1

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.term, MESA):
            self.trainer.term.update(self.trainer.model)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.save_only_model:
            return
        whole = self.trainer.term.whole_state_dict()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            torch.save(whole, folder / STATE)


def load(term: nn.Module, folder: str | Path) -> None:
    """Bring a term back from a checkpoint's folder.

    Raises:
        ValueError: If it is not there.
    """
    path = Path(folder) / STATE
    if not path.exists():
        raise ValueError(f"{path} is missing: the checkpoint was saved without the term")
    term.load_state_dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
