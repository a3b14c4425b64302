"""How a sample's index travels to timm's loop: inside its target.

timm's loaders, prefetchers and samplers hand on an image and one number. Through all of them goes
(index + 1) * 2**24 + label unchanged. A target that is a label alone would be of index -1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from saltflat.indexed import with_index

_PLACES = 2**24
"""More than any label; an index times this stays far below 2**63."""


def indexed_targets(dataset: Any) -> Dataset[tuple[Any, int]]:
    """A dataset of images and labels whose targets also hold the index, for a `TrajectoryTask`.

    timm's `create_loader` gives its transform to the dataset: it is passed on to the one inside.

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

    def __getitem__(self, place: int) -> tuple[Any, int]:
        index, image, *labels = self._indexed[place]
        if len(labels) != 1 or not 0 <= labels[0] < _PLACES or labels[0] != int(labels[0]):
            raise ValueError(
                f"sample {index} must be an image and a label, got also {labels!r:.80}"
            )
        return image, (index + 1) * _PLACES + int(labels[0])

    @property
    def transform(self) -> Any:
        """The inner dataset's."""
        return self.dataset.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.dataset.transform = transform


def taken_apart(target: Tensor, num_classes: int, *, check: bool) -> tuple[Tensor, Tensor]:
    """Index and label of each target.

    Args:
        target: The targets of a batch.
        num_classes: What the labels are below.
        check: Whether to look at the numbers, for which the device has to be waited for.

    Raises:
        ValueError: If the targets are mixed ones, or, by the check, no index is in them.
    """
    if target.is_floating_point() or target.dim() != 1:
        raise ValueError(
            f"SAF needs a number for each image, got {target.dtype} of shape "
            f"{tuple(target.shape)}: with mixup or CutMix, whose images are no one's, use MESA"
        )
    index, label = target // _PLACES - 1, target % _PLACES
    if check:
        if bool((index < 0).any()):
            raise ValueError(
                "the targets hold no index, and SAF must know its samples: make the loader from "
                "saltflat.integrations.timm.indexed_targets(dataset)"
            )
        if (most := int(label.max())) >= num_classes:
            raise ValueError(f"label {most} is not below SAF's num_classes of {num_classes}")
    return index, label
