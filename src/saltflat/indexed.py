"""Samples that carry their own index."""

from __future__ import annotations

import operator
from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset


def with_index(dataset: Dataset[Any]) -> Dataset[tuple[Any, ...]]:
    """A dataset that yields (index, *sample) for each sample of another.

    The index is made where the sample is, so the two travel together through any sampler, worker,
    prefetcher or collate function. A sample that is not a tuple or list is yielded as
    (index, sample).

    Args:
        dataset: Any map-style dataset.

    Raises:
        TypeError: If the dataset is iterable-style: its samples have no index that lasts.

    Example:
        >>> with_index([("cat", 3), ("dog", 5)])[1]
        (1, 'dog', 5)
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{type(dataset).__name__} has no index that means the same sample in every epoch: "
            "use a map-style dataset, or MESA, which needs no index"
        )
    return _WithIndex(dataset)


class _WithIndex(Dataset[tuple[Any, ...]]):
    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = self._from_start(index)
        return _indexed(index, self.dataset[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        """What a DataLoader asks for: a whole batch at once, where the dataset can."""
        indices = [self._from_start(index) for index in indices]
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self.dataset[i] for i in indices]
        return [_indexed(i, sample) for i, sample in zip(indices, samples, strict=True)]

    def _from_start(self, index: int) -> int:
        """The one number that a sample has, however it was asked for."""
        number, length = operator.index(index), len(self)
        if not -length <= number < length:
            raise IndexError(f"index {number} of a dataset of {length}")
        return number + length if number < 0 else number


def _indexed(index: int, sample: Any) -> tuple[Any, ...]:
    return (index, *sample) if isinstance(sample, tuple | list) else (index, sample)
