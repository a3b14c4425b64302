import numpy as np
import pytest
import torch
from landscape_problem import Residual, flat, images, residual, snapshots
from problems import network
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.landscape import (
    line_between,
    loss_surface,
    random_directions,
    trajectory_plane,
)
from saltflat.landscape.grid import SurfaceEvaluator


def test_filters_of_a_direction_have_the_norms_of_the_models_filters():
    model = residual()
    model.point.weight.data[2] = 0
    for axis in random_directions(model, seed=1).axes:
        assert axis.keys() == {"stem.0.weight", "body.0.weight", "point.weight", "head.weight"}
        for name, direction in axis.items():
            weight = model.get_parameter(name).detach()
            assert torch.allclose(direction.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
            assert direction.shape == weight.shape


def test_models_of_one_architecture_get_the_same_draw(device):
    first, second = residual(0), residual(1).to(device)
    for axis, other in zip(
        random_directions(first, seed=4).axes, random_directions(second, seed=4).axes, strict=True
    ):
        for name, direction in axis.items():
            normed, theirs = (
                d / d.flatten(1).norm(dim=1).view(-1, *[1] * (d.dim() - 1))
                for d in (direction, other[name].cpu())
            )
            assert torch.allclose(normed, theirs, atol=1e-6)


def test_the_seed_sets_the_directions_and_a_line_is_the_planes_first_axis():
    model = residual()
    (line,) = random_directions(model, seed=4, count=1).axes
    plane = random_directions(model, seed=4).axes
    other = random_directions(model, seed=5).axes
    assert torch.equal(line["head.weight"], plane[0]["head.weight"])
    cosines = [
        torch.cosine_similarity(one["body.0.weight"].flatten(), two["body.0.weight"].flatten(), 0)
        for one, two in [plane, (plane[0], other[0])]
    ]
    assert max(map(abs, cosines)) < 0.2


def test_a_trajectory_lies_in_its_plane():
    model, (x, y) = residual(), images()
    one, two = snapshots(model, 2)
    # The third is in the plane of these and the model.
    final = model.state_dict()
    three = {n: 0.5 * one[n] + 0.25 * two[n] + 0.25 * t for n, t in final.items()}
    path = [one, three, two]
    plane = trajectory_plane(model, path)
    axes = [flat(model, {**axis}) for axis in plane.axes]
    gram = torch.stack(axes) @ torch.stack(axes).T
    assert torch.allclose(gram, torch.eye(2, dtype=torch.float64), atol=1e-5)
    assert sum(plane.explained) == pytest.approx(1)
    assert plane.marks.shape == (4, 2)
    assert plane.marks[-1].tolist() == [0, 0]
    assert (plane.marks[0] >= 0).all()
    for snapshot, (a, b) in zip(path, plane.marks, strict=False):
        there = flat(model, final) + a * axes[0] + b * axes[1]
        assert torch.allclose(there, flat(model, snapshot), atol=1e-5)
    evaluate = SurfaceEvaluator(model, cross_entropy, [(x, y)], plane, batchnorm="eval", half=False)
    losses = evaluate(torch.from_numpy(plane.marks))[:, 0]
    for snapshot, loss in zip([*path, final], losses, strict=True):
        other = Residual()
        other.load_state_dict(snapshot)
        assert loss == pytest.approx(cross_entropy(other.eval()(x), y).item(), rel=1e-4)
    drawn = loss_surface(model, cross_entropy, [(x, y)], directions=plane, points=4)
    assert drawn.x[0] < plane.marks[:, 0].min() < plane.marks[:, 0].max() < drawn.x[-1]
    assert drawn.y[0] < plane.marks[:, 1].min() < plane.marks[:, 1].max() < drawn.y[-1]
    assert drawn.provenance["explained"] == pytest.approx(plane.explained)


def test_the_plane_is_that_of_the_principal_components():
    model = residual()
    path = snapshots(model, 6)
    plane = trajectory_plane(model, path)
    rows = torch.stack([flat(model, s) for s in path]) - flat(model, model.state_dict())
    _, lengths, vectors = np.linalg.svd(rows.numpy(), full_matrices=False)
    for axis, vector in zip(plane.axes, vectors, strict=False):
        assert abs(flat(model, axis).numpy() @ vector) == pytest.approx(1, abs=1e-5)
    shares = lengths**2 / (lengths**2).sum()
    assert plane.explained == pytest.approx(shares[:2])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_snapshots_on_a_line_are_refused(count):
    model = residual()
    (one,) = snapshots(model, 1)
    line = [
        {n: t + k * (one[n] - t) for n, t in model.state_dict().items()}
        for k in range(1, count + 1)
    ]
    with pytest.raises(ValueError, match=f"snapshots.*got {count}: .*snapshot_every"):
        trajectory_plane(model, line)


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match=r"count.*got 3"):
        random_directions(residual(), count=3)
    with pytest.raises(TypeError, match=r"seed.*got 'a'"):
        random_directions(residual(), seed="a")
    with pytest.raises(TypeError, match=r"model.*got None"):
        random_directions(None)
    with pytest.raises(ValueError, match=r"model.*two dimensions.*got BatchNorm1d"):
        random_directions(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"model.*got \d+ tensors that differ"):
        line_between(residual(), network())
    with pytest.raises(TypeError, match=r"model.*got 'other'"):
        line_between(residual(), "other")
    with pytest.raises(ValueError, match=r"model.*got \d+ tensors that differ"):
        trajectory_plane(residual(), [network().state_dict()] * 3)


def test_directions_of_other_weights_are_refused():
    """Otherwise the loss would be that of weights from two models."""
    directions = random_directions(residual(0))
    with pytest.raises(ValueError, match=r"directions.*got \{'kind': 'random'"):
        loss_surface(residual(1), cross_entropy, [images()], points=3, directions=directions)
    with pytest.raises(ValueError, match="tensors that differ"):
        loss_surface(network(), cross_entropy, [images()], points=3, directions=directions)
