"""The loss over a line or a plane of weights, and the file that it is kept in."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from saltflat.landscape._evaluate import CHUNK, Places
from saltflat.landscape._moving import Loss
from saltflat.landscape._trial import tried
from saltflat.landscape.directions import Directions, checksum, random_directions

_SAVE_SECONDS = 5.0
"""From one writing of the file to the next."""
_LOOK_SECONDS = 1.0
"""From one look at what is done to the next, about."""


@dataclass(frozen=True)
class Surface:
    """Losses on a line or a grid."""

    x: np.ndarray
    """Coordinates along the first axis."""
    y: np.ndarray | None
    """Along the second; None for a line."""
    losses: np.ndarray
    """losses[row, column] at (x[column], y[row]), or losses[column]; NaN where not yet known."""
    accuracies: np.ndarray | None
    """In percent, likewise, where labels are classes."""
    marks: np.ndarray
    """Places to show, a row of coordinates each: the model, two models, or a trajectory."""
    provenance: dict[str, Any]
    """How the surface was made: plain values."""
    done: int
    """Places whose loss is known, in the order of the rows."""

    @property
    def complete(self) -> bool:
        """Whether every place's loss is known."""
        return self.done == self.losses.size

    def save(self, path: Path | str) -> None:
        """Write an .npz file, whole or not at all."""
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
        """What `save` has written.

        Raises:
            ValueError: If it is no surface's file.
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
        except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
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
    r"""The loss at the places of a grid around the weights, or of a line.

    .. math:: f(a, b) = L(\theta + a \delta + b \eta), \qquad a, b \in [-span, span]

    The model runs in evaluation mode on a copy of itself; weights, buffers, generators and flags
    stay as they are. The batches are held on the model's device, and a GPU replays the work for
    a place. In bfloat16 the weights of a place are made in float32 and then rounded; before the
    work, its losses at the middle and the corners are compared with the model's own precision, and
    that is used where they differ by more than 0.01 + 2 %. What was found is in the provenance.

    Args:
        model: The model at the centre.
        loss_fn: From outputs and labels to the mean loss of the rows.
        batches: Inputs and labels; read once.
        points: Places along an axis.
        span: How far an axis goes; at 1, a random direction moves every filter by its own length.
        seed: Which random directions; models of one architecture get the same.
        directions: Other ones, of one axis or two.
        batchnorm: "eval": BatchNorm uses its running statistics; "batch": those of each batch,
            which is right where the weights are far from any that the statistics belong to.
        precision: "float32": the model's own; "bf16"; "auto": bf16 on a GPU that has it.
        path: An .npz file, which is written every few seconds. If it holds a part of this same
            surface, this goes on with it; if it holds all, that is returned.
        facts: What the provenance should say beside: plain values.
        progress: Told of the places done and of all, now and then.

    Returns:
        The surface.

    Raises:
        ValueError: If an argument is unusable, or the file holds another surface; says what
            differs.

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
    device = next(model.parameters()).device
    held = [(x.to(device), y.to(device)) for x, y in batches]
    if not held:
        raise ValueError("batches are empty: a loss needs a row at least")
    if directions is None:
        directions = random_directions(model, seed=seed)
    settings = {
        **directions.facts,
        "dimensions": len(directions.axes),
        "points": points,
        "span": span,
        "batchnorm": batchnorm,
        "precision": _resolved(precision, model),
        "rows": sum(len(x) for x, _ in held),
        "data": checksum(t for batch in held for t in batch),
    }
    surface = _begun(path, settings) or _empty(directions, settings, facts or {})
    if surface.complete:
        return surface
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        places, found = tried(model, loss_fn, held, directions, settings, precision)
        surface.provenance.update(found)
        return _filled(surface, places, path, progress)


def _filled(
    surface: Surface,
    places: Places,
    path: Path | str | None,
    progress: Callable[[int, int], None] | None,
) -> Surface:
    """The surface with the places that it lacks; saved on the way, and when something happens."""
    grid = torch.from_numpy(_grid(surface))
    losses, accuracies = surface.losses.ravel(), np.full(surface.losses.size, np.nan)
    if surface.accuracies is not None:
        accuracies = surface.accuracies.ravel()
    done, before = surface.done, surface.provenance["seconds"]
    rows = surface.provenance["settings"]["rows"]
    begin = saved = looked = time.perf_counter()
    step = 1

    def now() -> Surface:
        surface.provenance["seconds"] = before + time.perf_counter() - begin
        known = None if np.isnan(accuracies).all() else accuracies.reshape(surface.losses.shape)
        return replace(
            surface, losses=losses.reshape(surface.losses.shape), accuracies=known, done=done
        )

    try:
        while done < len(grid):
            found = places(grid[done : done + step]).numpy()
            losses[done : done + len(found)] = found[:, 0]
            accuracies[done : done + len(found)] = 100 * found[:, 1] / rows
            done += len(found)
            if progress is not None:
                progress(done, len(grid))
            before_this, looked = looked, time.perf_counter()
            step = min(CHUNK, max(1, int(step * _LOOK_SECONDS / (looked - before_this))))
            if path is not None and looked - saved > _SAVE_SECONDS:
                now().save(path)
                saved = looked
    finally:
        end = now()
        if path is not None:
            end.save(path)
    return end


def _check(points: int, span: float, batchnorm: str, precision: str) -> None:
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}: one place is no picture")
    if not 0 < span < inf:
        raise ValueError(f"span must be positive, got {span}: how far from the weights to look")
    for name, value, known in (
        ("batchnorm", batchnorm, ("eval", "batch")),
        ("precision", precision, ("auto", "float32", "bf16")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _resolved(precision: str, model: nn.Module) -> str:
    """What is computed in: "auto" is bf16 where a GPU has it and the weights are float32."""
    weight = next(model.parameters())
    own = str(weight.dtype).removeprefix("torch.")
    if precision == "auto":
        has = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] >= 8
        return "bf16" if has and weight.dtype == torch.float32 else own
    return "bf16" if precision == "bf16" else own


def _empty(directions: Directions, settings: dict[str, Any], facts: Mapping[str, Any]) -> Surface:
    span, points = settings["span"], settings["points"]
    around = zip(directions.centre, directions.reach, strict=True)
    x, *others = (np.linspace(c - span * r, c + span * r, points) for c, r in around)
    y = others[0] if others else None
    shape = (points,) * len(directions.axes)
    provenance = {**facts, "settings": settings, "seconds": 0.0}
    if directions.explained:
        provenance["explained"] = list(directions.explained)
    return Surface(x, y, np.full(shape, np.nan), None, directions.marks, provenance, done=0)


def _begun(path: Path | str | None, settings: dict[str, Any]) -> Surface | None:
    """What a file holds of this surface, if there is one.

    Raises:
        ValueError: If it is another surface's.
    """
    if path is None:
        return None
    _npz(path).parent.mkdir(parents=True, exist_ok=True)  # now, not after the work
    if not _npz(path).exists():
        return None
    surface = Surface.load(path)
    theirs = surface.provenance["settings"]
    differing = [
        f"{name} is {theirs.get(name)!r} there and {settings.get(name)!r} here"
        for name in {**theirs, **settings}
        if theirs.get(name) != settings.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} holds another surface ({'; '.join(differing)}): remove it or choose another "
            "file"
        )
    return surface


def _grid(surface: Surface) -> np.ndarray:
    """The coordinates of every place, row after row."""
    if surface.y is None:
        return surface.x[:, None].copy()
    rows, columns = np.meshgrid(surface.y, surface.x, indexing="ij")
    return np.stack([columns.ravel(), rows.ravel()], 1)


def _npz(path: Path | str) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"a surface's file ends in .npz, got {path}")
    return path
