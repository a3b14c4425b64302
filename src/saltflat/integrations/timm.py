"""Trajectory terms as a task of timm's training loop.

timm's loaders, samplers and prefetchers hand on an image and one number, its target. So a sample's
index travels inside the target: (index + 1) * 2**24 + label.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

try:
    from timm.task import ClassificationTask
    from timm.utils import unwrap_model
except ImportError as error:
    raise ImportError("timm 1.0.30 or newer is missing: pip install 'saltflat[timm]'") from error

from saltflat.integrations.hooks import has_weights
from saltflat.memory.indexing import with_index
from saltflat.terms import Batch, TrajectoryTerm

__all__ = ["TrajectoryTask", "indexed_targets"]

_STRIDE = 2**24
"""More than any label; an index times this stays far below 2**63."""


class TrajectoryTask(ClassificationTask):
    """timm's classification task with a trajectory term in its loss.

    Call `set_epoch` at the start of every epoch, and `update_ema` after every optimizer step. On
    several processes, call `task.term.sync()` on every rank before rank 0 saves. The term's state
    is the checkpoint's "task_state".

    In evaluation mode the loss is only the criterion.

    Args:
        model: The model, which returns logits. In training with a distillation head it returns two;
            their mean counts, as in evaluation.
        criterion: The loss of logits and labels; of mixed targets, if the loader mixes images.
        term: Any trajectory term. If it needs an index, the loader is over `indexed_targets`.
        **kwargs: timm's: device, dtype, verbose.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[..., Tensor],
        term: TrajectoryTerm,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, criterion, **kwargs)
        self.term = term
        self._checked = False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins."""
        self.term.set_epoch(epoch)

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The losses and the logits of a batch.

        Returns:
            "loss", "output" (the logits), "task_loss" (the criterion) and "trajectory_loss". A term
            that replaces the loss is the whole "loss".
        """
        index = None
        if self.training:
            self._require_fit(target)
        if self.term.needs_index:
            index, target = target // _STRIDE - 1, target % _STRIDE
        output = self._logits(self.trainable_module(input))
        task_loss = loss = self.criterion(output, target)
        added = torch.zeros_like(task_loss)
        if self.training:
            labels = target if self.term.needs_labels else None
            added = self.term(output, Batch(index, ((input,), {}), labels))
            loss = added if self.term.replaces_loss else task_loss + added
        losses = {"task_loss": task_loss, "trajectory_loss": added}
        return {"loss": loss, "output": output, **losses}

    def _require_fit(self, target: Tensor) -> None:
        """Refuse targets that lack what the term needs."""
        term, name = self.term, type(self.term).__name__
        mixed = target.is_floating_point() or target.dim() != 1
        if mixed and (term.needs_index or term.needs_labels or not term.accepts_mixed):
            raise ValueError(
                f"{name} needs one whole number for each image as target, got {target.dtype} of "
                f"shape {tuple(target.shape)}: leave out mixup and CutMix, or use MESA"
            )
        if term.needs_index and not self._checked:
            self._checked = True  # once, because it waits for the device
            if bool((target < _STRIDE).any()):
                raise ValueError(
                    f"the targets hold no index, and {name} needs it: make the loader from "
                    "saltflat.integrations.timm.indexed_targets(dataset)"
                )

    def _logits(self, output: Any) -> Tensor:
        if isinstance(output, Tensor):
            return output
        if not getattr(unwrap_model(self.trainable_module), "distilled_training", False):
            raise ValueError(
                f"the model must return logits, got a {type(output).__name__}: build it without "
                "auxiliary outputs"
            )
        return torch.stack(list(output)).mean(0)

    def update_ema(self, step: int | None = None) -> None:
        """Let the term follow the model, and timm's own average if there is one."""
        super().update_ema(step)
        self.term.update(self.trainable_module)

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """The term's state, for timm's CheckpointSaver."""
        return {} if ema else {"trajectory": self.term.state_dict()}

    def load_task_state(
        self,
        state: dict[str, Any] | None,
        strict: bool = True,
        module: nn.Module | None = None,
        ema: bool = False,
    ) -> None:
        """Load the term's state, for timm's resume_task_checkpoint."""
        name = type(self.term).__name__
        if ema:
            return
        if state:
            self.term.load_state_dict(state["trajectory"])
        elif has_weights(self.term):
            raise ValueError(
                f"the checkpoint has no state of {name}, whose weights would stay those of the new "
                f"model: load the weights into the model first, then build {name} and the task"
            )
        else:
            warnings.warn(f"the checkpoint has no state of {name}, which starts anew", stacklevel=2)


def indexed_targets(dataset: Any) -> Dataset[tuple[Any, int]]:
    """A dataset of images and labels whose targets also hold the index, for a `TrajectoryTask`.

    timm's `create_loader` sets a transform on the dataset; it goes to the one inside.

    Example:
        >>> indexed_targets([("cat", 3), ("dog", 5)])[1]  # (1 + 1) * 2**24 + 5
        ('dog', 33554437)
    """
    return _IndexedTargets(dataset)


class _IndexedTargets(Dataset[tuple[Any, int]]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._indexed = with_index(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        index, image, *labels = self._indexed[number]
        if len(labels) != 1 or not 0 <= labels[0] < _STRIDE or labels[0] != int(labels[0]):
            raise ValueError(f"sample {index} must be (image, label), got labels {labels!r:.80}")
        return image, (index + 1) * _STRIDE + int(labels[0])

    @property
    def transform(self) -> Any:
        """The inner dataset's."""
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform
