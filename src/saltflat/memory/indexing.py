"""Samples that carry their own index."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset


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
    return _WithIndex(dataset)


def with_index_column(dataset: Any) -> Any:
    """A dataset of dictionaries that have their index as "index"; one that is there stays.

    No sample is looked at, so that one with random augmentation draws no number for it.

    Args:
        dataset: A dataset of the `datasets` library, or any map-style dataset of dictionaries.

    Raises:
        TypeError: If the dataset is iterable-style.
        ValueError: If its column "index" does not number the samples.

    Example:
        >>> with_index_column([{"text": "cat"}, {"text": "dog"}])[1]
        {'index': 1, 'text': 'dog'}
    """
    keyed = _Keyed(dataset)
    if not hasattr(dataset, "add_column"):
        return keyed
    if "index" in dataset.column_names:
        _require_numbers(dataset.with_format("numpy")["index"][:])
        numbered = dataset
    else:
        numbered = dataset.add_column("index", list(range(len(keyed))))
    shown = numbered.format  # a transform or a choice of columns may hide it
    return numbered if shown["type"] != "custom" and "index" in shown["columns"] else keyed


def _require_numbers(column: Any) -> None:
    values = np.asarray(column)
    if values.dtype.kind not in "iu" or values.ndim != 1 or len(np.unique(values)) < len(values):
        raise ValueError(
            "the column 'index' must hold a whole number for each sample, none of them twice: "
            "have it made anew, dataset.remove_columns('index')"
        )


def indexed_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that yields (index, batch) for each batch of another, which is made elsewhere.

    The loader's own collate function makes the batch of the samples without their index. Order,
    workers and all other settings stay. A loader whose samples have an index already is returned
    unchanged.

    Args:
        loader: A DataLoader over a map-style dataset.

    Raises:
        TypeError: If the dataset is iterable-style; or if it is not a DataLoader, or one of a class
            of its own.
        ValueError: If the loader does not make batches.

    Example:
        >>> list(indexed_loader(DataLoader(["cat", "dog", "cow"], batch_size=2)))
        [(tensor([0, 1]), ['cat', 'dog']), (tensor([2]), ['cow'])]
    """
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"indexed_loader takes a DataLoader, got a {kind}: an index is a place in one dataset, "
            "so load several as one, ConcatDataset([...])"
        )
    if isinstance(loader.dataset, _Numbered):
        return loader
    if type(loader) is not DataLoader:
        raise TypeError(
            f"{kind} is a class of its own, whose settings are not known here: build it over "
            "with_index(dataset) instead"
        )
    numbered = _Numbered(loader.dataset)
    batches = loader.batch_sampler
    if batches is None:
        raise ValueError("the loader has batch_size=None and so makes no batches")
    order: dict[str, Any] = {"batch_sampler": batches}
    if type(batches) is BatchSampler:  # whose parts another sampler may be put between
        order = {name: getattr(loader, name) for name in ("batch_size", "sampler", "drop_last")}
    others = {name: getattr(loader, name) for name in _LOADER_SETTINGS}
    return DataLoader(numbered, collate_fn=_Collate(loader.collate_fn), **order, **others)


def split_index(batch: Any) -> tuple[Tensor, Any]:
    """A batch's index, and the batch without: what `with_index` and `indexed_loader` added.

    Args:
        batch: (index, ...) or a dictionary with "index". A single thing after the index is given
            back as it is, several as the rest of the list or tuple.

    Raises:
        ValueError: If there is no index.

    Example:
        >>> split_index([torch.tensor([4, 2]), "images", "labels"])
        (tensor([4, 2]), ['images', 'labels'])
    """
    if isinstance(batch, Mapping) and "index" in batch:
        return batch["index"], {name: part for name, part in batch.items() if name != "index"}
    first = batch[0] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    if isinstance(first, Tensor) and first.dim() == 1 and not first.is_floating_point():
        return first, batch[1] if len(batch) == 2 else batch[1:]
    raise ValueError(
        f"no index in a batch of type {type(batch).__name__}, and SAF must know its samples: load "
        "with_index(dataset) in place of the dataset, or wrap the loader in indexed_loader(loader)"
    )


_LOADER_SETTINGS = (
    *("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context"),
    *("worker_init_fn", "timeout", "generator", "pin_memory", "pin_memory_device", "in_order"),
)


class _Collate:
    """From numbered samples to their numbers and a batch of them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, numbered: list[tuple[int, Any]]) -> tuple[Tensor, Any]:
        numbers, samples = zip(*numbered, strict=True)
        return torch.tensor(numbers), self.collate(list(samples))


class _Numbered(Dataset[tuple[Any, ...]]):
    """Yields (index, sample)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"{type(dataset).__name__} has no index that means the same sample in every epoch: "
                "use a map-style dataset, or MESA, which needs no index"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        index = self._from_start(index)
        return index, self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        """What a DataLoader asks for: a whole batch at once, where the dataset can."""
        indices = [self._from_start(index) for index in indices]
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch else [self.dataset[i] for i in indices]
        return list(zip(indices, samples, strict=True))

    def _from_start(self, index: int) -> int:
        """The one number that a sample has, however it was asked for."""
        number, length = operator.index(index), len(self)
        if not -length <= number < length:
            raise IndexError(f"index {number} of a dataset of {length}")
        return number + length if number < 0 else number


class _WithIndex(_Numbered):
    """Yields (index, *sample)."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return _flat(*super().__getitem__(index))

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, ...]]:
        return [_flat(*numbered) for numbered in super().__getitems__(indices)]


class _Keyed(_Numbered):
    """Yields {"index": index, **sample}."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        number, sample = super().__getitem__(index)
        return {"index": number, **sample}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:  # type: ignore[override]
        return [{"index": i, **sample} for i, sample in super().__getitems__(indices)]


def _flat(index: int, sample: Any) -> tuple[Any, ...]:
    return (index, *sample) if isinstance(sample, tuple | list) else (index, sample)
