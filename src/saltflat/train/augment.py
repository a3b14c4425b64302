"""From raw samples to batches: a crop, a flip, a blank square, another image mixed in.

Chance enters through `stream` alone. The order of an epoch and the numbers that augment each sample
come from (seed, epoch), what is mixed from (seed, epoch, step): so a batch is the same whatever the
number of workers and whichever batches came before, and a run may go on from any step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from saltflat.memory import with_index
from saltflat.train.config import DataConfig, require
from saltflat.train.data import Data, Labelled, resized

ORDER, AUGMENT, MIX, RANK, VIEW = range(5)
"""What a stream of random numbers is for."""


class Mixed(NamedTuple):
    """How a batch was mixed: its loss is share * ce(labels) + (1 - share) * ce(mixed.labels)."""

    partner: Tensor
    """For each row, the row of the whole batch that it was mixed with."""
    share: float
    labels: Tensor
    """The partners'."""


class Batch(NamedTuple):
    """What a training step gets."""

    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name
    images: Tensor
    labels: Tensor
    mixed: Mixed | None
    view: Tensor | None = None
    """The images augmented anew, where they were asked for; mixed in the same way."""


class Share(NamedTuple):
    """The rows of a batch that a process has: the same part of each of the batch's own parts."""

    rank: int = 0
    size: int = 1
    parts: int = 1
    """In which the batch is computed, one after another; so they too are those of one process."""

    def of(self, rows: int) -> Tensor:
        """Which of so many rows.

        Raises:
            ValueError: If they cannot be divided into equal shares.

        Example:
            >>> [Share(rank, 2, parts=2).of(8).tolist() for rank in (0, 1)]
            [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        if self.size == 1:
            return torch.arange(rows)
        require(
            rows % (self.size * self.parts) == 0,
            f"batch_size {rows} is of all processes together, and must be a multiple of "
            f"{self.size} processes times accumulate {self.parts}",
        )
        return torch.arange(rows).view(self.parts, self.size, -1)[:, self.rank].flatten()


class TrainLoader:
    """The batches of an epoch, shuffled, augmented and normalised; a last, smaller one is dropped.

    Of several processes each has a share of every batch, and what it sees there is what it would
    see if it had the whole.

    Raises:
        ValueError: If a batch is larger than the training set, or the cutout than an image.
    """

    def __init__(
        self, data: Data, config: DataConfig, seed: int, share: Share | None = None
    ) -> None:
        size, samples = config.batch_size, len(data.train)
        require(size <= samples, f"batch_size {size} exceeds the {samples} training samples")
        side, hole = data.image_size, config.cutout
        require(hole <= side, f"cutout {hole} exceeds the side of an image, {side}")
        self.data, self.config, self.seed = data, config, seed
        self._own = (share or Share()).of(size)

    def __len__(self) -> int:
        return len(self.data.train) // self.config.batch_size

    def batches(self, epoch: int, skip: int = 0, *, views: bool = False) -> Iterator[Batch]:
        """The batches of an epoch but the first `skip`; the rest are the same, bit for bit.

        With `views`, each has another view of its images too.
        """
        require(0 <= skip <= len(self), f"skip must be within [0, {len(self)}], got {skip}")
        mixtures = [self._mixture(epoch, step) for step in range(skip, len(self))]
        rows = [self._rows(mixture) for mixture in mixtures]
        order = self.order(epoch)[skip:]
        steps = [batch[needed].tolist() for batch, needed in zip(order, rows, strict=True)]
        draws = self.draws(epoch, views=views)
        collate = partial(training_batch, data=self.data, config=self.config, draws=draws)
        loader = _loader(with_index(self.data.train), steps, collate, self.config.workers)
        batches = zip(loader, mixtures, rows, strict=True)
        return (self._mixed(*batch) for batch in batches)

    def order(self, epoch: int) -> Tensor:
        """Which samples each step of an epoch has, of shape (steps, batch)."""
        size, samples = self.config.batch_size, len(self.data.train)
        order = stream(self.seed, epoch, ORDER).permutation(samples)
        return torch.from_numpy(order[: len(self) * size].reshape(-1, size))

    def draws(self, epoch: int, *, views: bool = False) -> list[Draws]:
        """The numbers that augment each sample in an epoch, and those that make another view."""
        shapes, samples = self.config.augment == "inception", len(self.data.train)
        purposes = (AUGMENT, VIEW) if views else (AUGMENT,)
        return [draw(stream(self.seed, epoch, p), samples, shapes=shapes) for p in purposes]

    def _mixture(self, epoch: int, step: int) -> Mixture | None:
        return draw_mixture(
            stream(self.seed, epoch, MIX, step),
            self.config.batch_size,
            self.data.image_size,
            mixup=self.config.mixup,
            cutmix=self.config.cutmix,
        )

    def _rows(self, mixture: Mixture | None) -> Tensor:
        """The rows of a batch that are loaded: its own, and partners that are not among them."""
        if mixture is None:
            return self._own
        partners = mixture.partner[self._own]
        return torch.cat([self._own, partners[~torch.isin(partners, self._own)]])

    def _mixed(self, batch: Batch, mixture: Mixture | None, rows: Tensor) -> Batch:
        if mixture is None:
            return batch
        place = torch.empty(self.config.batch_size, dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        partner = mixture.partner[self._own]
        others, own = place[partner], len(self._own)
        return Batch(
            batch.index[:own],
            mix(batch.images, others, own, mixture),
            batch.labels[:own],
            Mixed(partner, mixture.share, batch.labels[others]),
            None if batch.view is None else mix(batch.view, others, own, mixture),
        )


def test_batches(
    data: Data, batch_size: int, workers: int = 0, samples: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The test images, or some, centred and normalised, with their labels, in order."""
    samples = torch.arange(len(data.test)) if samples is None else samples
    return plain_batches(data, data.test, samples.split(batch_size), workers)


def plain_batches(
    data: Data, samples: Labelled, steps: Sequence[Tensor], workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples by their numbers, a batch for each step: centred, normalised, not augmented."""
    numbers = [step.tolist() for step in steps]
    return iter(_loader(samples, numbers, partial(plain_batch, data=data), workers))


def _loader(
    dataset: Dataset[Any], steps: list[list[int]], collate: Callable[..., Any], workers: int
) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_sampler=steps,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # Its own: from the global one it would draw at each start, and a resumed run starts anew.
        generator=torch.Generator(),
    )


def plain_batch(samples: Sequence[tuple[Tensor, int]], data: Data) -> tuple[Tensor, Tensor]:
    """Images and labels, from samples of a test set."""
    images, labels = zip(*samples, strict=True)
    whole = torch.stack([centred(image, data.image_size) for image in images])
    return normalised(whole, *statistics(data)), torch.tensor(labels)


def training_batch(
    samples: Sequence[tuple[int, Tensor, int]],
    data: Data,
    config: DataConfig,
    draws: Sequence[Draws],
) -> Batch:
    """A batch of samples that carry their index, not mixed yet; the second draws make the view."""
    numbers, raw, labels = zip(*samples, strict=True)
    index = torch.tensor(numbers)

    def view(draws: Draws) -> Tensor:
        chosen = draws.of(index)
        if config.augment == "inception":
            parts = zip(raw, draws.shapes[index].tolist(), chosen.place.tolist(), strict=True)
            images = torch.stack([random_part(*part, data.image_size) for part in parts])
        else:
            images = torch.stack([centred(image, data.image_size) for image in raw])
        return augmented(images, chosen, config, *statistics(data))

    images, *others = map(view, draws)
    return Batch(index, images, torch.tensor(labels), None, *others)


def augmented(
    images: Tensor, draws: Draws, config: DataConfig, mean: Tensor, std: Tensor
) -> Tensor:
    """Raw images of one size, with the numbers drawn for each, as a network is to see them."""
    if config.augment == "basic":
        images = shifted(images, draws.place)
    if config.augment != "none":
        images = torch.where(draws.flip[:, :, None, None] < 0.5, images.flip(-1), images)
    images = normalised(images, mean, std)
    if config.cutout:
        images = cut_out(images, draws.hole, config.cutout)
    return images


def stream(seed: int, epoch: int, purpose: int, step: int = 0) -> np.random.Generator:
    """Random numbers that depend on these four alone."""
    return np.random.default_rng([word % 2**32 for word in (seed, epoch, purpose, step)])


class Draws(NamedTuple):
    """Numbers within [0, 1) for each sample of an epoch."""

    flip: Tensor
    place: Tensor  # of a crop, down and across
    hole: Tensor  # its middle, down and across
    shapes: Tensor  # area and aspect of a random part, ten to try in turn

    def of(self, index: Tensor) -> Draws:
        """Those of some samples, but for the shapes."""
        return self._replace(flip=self.flip[index], place=self.place[index], hole=self.hole[index])


def draw(rng: np.random.Generator, samples: int, *, shapes: bool) -> Draws:
    """The numbers that augment each sample of an epoch; shapes only where they are asked for."""
    sizes = ((samples, 1), (samples, 2), (samples, 2), (samples if shapes else 0, 10, 2))
    return Draws(*(torch.from_numpy(rng.random(size, dtype=np.float32)) for size in sizes))


def shifted(images: Tensor, place: Tensor) -> Tensor:
    """Each image of a batch padded with zeros by an eighth of its side, and cropped to its size.

    Example:
        >>> images = torch.arange(64.0).view(1, 1, 8, 8)
        >>> shifted(images, place=torch.tensor([[0.5, 0.9]]))[0, 0, 0]
        tensor([1., 2., 3., 4., 5., 6., 7., 0.])
    """
    side = images.shape[-1]
    offset = (place * (side // 8 * 2 + 1)).long()
    rows, columns = (offset[:, :, None] + torch.arange(side, device=images.device)).unbind(1)
    padded = F.pad(images, (side // 8,) * 4).movedim(1, -1)
    each = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[each, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def random_part(image: Tensor, shapes: list[list[float]], place: list[float], size: int) -> Tensor:
    """A random part of an image, as `part_box` says, resized to a square."""
    top, left, down, across = part_box(image.shape[1], image.shape[2], shapes, place)
    return resized(image[None, :, top : top + down, left : left + across], size, size)[0]


def part_box(
    height: int, width: int, shapes: list[list[float]], place: list[float]
) -> tuple[int, int, int, int]:
    """Top, left, height and width of 8 to 100 % of the area, with an aspect from 3:4 to 4:3.

    The first of the shapes that fits; if none does, the most of the middle with such an aspect.

    Example:
        >>> part_box(100, 100, shapes=[[0.5, 0.5]], place=[0.0, 0.99])
        (0, 27, 73, 73)
    """
    for area, aspect in shapes:
        pixels = (0.08 + 0.92 * area) * height * width
        ratio = (4 / 3) ** (2 * aspect - 1)
        across, down = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < across <= width and 0 < down <= height:
            top, left = int(place[0] * (height - down + 1)), int(place[1] * (width - across + 1))
            return top, left, down, across
    down, across = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
    return (height - down) // 2, (width - across) // 2, down, across


def centred(image: Tensor, size: int) -> Tensor:
    """The middle of an image, its shorter side made 8/7 of the size; whole if it has the size."""
    height, width = image.shape[1:]
    if height == width == size:
        return image
    scale = size * 8 / 7 / min(height, width)
    height, width = max(size, round(height * scale)), max(size, round(width * scale))
    top, left = (height - size) // 2, (width - size) // 2
    return resized(image[None], height, width)[0, :, top : top + size, left : left + size]


def statistics(data: Data, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, as `normalised` takes them."""
    mean, std = (torch.tensor(part, device=device) for part in (data.mean, data.std))
    return mean[:, None, None], std[:, None, None]


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Bytes over 255, or floats as they are; minus the mean, over the deviation."""
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    return (images - mean) / std


def cut_out(images: Tensor, hole: Tensor, side: int) -> Tensor:
    """Each image of a batch with a square zeroed, which may reach beyond its edge."""
    first = (hole * images.shape[-1]).long() - side // 2
    distance = torch.arange(images.shape[-1], device=images.device) - first[:, :, None]
    down, across = ((distance >= 0) & (distance < side)).unbind(1)
    return images.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0.0)


class Mixture(NamedTuple):
    """How to mix a batch with itself."""

    partner: Tensor
    """For each row, the one that is mixed in."""
    share: float
    """What stays of each image."""
    box: tuple[slice, slice] | None
    """What is the partner's; None: all of it is blended."""


def draw_mixture(
    rng: np.random.Generator, rows: int, side: int, *, mixup: float, cutmix: float
) -> Mixture | None:
    """How to mix so many images, with probability one half: so clean batches remain.

    An alpha of 0 turns mixup or CutMix off; where both are on, either is as likely.
    """
    if not (mixup or cutmix) or rng.random() < 0.5:
        return None
    blend = bool(mixup) and not (cutmix and rng.random() < 0.5)
    alpha = mixup if blend else cutmix
    share = float(rng.beta(alpha, alpha))
    partner = torch.from_numpy(rng.permutation(rows))
    if blend:
        return Mixture(partner, share, None)
    length = round(side * math.sqrt(1 - share))
    first = rng.integers(side, size=2) - length // 2
    down, across = (slice(max(start, 0), min(start + length, side)) for start in first.tolist())
    pasted = max(down.stop - down.start, 0) * max(across.stop - across.start, 0)
    return Mixture(partner, 1 - pasted / side**2, (down, across))


def mix(images: Tensor, others: Tensor, rows: int, mixture: Mixture) -> Tensor:
    """So many rows of images, each mixed with another of them; in place, but for the partners."""
    own, partners = images[:rows], images[others]
    if mixture.box is None:
        return own.lerp_(partners, 1 - mixture.share)
    own[..., *mixture.box] = partners[..., *mixture.box]
    return own
