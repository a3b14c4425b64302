"""SAF and MESA as a task of timm's training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    from timm.task import ClassificationTask
    from timm.utils import unwrap_model
except ImportError as error:
    raise ImportError("timm 1.0.30 or newer is missing: pip install 'saltflat[timm]'") from error

from saltflat.integrations._timm_targets import indexed_targets, taken_apart
from saltflat.mesa import MESA
from saltflat.saf import SAF

__all__ = ["TrajectoryTask", "indexed_targets"]


class TrajectoryTask(ClassificationTask):
    """timm's classification task with SAF or MESA in its loss.

    Call `set_epoch` when an epoch begins and, for MESA, `update_ema` after each optimizer step, as
    timm does for its own average. The term's state is in the checkpoint's "task_state", its loss in
    the result's "trajectory_loss", the criterion's in "task_loss".

    Args:
        model: The model, which returns logits. Of the two heads that one with distilled training
            has, the mean counts, which is what it returns in evaluation.
        criterion: The loss of logits and labels; for MESA also of mixed targets.
        term: A SAF, whose loader is over `indexed_targets`, or a MESA.
        **kwargs: timm's: device, dtype, verbose.
    """

    def __init__(
        self, model: nn.Module, criterion: Callable[..., Tensor], term: SAF | MESA, **kwargs: Any
    ) -> None:
        super().__init__(model, criterion, **kwargs)
        self.term = term
        self._checked = False
        self._gathered: dict[str, Any] = {}

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""
        self.term.set_epoch(epoch)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The losses and the logits of a batch."""
        self._gathered = {}
        about = input
        if isinstance(self.term, SAF):
            classes = self.term.memory.num_classes
            about, target = taken_apart(target, classes, check=self.training and not self._checked)
            self._checked |= self.training  # once, because it waits for the device
        output = self.trainable_module(input)
        if not isinstance(output, Tensor):
            if not getattr(unwrap_model(self.trainable_module), "distilled_training", False):
                raise ValueError(
                    f"the model must return logits, got a {type(output).__name__}: build it "
                    "without auxiliary outputs"
                )
            output = torch.stack(list(output)).mean(0)
        task_loss = self.criterion(output, target)
        term = self.term(output, about)
        losses = {"task_loss": task_loss, "trajectory_loss": term}
        return {"loss": task_loss + term, "output": output, **losses}

    def update_ema(self, step: int | None = None) -> None:
        """Average the model into MESA's teacher, and into timm's own average if there is one."""
        super().update_ema(step)
        if isinstance(self.term, MESA):
            self.term.update(self.trainable_module)

    def gather_state(self) -> None:
        """Bring SAF's parts to rank 0, before it saves; every rank must call it."""
        self._gathered = self.term.whole_state_dict()

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The term's state, for timm's CheckpointSaver."""
        if ema:
            return {}
        state = self._gathered or self.term.state_dict()
        if "memory.block" in state:  # a part
            raise RuntimeError("call task.gather_state() on every rank before rank 0 saves")
        return {"trajectory": state}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        """Take up the term's state, from timm's resume_task_checkpoint."""
        if ema:
            return
        if state:
            self.term.load_state_dict(state["trajectory"])
        elif isinstance(self.term, MESA):
            raise ValueError(
                "the checkpoint has no state of MESA, whose teacher would stay the model as it was "
                "built: load the weights into the model first, then build MESA and the task"
            )
        else:
            warnings.warn("the checkpoint has no state of SAF, which begins anew", stacklevel=2)
