"""Directions: one or two axes through the weights of a model.

The point (a, b) has the weights origin + a * axes[0] + b * axes[1].
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
"""Tensors of a model by their names in its state_dict."""
_TINY = 1e-10
_MARGIN = 1.2
"""Extent of a trajectory's plane, relative to the trajectory."""


@dataclass(frozen=True)
class Directions:
    """A line or plane through the weights of a model.

    Coordinate i runs from centre[i] - span * reach[i] to centre[i] + span * reach[i].
    """

    origin: Tensors
    axes: tuple[Tensors, ...]
    """One or two. An axis does not move the tensors that it does not name."""
    centre: tuple[float, ...]
    reach: tuple[float, ...]
    marks: np.ndarray
    """Points to mark, a row of coordinates each: the model, two models or a trajectory."""
    identity: dict[str, str | int]
    """Kind, seed and checksum of the weights: equal for equal directions."""
    explained: tuple[float, ...] = ()
    """Share of a trajectory's squared distances along each axis."""


def random_directions(model: nn.Module, *, seed: int = 0, count: int = 2) -> Directions:
    r"""Draw filter-normalised random directions.

    A filter is a slice of a weight along its first dimension: a convolution's filter or a row of a
    matrix. Each filter of a direction gets the norm of the model's filter,

    .. math:: d_{i,j} \leftarrow \frac{d_{i,j}}{\|d_{i,j}\|} \|w_{i,j}\|,

    so that networks whose weights have different scales can be compared. Biases and the parameters
    of normalisation layers do not move. The draw is made on the CPU and depends on the seed and the
    shapes only: models of one architecture get the same draw.

    Args:
        model: The model at the centre, (0, 0).
        seed: Seed of the draw.
        count: 1 for a line, 2 for a plane. The first axis is the same for both.

    Raises:
        TypeError: If the model is not a module.
        ValueError: If an argument is invalid, or no weight has two dimensions or more.

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
        raise ValueError(f"count must be 1 (a line) or 2 (a plane), got {count!r}")
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an integer, got {seed!r}")
    origin = _floating_tensors(model)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.dim() > 1}
    if not weights:
        raise ValueError(
            "model must have a weight of at least two dimensions, since only those move, got "
            f"{type(model).__name__}"
        )
    axes = tuple(
        {name: _filter_normalised(w, generator) for name, w in weights.items()}
        for _ in range(count)
    )
    identity = {**_identity("random", origin), "seed": seed}
    return Directions(origin, axes, (0.0,) * count, (1.0,) * count, np.zeros((1, count)), identity)


def _filter_normalised(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a tensor whose filters have the norms of the weight's filters."""
    draw = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
    dims = tuple(range(1, weight.dim()))
    norms = [torch.linalg.vector_norm(t, dim=dims, keepdim=True) for t in (weight, draw)]
    return draw * (norms[0] / (norms[1] + _TINY))


def line_between(model: nn.Module, other: nn.Module) -> Directions:
    """The line from one model, at 0, to another of the same architecture, at 1.

    BatchNorm's running statistics move too, so that the ends are exactly the two models.

    Raises:
        TypeError: If a model is not a module.
        ValueError: If the architectures differ.
    """
    origin, end = _floating_tensors(model), _floating_tensors(other)
    _require_same_shapes(origin, end)
    axis = {name: end[name].to(t.device) - t for name, t in origin.items()}
    identity = _identity("between", origin, end)
    return Directions(origin, (axis,), (0.5,), (0.5,), np.array([[0.0], [1.0]]), identity)


def trajectory_plane(model: nn.Module, snapshots: Sequence[Tensors]) -> Directions:
    """The plane through the trained model that is nearest to its weights during training.

    The axes are the first two principal components of the snapshots' parameters, relative to the
    model's. They have length 1, so coordinates are distances. BatchNorm's running statistics move
    with the same combinations of snapshots.

    Args:
        model: The trained model, at (0, 0).
        snapshots: At least two state_dicts of earlier epochs, in order.

    Returns:
        The plane. Its marks are the coordinates of the snapshots and, last, of the model.

    Raises:
        TypeError: If the model is not a module.
        ValueError: If the snapshots are of another model, or on one line with it.

    References:
        Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018, section 7.
    """
    _require_plane(snapshots, len(snapshots) > 1)
    origin = _floating_tensors(model)
    for snapshot in snapshots:
        _require_same_shapes(origin, {n: t for n, t in snapshot.items() if n in origin})
    gram = torch.zeros(len(snapshots), len(snapshots), dtype=torch.float64)
    for name, _ in model.named_parameters():
        rows = _differences(snapshots, origin, name).flatten(1)
        gram += rows @ rows.T
    squares, vectors = torch.linalg.eigh(gram)
    squares, vectors = squares.flip(0).clamp(min=0), vectors.flip(1)
    _require_plane(snapshots, bool(squares[1] > 1e-10 * squares[0]))
    lengths, vectors = squares[:2].sqrt(), vectors[:, :2]
    vectors = vectors * torch.where(vectors[0] < 0, -1.0, 1.0)  # training begins at the top right
    axes = tuple(
        {
            name: torch.einsum("s,s...->...", weights, _differences(snapshots, origin, name))
            .to(t.dtype)
            .to(t.device)
            for name, t in origin.items()
        }
        for weights in (vectors / lengths).T
    )
    marks = np.concatenate([(vectors * lengths).numpy(), np.zeros((1, 2))])
    low, high = marks.min(0), marks.max(0)
    return Directions(
        origin=origin,
        axes=axes,
        centre=tuple((low + high) / 2),
        reach=tuple(_MARGIN * (high - low) / 2),
        marks=marks,
        identity=_identity("trajectory", origin, *snapshots),
        explained=tuple((squares[:2] / squares.sum()).tolist()),
    )


def require_origin(directions: Directions, model: nn.Module) -> None:
    """Raise ValueError if the origin is not the model's weights."""
    weights = _floating_tensors(model)
    _require_same_shapes(directions.origin, weights)
    if checksum(weights.values()) != checksum(directions.origin.values()):
        raise ValueError(
            "directions start at other weights than the model's, got "
            f"{directions.identity}: make them from the model as it is now"
        )


def checksum(tensors: Iterable[Tensor]) -> int:
    """The CRC-32 of the tensors' bytes."""
    value = 0
    for tensor in tensors:
        data = tensor.detach().cpu().flatten().view(torch.uint8).numpy()
        value = zlib.crc32(data.data, value)
    return value


def _floating_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the floating-point parameters and buffers: all that can move."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    named = [*model.named_parameters(), *model.named_buffers()]
    found = {name: t.detach().clone() for name, t in named if t.is_floating_point()}
    if not found:
        raise ValueError(f"model must have floating-point parameters, got {type(model).__name__}")
    return found


def _identity(kind: str, *states: Tensors) -> dict[str, str | int]:
    return {"kind": kind, "weights": checksum(t for state in states for t in state.values())}


def _differences(snapshots: Sequence[Tensors], origin: Tensors, name: str) -> Tensor:
    """One tensor of each snapshot minus the origin's, stacked."""
    centre = origin[name].cpu()
    return torch.stack([snapshot[name].cpu() - centre for snapshot in snapshots]).double()


def _require_plane(snapshots: Sequence[Tensors], spans: bool) -> None:
    if not spans:
        raise ValueError(
            "snapshots must be at least two that are not on one line with the model, got "
            f"{len(snapshots)}: train with snapshot_every set"
        )


def _require_same_shapes(one: Tensors, other: Tensors) -> None:
    differing = sorted(
        name
        for name in {**one, **other}
        if name not in one or name not in other or one[name].shape != other[name].shape
    )
    if differing:
        raise ValueError(
            f"model must have one architecture at every point, got {len(differing)} tensors that "
            f"differ, such as {differing[0]!r}"
        )
