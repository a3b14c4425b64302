"""What a trained model is worth: accuracy on the test set, sharpness on the training set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from saltflat.sharpness import sam_sharpness
from saltflat.train.augment import normalised, plain_batches, statistics, test_batches
from saltflat.train.config import Config, require
from saltflat.train.data import Data
from saltflat.train.ranks import ALONE, Ranks


class TestSet:
    """Batches of the test set, as often as they are asked for; a GPU keeps images that fit.

    Of several processes each has some of the samples.
    """

    __test__ = False  # its name is no test's

    def __init__(
        self, config: Config, data: Data, device: torch.device, ranks: Ranks = ALONE
    ) -> None:
        self._data, self._device, self._workers = data, device, config.data.workers
        self._ranks = ranks
        self._samples = torch.arange(ranks.rank, len(data.test), ranks.size)
        self._labels = data.test.labels[self._samples]
        self._size = max(config.data.batch_size, 1024 if device.type == "cuda" else 256)
        self._near: tuple[Tensor, Tensor] | None = None
        images = data.test.images
        if device.type != "cuda" or not isinstance(images, Tensor):
            return
        if images.nbytes < torch.cuda.mem_get_info(device)[0] // 8:
            self._near = images[self._samples].to(device), self._labels.to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._near is None:
            batches = test_batches(self._data, self._size, self._workers, self._samples)
            for (images, _), labels in zip(batches, self._labels.split(self._size), strict=True):
                yield images.to(self._device), labels.to(self._device)
        else:
            numbers = statistics(self._data, self._device)
            for images, labels in zip(
                *(part.split(self._size) for part in self._near), strict=True
            ):
                yield normalised(images, *numbers), labels

    def shares(self, hits: dict[str, Tensor]) -> dict[str, float]:
        """Of the samples of all processes, in percent, from the counts of this one's."""
        counts = self._ranks.sum({name: float(count) for name, count in hits.items()})
        return {name: 100 * count / len(self._data.test) for name, count in counts.items()}


@torch.no_grad()
def accuracies(
    config: Config, test_set: TestSet, models: dict[str, nn.Module], device: torch.device
) -> dict[str, float]:
    """Of each model on the test set, in percent, by its name."""
    for model in models.values():
        model.eval()
    right = dict.fromkeys(models, torch.zeros((), device=device))
    for images, labels in test_set:
        for name, model in models.items():
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                right[name] = right[name] + (model(images).argmax(1) == labels).sum()
    return test_set.shares(right)


def training_batches(
    data: Data, images: int, device: torch.device, *, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """A part of the training set as a test would see it: no augmentation, labels as trained on.

    Args:
        data: The images.
        images: How many; all where there are fewer.
        device: Where they stay, in batches of 256.
        seed: Which ones, in which order: the same for every model.
    """
    require(images >= 1, f"images must be at least 1, got {images}")
    # A stream of its own: by that of `noisy`, they would be the very samples with wrong labels.
    order = np.random.default_rng([seed % 2**32, 1]).permutation(len(data.train))[:images]
    batches = plain_batches(data, data.train, torch.from_numpy(order).split(256))
    return [(x.to(device), y.to(device)) for x, y in batches]


class TrainingSharpness:
    """SAM's sharpness on up to 1024 training images, which stay on the device once they are there.

    A measurement costs two forward passes and a backward pass over them, in float32 and evaluation
    mode, and leaves no trace in the model or in torch's random state.
    """

    def __init__(self, data: Data, device: torch.device) -> None:
        self._data, self._device = data, device
        self._batches: list[tuple[Tensor, Tensor]] = []

    def __call__(self, model: nn.Module) -> float:
        self._batches = self._batches or training_batches(self._data, 1024, self._device)
        return sam_sharpness(model, cross_entropy, self._batches)
