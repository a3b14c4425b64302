"""What the callbacks ask of a `training_step`, before it runs."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


def check_step(callback: Callback, module: LightningModule, *, by_hand: str) -> None:
    """That the step gets a batch from Lightning and gives it the loss.

    Raises:
        ValueError: If it does not, with what to call `by_hand` where Lightning has no loss.
    """
    name = type(callback).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"{name} needs the loss that training_step returns, which manual optimization does not "
            f"use: there, call {by_hand} yourself"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            f"{name} needs the batch, which training_step(self, dataloader_iter) fetches itself: "
            "write training_step(self, batch, batch_idx)"
        )
