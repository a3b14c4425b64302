"""SAF and MESA as a task of timm's training loop.

timm's loaders, prefetchers and samplers hand on an image and one number, its target. So SAF's index
travels inside that number, (index + 1) * num_classes + label, through all of them unchanged, and
the task takes the two apart. A target that is a label alone would be of index -1, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

try:
    from timm.task import ClassificationTask
except ImportError as error:
    raise ImportError("timm 1.0.30 or newer is missing: pip install 'saltflat[timm]'") from error

from saltflat.indexed import with_index
from saltflat.mesa import MESA
from saltflat.saf import SAF


def indexed_targets(dataset: Any, num_classes: int) -> Dataset[tuple[Any, int]]:
    """A dataset of images and labels whose targets also hold the index, for a `TrajectoryTask`.

    timm's `create_loader` gives its transform to the dataset: it is passed on to the one inside.

    Example:
        >>> indexed_targets([("cat", 3), ("dog", 5)], num_classes=10)[1]  # (1 + 1) * 10 + 5
        ('dog', 25)
    """
    return _IndexedTargets(dataset, num_classes)


class _IndexedTargets(Dataset[tuple[Any, int]]):
    def __init__(self, dataset: Any, num_classes: int) -> None:
        self.dataset = dataset
        self.num_classes = num_classes
        self._indexed = with_index(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[Any, int]:
        index, image, label = self._indexed[place]
        if not 0 <= label < self.num_classes:
            raise ValueError(f"label {label} of sample {index} is not below {self.num_classes}")
        return image, (index + 1) * self.num_classes + int(label)

    @property
    def transform(self) -> Any:
        """The inner dataset's."""
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform


class TrajectoryTask(ClassificationTask):
    """timm's classification task with SAF or MESA in its loss.

    Call `set_epoch` when an epoch begins and, for MESA, `update_ema` after each optimizer step, as
    timm does for its own average. The term's state is in the checkpoint's "task_state", its loss in
    the result's "trajectory_loss", the criterion's in "task_loss".

    Args:
        model: The model. If it returns several heads, as distilled ones can in training, their mean
            counts, which is what it returns in evaluation.
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
            about, target = self._taken_apart(target, self.term.memory.num_classes)
        output = self.trainable_module(input)
        if isinstance(output, tuple | list):
            output = torch.stack(list(output)).mean(0)
        task_loss = self.criterion(output, target)
        term = self.term(output, about)
        losses = {"task_loss": task_loss, "trajectory_loss": term}
        return {"loss": task_loss + term, "output": output, **losses}

    def _taken_apart(self, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Index and label."""
        if target.is_floating_point() or target.dim() != 1:
            raise ValueError(
                f"SAF needs a number for each image, got {target.dtype} of shape "
                f"{tuple(target.shape)}: with mixup or CutMix, whose images are no one's, use MESA"
            )
        if not self._checked:  # once, because it waits for the device
            if bool((target < num_classes).any()):
                raise ValueError(
                    "the targets hold no index, and SAF must know its samples: make the loader "
                    "from saltflat.integrations.timm.indexed_targets(dataset, num_classes)"
                )
            self._checked = True
        return target // num_classes - 1, target % num_classes

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
        if state and not ema:
            self.term.load_state_dict(state["trajectory"])
