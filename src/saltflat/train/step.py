"""One training step, of any method, in any precision and number of parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.terms import Batch as TermBatch
from saltflat.train.augment import Batch, TrainLoader
from saltflat.train.config import Config
from saltflat.train.methods import Training
from saltflat.train.parallel import synced
from saltflat.train.state import State

Steps = Callable[[int, int], Iterator[None]]
"""The steps of an epoch but the first so many; each is done when the iterator gets there."""


def plain_steps(config: Config, state: State, loader: TrainLoader) -> Steps:
    """Steps on batches that a loader makes, one operation after another."""
    step = build_step(config, state.training, state.network, state.sums)

    def steps(epoch: int, skip: int) -> Iterator[None]:
        for batch in loader.batches(epoch, skip, views=state.training.another_view):
            step(batch)
            state.training.after_step(state.model)
            yield

    return steps


def build_step(
    config: Config, training: Training, model: nn.Module, sums: Tensor
) -> Callable[[Batch], None]:
    """A training step on a batch, to the sums of whose rows it adds these.

    Args:
        config: The run.
        training: The method.
        model: What is trained, perhaps wrapped for several processes.
        sums: Of vanilla losses, extra losses and right answers, on the model's device.
    """
    device = sums.device
    network: Any = torch.compile(model) if config.compile else model
    term, teacher = training.term, training.teacher
    if term is not None and teacher is not None and device.type == "cuda":
        folded = teacher.fold()
        if config.compile and not folded:
            teacher.module.compile()
    # No weight is cast twice in a pass, and a cache would outlive a recorded step.
    half = {"enabled": config.precision == "bf16", "cache_enabled": False}
    smoothing = training.label_smoothing
    smoothing = config.label_smoothing if smoothing is None else smoothing
    replaces = term is not None and term.replaces_loss
    smoothing = 0.0 if replaces else smoothing
    trained = [p for p in model.parameters() if p.requires_grad]

    vanilla = partial(cross_entropy, reduction="none", label_smoothing=smoothing)

    def row_losses(logits: Tensor, labels: Tensor, partners: Tensor, share: float) -> Tensor:
        """Cross-entropy of each row, of both labels where the batch is mixed."""
        losses = vanilla(logits, labels)
        if share == 1.0:
            return losses
        return share * losses + (1 - share) * vanilla(logits, partners)

    def laid_out(images: Tensor) -> Tensor:
        images = images.to(device, non_blocking=True)
        return images.to(memory_format=torch.channels_last) if config.channels_last else images

    def step(batch: Batch) -> None:
        images = laid_out(batch.images)
        view = images if batch.view is None else laid_out(batch.view)
        labels = batch.labels.to(device, non_blocking=True)
        mixed = batch.mixed
        partners = labels if mixed is None else mixed.labels.to(device)
        share = 1.0 if mixed is None else mixed.share
        used = None if mixed is not None and term and not term.accepts_mixed else term
        passes = count()

        def forward(rows: slice | Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            extra = None
            with torch.autocast(device.type, torch.bfloat16, **half):
                logits = network(images[rows])
                if used is not None:
                    seen = TermBatch(batch.index[rows], ((view[rows],), {}), labels[rows])
                    extra = used(logits, seen)
            return logits, row_losses(logits.float(), labels[rows], partners[rows], share), extra

        def note(logits: Tensor, losses: Tensor, extra: Tensor | None, own: Tensor) -> None:
            right = logits.detach().argmax(1) == own
            sums[::2].add_(torch.stack([losses.detach(), right.to(losses.dtype)]).sum(1))
            if extra is not None:
                sums[1].add_(extra.detach(), alpha=len(own))

        def whole() -> Tensor:
            """A pass over the batch in `accumulate` parts; leaves the gradients of its mean."""
            training.optimizer.zero_grad()
            first, seen = next(passes) == 0, []
            size = -(-len(labels) // config.optimizer.accumulate)
            for start in range(0, len(labels), size):
                rows = slice(start, start + size)
                with synced(model, last=rows.stop >= len(labels)):
                    logits, losses, extra = forward(rows)
                    loss = losses.mean()
                    if extra is not None:
                        loss = extra if replaces else loss + extra
                    if len(losses) < len(labels):
                        loss = loss * (len(losses) / len(labels))
                    loss.backward()
                seen.append(loss.detach())
                if first:
                    note(logits, losses, extra, labels[rows])
            if config.optimizer.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, config.optimizer.clip_norm)
            return seen[0] if len(seen) == 1 else torch.stack(seen).sum()

        def per_row(rows: Tensor | None) -> Tensor:
            everything = torch.arange(len(labels), device=device)
            logits, losses, _ = forward(everything if rows is None else rows)
            if next(passes) == 0:
                note(logits, losses, None, labels)
            return losses

        training.optimizer.step(per_row if training.per_row else whole)  # type: ignore[arg-type]

    return step
