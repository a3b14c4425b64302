"""The loss over a line or plane of weights, and the file that keeps it."""

from __future__ import annotations

import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.landscape.directions import (
    Directions,
    checksum,
    random_directions,
    require_origin,
)
from saltflat.landscape.grid import Batches, Loss, SurfaceEvaluator, check_precision

_SAVE_SECONDS = 5.0
_LOOK_SECONDS = 1.0
"""Time between two looks at the device, about."""
_CHUNK = 128
"""The most points between two looks at the device."""


@dataclass
class Surface:
    """Losses on a line or a grid."""

    x: np.ndarray
    """Coordinates along the first axis."""
    y: np.ndarray | None
    """Coordinates along the second axis; None for a line."""
    losses: np.ndarray
    """losses[row, column] at (x[column], y[row]), or losses[column]; NaN where not yet known."""
    accuracies: np.ndarray | None
    """The same for accuracies in percent; None if labels are not classes."""
    marks: np.ndarray
    """Points to mark, a row of coordinates each: the model, two models or a trajectory."""
    provenance: dict[str, Any]
    """How the surface was made, in plain values."""
    done: int
    """Number of points with a known loss, row by row."""

    @property
    def complete(self) -> bool:
        """Whether the loss of every point is known."""
        return self.done == self.losses.size

    def save(self, path: Path | str) -> None:
        """Write an .npz file atomically."""
        path = _npz(path)
        arrays: dict[str, Any] = {"x": self.x, "losses": self.losses, "marks": self.marks}
        arrays |= {} if self.y is None else {"y": self.y}
        arrays |= {} if self.accuracies is None else {"accuracies": self.accuracies}
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            text = np.array(json.dumps(self.provenance))
            np.savez_compressed(file, **arrays, provenance=text, done=np.array(self.done))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    @classmethod
    def load(cls, path: Path | str) -> Surface:
        """Read a file written by `save`.

        Raises:
            ValueError: If the file is missing, or does not hold a surface.
        """
        path = _npz(path)
        if not path.exists():
            raise ValueError(f"there is no surface at {path}")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(
                    x=arrays["x"],
                    y=arrays.get("y"),
                    losses=arrays["losses"],
                    accuracies=arrays.get("accuracies"),
                    marks=arrays["marks"],
                    provenance=json.loads(str(arrays["provenance"])),
                    done=int(arrays["done"]),
                )
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a surface's file ({error}): remove it") from error


def loss_surface(
    model: nn.Module,
    loss_fn: Loss,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    points: int = 100,
    span: float = 1.0,
    seed: int = 0,
    directions: Directions | None = None,
    batchnorm: Literal["eval", "batch"] = "eval",
    precision: Literal["auto", "float32", "bf16"] = "auto",
    path: Path | str | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Surface:
    r"""Compute the loss on a grid around the weights, or on a line.

    .. math:: f(a, b) = L(\theta + a \delta + b \eta), \qquad a, b \in [-span, span]

    A copy of the model runs in evaluation mode; the model's weights, buffers and flags and torch's
    generators stay unchanged. All batches are kept on the model's device. A GPU replays the work
    for a point as a CUDA graph. Losses in bf16 are first compared with the model's own precision at
    the centre and the corners. If they differ by more than 0.01 + 2 %, bf16 is not used. The
    provenance holds what was found.

    Args:
        model: The model at the centre.
        loss_fn: Maps outputs and labels to the mean loss of the rows.
        batches: Inputs and labels; read once.
        points: Points along an axis.
        span: Extent of an axis. At 1 a random direction moves every filter by its own norm.
        seed: Seed of the random directions; the same for all models of one architecture.
        directions: A line or plane to use instead of random directions.
        batchnorm: "eval" uses BatchNorm's running statistics. "batch" uses those of each batch,
            which is right far away from the weights that the running statistics belong to.
        precision: "float32" is the model's own precision; "auto" is bf16 on a GPU that has it.
        path: An .npz file, written every few seconds. A part of the same surface is completed, a
            complete one is returned.
        facts: Plain values to add to the provenance.
        progress: Called with the number of points that are done, and of all points.

    Raises:
        TypeError: If the model is not a module.
        ValueError: If an argument is invalid, or the file holds another surface: of other
            settings, weights, data or loss function. Loss functions are compared on random outputs.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.fill_(2.0)
        >>> data = [(torch.ones(1, 1), torch.zeros(1, 1))]
        >>> square = lambda out, y: ((out - y) ** 2).mean()
        >>> line = random_directions(model, count=1)  # of length 2, up or down
        >>> found = loss_surface(model, square, data, directions=line, points=3)
        >>> sorted(found.losses.round(4).tolist())
        [0.0, 4.0, 16.0]

    References:
        Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018.
    """
    _check(points, span, batchnorm, precision)
    path = None if path is None else _npz(path)
    if directions is None:
        directions = random_directions(model, seed=seed)
    else:
        require_origin(directions, model)
    weight = next(iter(directions.origin.values()))
    held = _on_device(batches, weight.device)
    half = precision == "bf16" or (precision == "auto" and _has_bf16(weight))
    settings = {
        **directions.identity,
        "dimensions": len(directions.axes),
        "points": int(points),
        "span": float(span),
        "batchnorm": batchnorm,
        "precision": "bf16" if half else str(weight.dtype).removeprefix("torch."),
        "rows": sum(len(x) for x, _ in held),
        "data": checksum(t for batch in held for t in batch),
    }
    generators = torch.random.fork_rng([weight.device] if weight.is_cuda else [])
    with generators, torch.autocast(weight.device.type, enabled=False):
        make = partial(SurfaceEvaluator, model, loss_fn, held, directions, batchnorm=batchnorm)
        exact = make(half=False, fold=False, capture=False)
        settings["loss"] = exact.loss_fingerprint()
        surface = _begun(path, settings) or _empty(directions, settings, facts or {})
        if not surface.complete:
            evaluator, found = check_precision(
                *(make, exact, directions, span), half=half, forced=precision == "bf16"
            )
            surface.provenance |= found
            _fill(surface, evaluator, path, progress)
    return surface


def _check(points: int, span: float, batchnorm: str, precision: str) -> None:
    if not hasattr(points, "__index__") or points < 2:
        raise ValueError(f"points must be an integer >= 2, got {points!r}")
    if not hasattr(span, "__float__") or not 0 < span < inf:
        raise ValueError(f"span must be a positive number, got {span!r}")
    if batchnorm not in ("eval", "batch"):
        raise ValueError(f"batchnorm must be eval or batch, got {batchnorm!r}")
    if precision not in ("auto", "float32", "bf16"):
        raise ValueError(f"precision must be auto, float32 or bf16, got {precision!r}")


def _npz(path: Path | str) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {path}")
    return path


def _on_device(batches: Iterable[tuple[Tensor, Tensor]], device: torch.device) -> Batches:
    held = []
    for number, batch in enumerate(batches):
        kinds = [type(part).__name__ for part in batch]
        if len(kinds) != 2 or not all(isinstance(part, Tensor) for part in batch):
            raise ValueError(
                f"batches[{number}] must be two tensors, inputs and labels, got {kinds}"
            )
        if len(batch[0]):
            held.append((batch[0].to(device), batch[1].to(device)))
    if not held:
        raise ValueError("batches must hold at least one row, got 0")
    return held


def _has_bf16(weight: Tensor) -> bool:
    """Whether "auto" tries bf16 for this weight."""
    float32 = weight.is_cuda and weight.dtype == torch.float32
    return float32 and torch.cuda.get_device_capability(weight.device)[0] >= 8


def _empty(directions: Directions, settings: dict[str, Any], facts: Mapping[str, Any]) -> Surface:
    span, points = settings["span"], settings["points"]
    around = zip(directions.centre, directions.reach, strict=True)
    x, *others = (np.linspace(c - span * r, c + span * r, points) for c, r in around)
    losses = np.full((points,) * len(directions.axes), np.nan)
    provenance = {**facts, "settings": settings, "seconds": 0.0}
    if directions.explained:
        provenance["explained"] = list(directions.explained)
    y = others[0] if others else None
    return Surface(x, y, losses, None, directions.marks, provenance, done=0)


def _begun(path: Path | None, settings: dict[str, Any]) -> Surface | None:
    """The surface that a file holds, if there is one.

    Raises:
        ValueError: If it is another surface.
    """
    if path is None:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)  # fails before the work, not after it
    if not path.exists():
        return None
    surface = Surface.load(path)
    theirs = surface.provenance.get("settings", {})
    differing = [
        f"{name} is {theirs.get(name)!r} there and {settings.get(name)!r} here"
        for name in {**theirs, **settings}
        if theirs.get(name) != settings.get(name)
    ]
    if differing:
        raise ValueError(
            f"path {path} holds another surface ({'; '.join(differing)}): remove the file or "
            "choose another one"
        )
    return surface


def _fill(
    surface: Surface,
    evaluator: SurfaceEvaluator,
    path: Path | None,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Compute the missing points. Save every few seconds, at the end and on an exception."""
    points = torch.from_numpy(_grid(surface))
    percent = 100 / surface.provenance["settings"]["rows"]
    accuracies = surface.accuracies
    if accuracies is None:
        accuracies = np.full_like(surface.losses, np.nan)
    before, begin = surface.provenance["seconds"], time.perf_counter()
    saved = looked = begin
    chunk = 1
    try:
        while not surface.complete:
            found = evaluator(points[surface.done : surface.done + chunk]).numpy()
            now = slice(surface.done, surface.done + len(found))
            surface.losses.flat[now] = found[:, 0]
            accuracies.flat[now] = percent * found[:, 1]
            surface.accuracies = None if np.isnan(accuracies).all() else accuracies
            surface.done = now.stop
            last, looked = looked, time.perf_counter()
            surface.provenance["seconds"] = before + looked - begin
            if progress is not None:
                progress(surface.done, len(points))
            chunk = min(_CHUNK, max(1, int(chunk * _LOOK_SECONDS / (looked - last))))
            if path is not None and looked - saved > _SAVE_SECONDS:
                surface.save(path)
                saved = looked
    finally:
        if path is not None:
            surface.save(path)


def _grid(surface: Surface) -> np.ndarray:
    """The coordinates of all points, row by row."""
    if surface.y is None:
        return surface.x[:, None].copy()
    rows, columns = np.meshgrid(surface.y, surface.x, indexing="ij")
    return np.stack([columns.ravel(), rows.ravel()], 1)
