"""Sharpness in Lightning's log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from saltflat.integrations._hooks import stand_before
from saltflat.integrations._lightning_step import check_step
from saltflat.sharpness import sam_sharpness


class SharpnessCallback(Callback):
    """Logs "sharpness": how the loss of each epoch's last training batch rises within rho.

    It is the loss of `training_step`, in evaluation mode and without a trajectory term, and costs
    three passes an epoch; with several processes, it is the mean over theirs. What the step logs
    meanwhile is not logged, and the module's metrics of torchmetrics do not count it. A batch for
    which the step returns None is left out.

    Args:
        rho: As for `saltflat.sharpness.sam_sharpness`.
    """

    def __init__(self, rho: float = 0.05) -> None:
        self.rho = rho

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_step(self, pl_module, by_hand="saltflat.sharpness.sam_sharpness")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_last_batch or outputs.get("loss") is None:
            return
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        let_log = stand_before(pl_module, "log", lambda *args, **kwargs: None)
        try:
            with torch.random.fork_rng(devices), _metrics_kept(pl_module):
                step = _StepLoss(pl_module, batch_idx)
                rise = sam_sharpness(step, lambda loss, _: loss, [(batch, batch)], rho=self.rho)
        finally:
            let_log()
        pl_module.log("sharpness", rise, sync_dist=True)


@contextmanager
def _metrics_kept(module: nn.Module) -> Iterator[None]:
    """Within, the module's metrics count in copies of their states."""
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
