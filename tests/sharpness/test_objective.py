import dataclasses
import json
import sys
from functools import partial

import pytest
import torch
from problems import dataset, network
from sharpness_problems import MEASURES, POLICIES, parts, used_network
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from saltflat import sharpness
from saltflat.sharpness import sam_sharpness, top_eigenvalues
from saltflat.sharpness.neighbourhood import one_step


def snapshot(model):
    """Everything that could have changed, and a copy of it."""
    copied = lambda t: None if t is None else t.clone()  # noqa: E731
    norm = model[0][1]
    return {
        **{f"state {name}": copied(t) for name, t in model.state_dict().items()},
        **{f"grad {name}": copied(p.grad) for name, p in model.named_parameters()},
        **{f"asks {name}": p.requires_grad for name, p in model.named_parameters()},
        **{f"place {name}": p.data_ptr() for name, p in model.named_parameters()},
        **{f"place {name}": b.data_ptr() for name, b in model.named_buffers()},
        **{f"training {name}": m.training for name, m in model.named_modules()},
        "norm": (norm.track_running_stats, norm.momentum),
        "random": torch.get_rng_state(),
        "grad mode": torch.is_grad_enabled(),
        "rounds": torch.backends.cudnn.allow_tf32,
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        equal = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
        assert equal(value, other[name]), name


def test_the_policies_differ_and_the_result_says_which_it_was():
    model, (x, y) = used_network(), dataset().tensors
    found = [
        one_step(model, cross_entropy, parts(x, y, 10, 14), batchnorm=policy) for policy in POLICIES
    ]
    assert [f.batchnorm for f in found] == POLICIES
    assert len({f.value for f in found}) == 3
    assert [(f.forward, f.backward) for f in found] == [(2, 1), (4, 1), (2, 1)]
    assert json.dumps(dataclasses.asdict(found[0]))


def test_statistics_of_unequal_batches_are_weighed_by_their_rows():
    model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))
    x, y = dataset().tensors
    seen = []
    model[0].register_forward_hook(
        lambda layer, *_: seen.append((layer.running_mean.clone(), layer.running_var.clone()))
    )
    one_step(model, cross_entropy, parts(x, y, 6, 18), batchnorm="recalibrated")
    mean, var = seen[2]  # two batches calibrate, the third call is the first loss
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(var, (6 * x[:6].var(0) + 18 * x[6:].var(0)) / 24)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_the_model_is_left_as_it_was(measure, policy):
    model, (x, y) = used_network(), dataset().tensors
    before = snapshot(model)
    first = measure(model, cross_entropy, parts(x, y, 8, 16), batchnorm=policy)
    assert_same(snapshot(model), before)
    torch.manual_seed(7)
    assert measure(model, cross_entropy, parts(x, y, 8, 16), batchnorm=policy) == first


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_also_after_an_error_in_any_pass(measure, policy, call):
    model, (x, y) = used_network(), dataset().tensors
    before, calls = snapshot(model), []

    def loss_fn(outputs, labels):
        calls.append(1)
        torch.rand(1)
        if len(calls) == call:
            raise KeyError
        return cross_entropy(outputs, labels)

    with pytest.raises(KeyError):
        measure(model, loss_fn, parts(x, y, 8, 16), batchnorm=policy)
    assert_same(snapshot(model), before)


def test_cudnn_computes_in_float32_meanwhile():
    model, (x, y) = network(), dataset().tensors
    before, seen = torch.backends.cudnn.allow_tf32, []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    for measure in MEASURES.values():
        measure(model, cross_entropy, [(x, y)])
    assert set(seen) == {False}
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.newest
def test_cudnn_also_where_the_caller_has_the_newer_setting():
    model, (x, y) = network(), dataset().tensors
    conv, seen = torch.backends.cudnn.conv, []
    before = conv.fp32_precision
    model.register_forward_hook(lambda *_: seen.append(conv.fp32_precision))
    try:
        conv.fp32_precision = "none"
        sam_sharpness(model, cross_entropy, [(x, y)])
        assert seen == ["ieee", "ieee"] and conv.fp32_precision == "none"
    finally:
        conv.fp32_precision = before


class Counting(nn.Module):
    """A layer with a buffer that every pass replaces, and noise in every pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return x + torch.randn_like(x)


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_noise_is_the_same_in_every_pass_and_buffers_come_back(measure):
    model, (x, y) = nn.Sequential(Counting(), network()), dataset().tensors
    buffer = model[0].passes
    assert sam_sharpness(model, cross_entropy, [(x, y)], rho=0.0) == 0.0
    measure(model, cross_entropy, [(x, y)])
    assert model[0].passes is buffer and buffer == 0


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_an_autocast_around_it_changes_nothing(measure):
    model, (x, y) = network(), dataset().tensors
    expected = measure(model, cross_entropy, [(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(model, cross_entropy, [(x, y)]) == expected
        assert torch.is_autocast_enabled("cpu")


def test_a_loader_that_shuffles_gives_the_figure_of_its_rows():
    model, data = network(), dataset()
    x, y = data.tensors
    assert sam_sharpness(model, cross_entropy, DataLoader(data, 8, shuffle=True)) == pytest.approx(
        sam_sharpness(model, cross_entropy, [(x, y)]), rel=1e-4
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_a_loader_is_drawn_once(measure, policy):
    """Each pass of this one would give other rows: it drops the last 4, whichever they are."""
    model, draws = network(), []
    data = list(zip(*dataset().tensors, strict=True))
    generator = torch.Generator().manual_seed(0)

    def collate(rows):
        draws.append(len(rows))
        x, y = zip(*rows, strict=True)
        return torch.stack(x), torch.stack(y)

    loader = DataLoader(
        data, 10, shuffle=True, drop_last=True, generator=generator, collate_fn=collate
    )
    found = measure(model, cross_entropy, loader, batchnorm=policy)
    assert draws == [10, 10]
    assert isinstance(found, float) or found.images in (18, 20)  # three groups of 6


@pytest.mark.parametrize("name", ["sam", "max", "adaptive", "average", "m"])
def test_no_distance_is_no_rise_whatever_the_loader(name):
    generator = torch.Generator()
    loader = DataLoader(dataset(), 10, shuffle=True, drop_last=True, generator=generator)
    found = MEASURES[name](network(), cross_entropy, loader, rho=1e-9)
    assert abs(getattr(found, "value", found)) < 1e-6


def test_a_generator_gives_the_same_as_a_list():
    model, (x, y) = network(), dataset().tensors
    batches = parts(x, y, 8, 16)
    for measure in MEASURES.values():
        once = measure(model, cross_entropy, (pair for pair in batches))
        assert once == measure(model, cross_entropy, batches)


def test_a_model_that_changes_its_inputs_in_place_gets_them_back():

    class Normalised(nn.Sequential):
        def forward(self, x):
            return super().forward(x.sub_(1).div_(2))

    model = Normalised(network())
    x, y = dataset().tensors
    before = x.clone()
    assert sam_sharpness(model, cross_entropy, [(x, y)], rho=0.0) == 0.0
    assert torch.equal(x, before)


def test_a_compiled_model_is_measured_uncompiled():
    model, (x, y) = network(), dataset().tensors
    compiled = torch.compile(model, backend="eager")
    ours, theirs = (top_eigenvalues(m, cross_entropy, [(x, y)]).values for m in (model, compiled))
    assert ours == theirs


def test_frozen_and_unused_parameters_do_not_move():
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model.idle = nn.Parameter(torch.ones(3))
    model.forward = lambda x: model[0](x)
    model[0].weight.data.fill_(3.0)
    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    assert sam_sharpness(model, mse_loss, data, rho=0.5) == pytest.approx(3.5**2 - 3**2)
    assert top_eigenvalues(model, mse_loss, data, count=2).values == pytest.approx((2.0, 0.0))


class OwnStatistics(nn.Linear):
    running_mean = torch.zeros(1)


X, Y = dataset().tensors


@pytest.mark.parametrize(
    ("measure", "settings", "message"),
    [
        *((m, {"rho": -0.1}, r"rho.*got -0\.1") for m in list(MEASURES)[:5]),
        ("sam", {"rho": float("nan")}, "rho.*got nan"),
        ("sam", {"rho": float("inf")}, "rho.*got inf"),
        *((m, {"batchnorm": "train"}, "batchnorm.*got 'train'") for m in MEASURES),
        *((m, {"batches": []}, r"batches.*got \[\]") for m in MEASURES),
        ("sam", {"batches": (X, Y)}, r"batches.*pairs.*got tensor"),
        ("sam", {"batches": [(X, Y, Y)]}, r"batches.*pairs.*got \(tensor"),
        ("sam", {"batches": [{"x": X, "y": Y}]}, r"batches.*pairs.*got \{'x'"),
        ("sam", {"batches": [(1, 2)]}, r"batches.*pairs.*got \(1, 2\)"),
        ("sam", {"batches": [(X, Y), (X[:0], Y[:0])]}, "batches.*rows"),
        *(
            (m, {"loss_fn": partial(cross_entropy, reduction="none")}, r"loss_fn.*got shape \(")
            for m in MEASURES
        ),
        ("sam", {"model": nn.Linear(6, 4).requires_grad_(False)}, "model.*got Linear"),
        (
            "sam",
            {"model": OwnStatistics(6, 4), "batchnorm": "recalibrated"},
            "batchnorm.*OwnStatistics.*got recalibrated",
        ),
        ("max", {"steps": 0}, "steps.*got 0"),
        ("adaptive", {"steps": 0}, "steps.*got 0"),
        ("average", {"draws": 0}, "draws.*got 0"),
        ("average", {"seed": -1}, "seed.*got -1"),
        ("m", {"m": 0}, "m must.*got 0"),
        ("m", {"m": 25}, "m must.* 24.*got 25"),
        ("eigenvalues", {"count": 0}, "count.*got 0"),
        ("eigenvalues", {"count": 5}, "iterations.* 5.*got 4"),
        ("eigenvalues", {"count": 400, "iterations": 400}, "count.* 108.*got 400"),
        ("eigenvalues", {"tolerance": 0.0}, r"tolerance.*got 0\.0"),
        ("eigenvalues", {"tolerance": float("inf")}, "tolerance.*got inf"),
        ("trace", {"hvps": 0}, "hvps.*got 0"),
        ("trace", {"hvps": 10}, "hvps.*multiple of 3, got 10"),
        ("spectrum", {"draws": 0}, "draws.*got 0"),
        ("spectrum", {"iterations": 0}, "iterations.*got 0"),
        ("spectrum", {"points": 1}, "points.*got 1"),
        ("spectrum", {"width": 0.0}, r"width.*got 0\.0"),
        ("spectrum", {"width": float("inf")}, "width.*got inf"),
    ],
)
def test_bad_values(measure, settings, message):
    good = {"model": network(), "loss_fn": cross_entropy, "batches": [(X, Y)]}
    with pytest.raises(ValueError, match=message):
        MEASURES[measure](**{**good, **settings})


@pytest.mark.parametrize(
    ("measure", "settings", "message"),
    [
        *((m, {"model": None}, "model.*got None") for m in MEASURES),
        *((m, {"loss_fn": "mse"}, "loss_fn.*got 'mse'") for m in MEASURES),
        *((m, {"batches": None}, "batches.*got None") for m in MEASURES),
        *((m, {"loss_fn": lambda out, y: 1.0}, r"loss_fn.*got 1\.0") for m in MEASURES),
        ("sam", {"batches": TensorDataset(X, Y)}, "batches.*got <.*TensorDataset"),
        *((m, {"rho": "0.1"}, r"rho.*got '0\.1'") for m in list(MEASURES)[:5]),
        ("sam", {"rho": None}, "rho.*got None"),
        ("sam", {"rho": True}, "rho.*got True"),
        ("max", {"steps": 2.0}, r"steps.*got 2\.0"),
        ("m", {"m": "8"}, "m must.*got '8'"),
        ("average", {"seed": None}, "seed.*got None"),
        ("eigenvalues", {"count": 1.5}, r"count.*got 1\.5"),
        ("eigenvalues", {"tolerance": "1e-3"}, "tolerance.*got '1e-3'"),
        ("trace", {"hvps": 6.0}, r"hvps.*got 6\.0"),
        ("spectrum", {"points": [9]}, r"points.*got \[9\]"),
        ("spectrum", {"width": "wide"}, "width.*got 'wide'"),
    ],
)
def test_bad_types(measure, settings, message):
    good = {"model": network(), "loss_fn": cross_entropy, "batches": [(X, Y)]}
    with pytest.raises(TypeError, match=message):
        MEASURES[measure](**{**good, **settings})


@pytest.mark.parametrize("name", ["m", "average", "trace", "spectrum"])
def test_without_scipy_an_interval_is_refused_before_the_work(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    calls = []
    loss_fn = lambda out, y: calls.append(1) or cross_entropy(out, y)  # noqa: E731
    with pytest.raises(ImportError, match=r"pip install 'saltflat\[sharpness\]'"):
        MEASURES[name](network(), loss_fn, [(X, Y)])
    assert calls == []


@pytest.mark.parametrize("name", ["sam", "max", "adaptive", "eigenvalues"])
def test_without_scipy_the_others_work(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert MEASURES[name](network(), cross_entropy, [(X, Y)])


def test_every_public_name_is_documented():
    for name in set(sharpness.__all__) - {"Policy"}:  # a list of words
        assert getattr(sharpness, name).__doc__


def test_batches_of_dictionaries_weigh_as_their_rows():
    """Not as their keys."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, batch):
            return self.net(batch["x"])

    model, (x, y) = Model().eval(), dataset().tensors
    uneven = [({"x": x[s], "mask": x[s]}, y[s]) for s in (slice(0, 10), slice(10, 11))]
    whole = sam_sharpness(model, cross_entropy, [({"x": x[:11], "mask": x[:11]}, y[:11])])
    assert sam_sharpness(model, cross_entropy, uneven) == pytest.approx(whole, rel=1e-4)
    assert top_eigenvalues(model, cross_entropy, uneven).images == 11
