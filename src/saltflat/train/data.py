"""Where raw images and labels come from; `augment.py` makes batches of them."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from saltflat.train.config import DataConfig, nearest, require

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation of each channel; of bytes, after division by 255."""
KNOWN: dict[str, Statistics] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
CIFAR = {"cifar10": ("CIFAR10", 10), "cifar100": ("CIFAR100", 100)}
"""What torchvision calls them, and how many classes they have."""


class Labelled(Dataset[tuple[Tensor, int]]):
    """Samples: images, a tensor or whatever gives one for an index, and a label for each."""

    def __init__(self, images: Any, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


@dataclass(frozen=True)
class Data:
    """Raw images (channels, height, width) to train and to test on."""

    train: Labelled
    test: Labelled
    num_classes: int
    in_channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load_data(config: DataConfig) -> Data:
    """The images that a config names.

    Raises:
        ValueError: If there is no such data, or something is wrong with it.
        ImportError: If a package that this data needs is missing.
    """
    data = _source(config.name)(config)
    require(data.num_classes > 1, f"{config.name}: all samples are of one class")
    require(
        len(data.train.labels.unique()) > 1,
        f"{config.name}: the first {config.train_size} samples are of one class; the data are "
        "sorted, so take more or shuffle them",
    )
    if config.holdout:
        data = _held_out(data, config.holdout)
    labels = noisy(data.train.labels, data.num_classes, config.label_noise, config.noise_seed)
    return replace(data, train=Labelled(data.train.images, labels))


def noisy(labels: Tensor, num_classes: int, share: float, seed: int) -> Tensor:
    """Labels of which a share, to the nearest sample, is another class, each as likely."""
    rng = np.random.default_rng(seed % 2**32)
    chosen = torch.from_numpy(rng.permutation(len(labels))[: round(share * len(labels))])
    step = torch.from_numpy(rng.integers(1, num_classes, len(chosen)))
    return labels.index_copy(0, chosen, (labels[chosen] + step) % num_classes)


def _held_out(data: Data, count: int) -> Data:
    """Some of the training samples, chosen at random once and for all, in place of the test set."""
    total = len(data.train)
    require(count < total, f"holdout {count} leaves none of the {total} samples to train on")
    order = torch.from_numpy(np.random.default_rng(0).permutation(total))
    parts = order[count:].sort().values, order[:count].sort().values
    train, test = (Labelled(_some(data.train.images, p), data.train.labels[p]) for p in parts)
    return replace(data, train=train, test=test)


def _some(images: Any, numbers: Tensor) -> Any:
    return images[numbers] if isinstance(images, Tensor) else _Some(images, numbers)


class _Some:
    """Some of the images that are made when they are asked for."""

    def __init__(self, images: Any, numbers: Tensor) -> None:
        self.images = images
        self.numbers = numbers

    def __getitem__(self, index: int) -> Tensor:
        image: Tensor = self.images[int(self.numbers[index])]
        return image


def _source(name: str) -> Callable[[DataConfig], Data]:
    named = {"digits": _digits, "cifar10": _cifar, "cifar100": _cifar}
    if name in named:
        return named[name]
    if name.startswith("hf:"):
        return _hub
    if name.partition(":")[0] == "synthetic":
        return _synthetic
    if name.endswith(".npz"):
        return _npz
    if Path(name).is_dir():
        return _folder
    hint = nearest(name, [*named, "FILE.npz", "hf:NAME", "synthetic:SIDE:CLASSES"])
    raise ValueError(f"data {name!r} is no known name and no folder: {hint}")


def _digits(config: DataConfig) -> Data:
    with _needs("'saltflat[train]'"):
        from sklearn.datasets import load_digits
    digits, size = load_digits(), config.train_size or 1000
    total = len(digits.target)
    require(size < total, f"train_size {size} leaves none of the {total} digits to test on")
    order = np.random.default_rng(0).permutation(total)
    images = torch.tensor(digits.images[order, None], dtype=torch.float32) / 16
    labels = torch.tensor(digits.target[order])
    train, test = Labelled(images[:size], labels[:size]), Labelled(images[size:], labels[size:])
    return _in_memory(config, train, test, num_classes=10)


def _cifar(config: DataConfig) -> Data:
    with _needs("'saltflat[train]'"):
        from torchvision import datasets
    kind, num_classes = CIFAR[config.name]
    splits = [getattr(datasets, kind)(config.root, train, download=True) for train in (True, False)]
    train, test = (Labelled(_channels_first(s.data), torch.tensor(s.targets)) for s in splits)
    return _in_memory(config, train, test, num_classes)


def _synthetic(config: DataConfig) -> Data:
    found = re.fullmatch(r"synthetic:(\d+):(\d+)(?::(\d+))?", config.name)
    if found is None:
        raise ValueError(
            f"data {config.name!r} is not of the form synthetic:SIDE:CLASSES[:SAMPLES], as "
            "synthetic:32:100"
        )
    side, classes, samples = (int(number) for number in found.groups("2048"))
    least = side >= 1 and classes >= 2 and samples >= 2
    require(least, f"{config.name}: SIDE must be at least 1, CLASSES and SAMPLES at least 2")
    rng = np.random.default_rng(0)

    def split(count: int) -> Labelled:
        images = rng.integers(256, size=(count, 3, side, side), dtype=np.uint8)
        return Labelled(torch.from_numpy(images), torch.arange(count) % classes)

    return _in_memory(config, split(samples), split(256), classes)


def _npz(config: DataConfig) -> Data:
    try:
        train, test = _read_npz(Path(config.name))
    except (ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{config.name}: {error}") from error
    return _in_memory(config, train, test, _count_classes(config.name, train.labels, test.labels))


def _read_npz(file: Path) -> tuple[Labelled, Labelled]:
    require(file.is_file(), "no such file")
    require(zipfile.is_zipfile(file), "not an .npz file")
    with np.load(file) as arrays:
        missing = [key for key in ("x_train", "y_train", "x_test", "y_test") if key not in arrays]
        require(not missing, f"has no {', '.join(missing)}, only {', '.join(arrays) or 'nothing'}")
        train, test = (_checked(arrays, f"x_{split}", f"y_{split}") for split in ("train", "test"))
    kinds = [(*split.images.shape[1:], split.images.dtype) for split in (train, test)]
    require(kinds[0] == kinds[1], f"x_train and x_test differ: {kinds[0]} and {kinds[1]}")
    return train, test


def _checked(arrays: Any, x: str, y: str) -> Labelled:
    images, labels = arrays[x], arrays[y]
    shape = images.shape if images.ndim == 4 else (*images.shape, 1)
    square = len(shape) == 4 and shape[1] == shape[2] and images.size > 0
    require(square, f"{x} is not square images, NHWC or NHW, but of shape {images.shape}")
    numbers = images.dtype == np.uint8 or images.dtype.kind == "f"
    require(numbers, f"{x} must be uint8 or float, is {images.dtype}")
    require(bool(np.isfinite(images).all()), f"{x} has values that are not finite")
    require(labels.dtype.kind in "iu", f"{y} must be whole numbers, is {labels.dtype}")
    one_each = labels.shape == shape[:1]
    require(one_each, f"{y} must be one label for each of {shape[0]}, is of shape {labels.shape}")
    images = images if images.dtype == np.uint8 else images.astype(np.float32)
    return Labelled(_channels_first(images.reshape(shape)), torch.tensor(labels.astype(np.int64)))


def _count_classes(name: str, train: Tensor, test: Tensor) -> int:
    least, most = min(int(train.min()), int(test.min())), int(test.max())
    require(least >= 0, f"{name}: labels must be 0 or more, got {least}")
    present = train.unique().tolist()
    empty = next((label for label, found in enumerate(present) if label != found), None)
    require(empty is None, f"{name}: no training sample has label {empty}, but one {present[-1]}")
    require(most < len(present), f"{name}: no training sample has test label {most}")
    return len(present)


def _in_memory(config: DataConfig, train: Labelled, test: Labelled, num_classes: int) -> Data:
    count = _train_size(config, len(train))
    train = Labelled(train.images[:count], train.labels[:count])
    channels, side = train.images.shape[1:3]
    size, known = config.image_size or side, KNOWN.get(config.name)
    if size != side:  # whose deviation is another, too
        train, test = (Labelled(resized(s.images, size, size), s.labels) for s in (train, test))
        known = None
    mean, std = known or _statistics(train.images)
    return Data(train, test, num_classes, channels, size, mean, std)


def resized(images: Tensor, height: int, width: int) -> Tensor:
    """A batch of images in another size."""
    return F.interpolate(images, (height, width), mode="bilinear", antialias=True)


def _statistics(images: Tensor) -> Statistics:
    scale = 255 if images.dtype == torch.uint8 else 1
    pairs = [torch.std_mean(channel.float() / scale, correction=0) for channel in images.unbind(1)]
    # A channel that never changes is left as it is.
    return tuple(m.item() for _, m in pairs), tuple(s.item() or 1.0 for s, _ in pairs)


def _train_size(config: DataConfig, available: int) -> int:
    size = config.train_size or available
    require(size <= available, f"train_size {size} exceeds the {available} of {config.name}")
    return size


def _channels_first(images: Any) -> Tensor:
    return torch.from_numpy(images).movedim(-1, 1).contiguous()


class _Decoded:
    """Images that are decoded when they are asked for: RGB bytes, each of its own size."""

    def __init__(self, items: Any, opened: Callable[[Any], Any]) -> None:
        self.items = items
        self.opened = opened

    def __getitem__(self, index: int) -> Tensor:
        image = self.opened(self.items[index]).convert("RGB")
        return torch.from_numpy(np.array(image)).movedim(-1, 0)


def _on_disk(config: DataConfig, train: Labelled, test: Labelled, num_classes: int) -> Data:
    train = Labelled(train.images, train.labels[: _train_size(config, len(train))])
    return Data(train, test, num_classes, 3, config.image_size or 224, *KNOWN["imagenet"])


def _folder(config: DataConfig) -> Data:
    with _needs("'saltflat[train]'"):
        from torchvision.datasets import ImageFolder
    root = Path(config.name)
    found = [name for name in ("train", "val", "test") if (root / name).is_dir()]
    both = found[:1] == ["train"] and len(found) > 1
    require(both, f"{root}: needs folders train and val (or test), has {found or 'neither'}")
    train, test = (ImageFolder(root / name) for name in found[:2])
    strange = sorted(set(test.classes) - set(train.classes))
    require(not strange, f"{root}: {found[1]} has classes that train has not: {strange}")
    # They come sorted by class; the first so many are to be of every class.
    shuffled = [train.samples[i] for i in np.random.default_rng(0).permutation(len(train))]
    renamed = [(path, train.class_to_idx[test.classes[label]]) for path, label in test.samples]
    pairs = (zip(*samples, strict=True) for samples in (shuffled, renamed))
    first, second = (Labelled(_Decoded(x, train.loader), torch.tensor(y)) for x, y in pairs)
    return _on_disk(config, first, second, len(train.classes))


def _hub(config: DataConfig) -> Data:
    with _needs("datasets"):
        import datasets  # type: ignore[import, unused-ignore]
    name = config.name.removeprefix("hf:")
    splits = datasets.load_dataset(name)
    found = [split for split in ("train", "test", "validation") if split in splits]
    both = found[:1] == ["train"] and len(found) > 1
    require(both, f"{name}: needs splits train and test (or validation), has {list(splits)}")
    kinds = splits["train"].features
    image = next((key for key in kinds if isinstance(kinds[key], datasets.Image)), None)
    classes = (key for key in kinds if isinstance(kinds[key], datasets.ClassLabel))
    label = "label" if "label" in kinds else next(classes, None)
    usable = image is not None and "int" in getattr(kinds.get(label), "dtype", "")
    require(usable, f"{name}: needs a column of images and a whole-number label, has {kinds}")
    labels = {split: torch.tensor(splits[split][label][:]) for split in found}
    # A test split without its labels, as ImageNet's, has -1 for each.
    held = "validation" if len(found) > 2 and labels["test"].max() < 0 else found[1]
    pictures = itemgetter(image)
    train, test = (Labelled(_Decoded(splits[s], pictures), labels[s]) for s in ("train", held))
    return _on_disk(config, train, test, _count_classes(name, train.labels, test.labels))


@contextmanager
def _needs(package: str) -> Iterator[None]:
    """Add to an ImportError how to install what is missing."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{error}: pip install {package}") from error
