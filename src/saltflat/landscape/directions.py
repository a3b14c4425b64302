"""Where a picture of the loss lies: a point among the weights, and one or two ways from it.

A place with the coordinates (a, b) is the weights origin + a * axes[0] + b * axes[1].
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]
"""Tensors of a model by their names in its state_dict."""
_TINY = 1e-10
_MARGIN = 1.2
"""Of a trajectory's picture, over the trajectory."""


@dataclass(frozen=True)
class Directions:
    """A line or a plane through the weights of a model."""

    origin: State
    axes: tuple[State, ...]
    """One or two; what an axis does not name it leaves where it is."""
    centre: tuple[float, ...]
    reach: tuple[float, ...]
    """Of a coordinate: it runs over its centre plus and minus span times this."""
    marks: np.ndarray
    """Places to show: a row of coordinates for each run or snapshot."""
    facts: dict[str, str | int]
    """What they are; two that have the same facts are the same."""
    explained: tuple[float, ...] = ()
    """Of a trajectory, the share of its squared distances that each axis holds."""


def random_directions(model: nn.Module, *, seed: int = 0, count: int = 2) -> Directions:
    r"""Filter-normalised random directions.

    Every filter (a slice of a weight's first dimension: a convolution's filter, a row of a matrix)
    of a direction has the norm of the model's,

    .. math:: d_{i,j} \leftarrow \frac{d_{i,j}}{\|d_{i,j}\|} \|w_{i,j}\|,

    so that surfaces of different networks, whose weights have different scales, can be compared.
    Biases and the parameters of normalisation layers do not move. The numbers are drawn on the CPU
    and depend on the seed and the shapes alone: models of one architecture get the same draw.

    Args:
        model: The model at the centre.
        seed: Which directions.
        count: How many, 1 or 2; the first is the same either way.

    Returns:
        The directions, with the model at (0, 0).

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> (axis,) = random_directions(model, count=1).axes
        >>> list(axis), round(axis["weight"].norm().item(), 4)
        (['weight'], 5.0)

    References:
        Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 4.
    """
    if count not in (1, 2):
        raise ValueError(f"count must be 1, a line, or 2, a plane; got {count}")
    origin = _state(model)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    if not weights:
        raise ValueError(
            "the model has no weight of two dimensions or more: there is nothing to move, since "
            "biases and the parameters of normalisation layers stay"
        )
    axes = tuple(
        {name: _like_filters(w, generator) for name, w in weights.items()} for _ in range(count)
    )
    facts = {**_facts("random", origin), "seed": seed}
    return Directions(origin, axes, (0.0,) * count, (1.0,) * count, np.zeros((1, count)), facts)


def _like_filters(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers, each filter of which is as long as the weight's."""
    draw = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
    dims = tuple(range(1, weight.dim()))
    lengths = [torch.linalg.vector_norm(t, dim=dims, keepdim=True) for t in (weight, draw)]
    return draw * (lengths[0] / (lengths[1] + _TINY))


def line_between(model: nn.Module, other: nn.Module) -> Directions:
    """The line from one model, at 0, to another of the same architecture, at 1.

    BatchNorm's running statistics go along, so that both ends are the models themselves.

    Raises:
        ValueError: If the models are of different architectures.
    """
    origin, end = _state(model), _state(other)
    _require_same(origin, end)
    axis = {name: end[name].to(t.device) - t for name, t in origin.items()}
    facts = _facts("between", origin, end)
    return Directions(origin, (axis,), (0.5,), (0.5,), np.array([[0.0], [1.0]]), facts)


def trajectory_plane(model: nn.Module, snapshots: Sequence[State]) -> Directions:
    """The plane through the trained model that is nearest to the weights on the way to it.

    The two axes are the first principal components of the snapshots' parameters, as differences
    from the model's; they have length 1, so coordinates are distances. BatchNorm's running
    statistics go along with the same combinations of snapshots.

    Args:
        model: The trained model, at (0, 0).
        snapshots: Its weights at earlier times, as state_dicts, in their order; two at least.

    Returns:
        The plane; its marks are the snapshots' coordinates, the model's last.

    Raises:
        ValueError: If the snapshots are of another model, or lie on a line with it.

    References:
        Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 7.
    """
    _require_plane(len(snapshots), len(snapshots) > 1)
    origin = _state(model)
    parameters = [name for name, _ in model.named_parameters()]
    for snapshot in snapshots:
        _require_same(origin, {name: t for name, t in snapshot.items() if name in origin})
    gram = torch.zeros(len(snapshots), len(snapshots), dtype=torch.float64)
    for name in parameters:
        rows = _differences(snapshots, origin, name).flatten(1).double()
        gram += rows @ rows.T
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0).clamp(min=0), vectors.flip(1)
    _require_plane(len(snapshots), bool(squares[1] > 1e-10 * squares[0]))
    lengths, vectors = squares[:2].sqrt(), vectors[:, :2]
    vectors = vectors * torch.where(vectors[0] < 0, -1.0, 1.0)  # training begins at the top right
    parts = vectors / lengths  # of each snapshot in each axis
    axes = tuple(
        {
            name: torch.einsum("s,s...->...", part, _differences(snapshots, origin, name).double())
            .to(t.dtype)
            .to(t.device)
            for name, t in origin.items()
        }
        for part in parts.T
    )
    marks = np.concatenate([(vectors * lengths).numpy(), np.zeros((1, 2))])
    low, high = marks.min(0), marks.max(0)
    return Directions(
        origin=origin,
        axes=axes,
        centre=tuple((low + high) / 2),
        reach=tuple(_MARGIN * (high - low) / 2),
        marks=marks,
        facts=_facts("trajectory", origin, *snapshots),
        explained=tuple((squares[:2] / squares.sum()).tolist()),
    )


def _state(model: nn.Module) -> dict[str, Tensor]:
    """What can move: parameters and buffers of floating point, each once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.detach().clone() for name, t in named if t.is_floating_point()}


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number by which changed tensors are noticed."""
    value = 0
    for tensor in tensors:
        value = zlib.crc32(
            tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes(), value
        )
    return value


def _facts(kind: str, *states: State) -> dict[str, str | int]:
    return {"kind": kind, "weights": checksum(t for state in states for t in state.values())}


def _differences(snapshots: Sequence[State], origin: State, name: str) -> Tensor:
    """From the origin to each snapshot, stacked."""
    there = origin[name].cpu()
    return torch.stack([snapshot[name].cpu() - there for snapshot in snapshots])


def _require_plane(count: int, holds: bool) -> None:
    if not holds:
        raise ValueError(
            f"{count} snapshots make no plane: they must be two or more that do not lie on one "
            "line with the trained weights; train with snapshot_every set"
        )


def _require_same(one: State, other: State) -> None:
    differing = sorted(
        name
        for name in {**one, **other}
        if name not in one or name not in other or one[name].shape != other[name].shape
    )
    if differing:
        raise ValueError(
            f"these are weights of different models ({len(differing)} tensors differ, as "
            f"{differing[0]}): a line or plane needs weights of one architecture"
        )
