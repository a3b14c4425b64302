"""Each method against its float64 twin, other libraries, and its relatives."""

import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, WRAPPERS, dataset, network
from references import MomentumSGD, sam_family_step
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.sam import ASAM, ESAM, GSAM, MSAM, SAM, LookSAM
from saltflat.sam.gsam import orthogonal

BASE = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.01}

TWINS = [
    ("sam", SAM, {"rho": 0.2}),
    ("asam", ASAM, {"rho": 0.5, "eta": 0.01}),
    ("gsam", GSAM, {"rho": 0.4, "rho_min": 0.1, "alpha": 0.3, "lr_max": 0.3, "lr_min": 0.05}),
    ("esam", ESAM, {"rho": 0.2, "beta": 0.5, "gamma": 0.4}),
    ("looksam", LookSAM, {"rho": 0.3, "interval": 3, "alpha": 0.7}),
    ("msam", MSAM, {"rho": 0.3, "adaptive": False}),
    ("msam", MSAM, {"rho": 0.5, "adaptive": True, "eta": 0.01}),
]


@pytest.mark.parametrize(("name", "method", "settings"), TWINS)
def test_equals_the_float64_twin_for_twenty_steps(name, method, settings, device):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES).double().to(device)
    model.weight.data *= 5
    weights = {"matrix": model.weight.detach().cpu().numpy().T.copy()}
    weights["bias"] = model.bias.detach().cpu().numpy().copy()
    twin, memory = MomentumSGD(weights, BASE["momentum"], BASE["weight_decay"]), {}
    base = torch.optim.SGD(model.parameters(), **BASE)
    optimizer = method(base, model=model, **settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    x, y = dataset().tensors
    x = x.double().to(device)
    for step in range(20):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:10]
        joining = None
        if name == "esam":
            names = {id(model.weight): "matrix", id(model.bias): "bias"}
            joining = {names[i] for i in optimizer.joining()}
        sam_family_step(
            *(name, twin, x[rows].cpu().numpy(), y[rows].numpy()),
            lr=base.param_groups[0]["lr"],
            step=step,
            memory=memory,
            joining=joining,
            **settings,
        )
        batch = x[rows.to(device)], y[rows].to(device)
        optimizer.step(WRAPPERS[name].closure(optimizer, model, *batch))
        schedule.step()
        for parameter, key in ((model.weight, "matrix"), (model.bias, "bias")):
            buffer = base.state[parameter]["momentum_buffer"]
            for ours, theirs in ((parameter, twin.weights), (buffer, twin.velocity)):
                array = ours.detach().cpu().numpy().T
                np.testing.assert_allclose(array, theirs[key], rtol=1e-9, atol=1e-11)


def train(make, steps=10, seed=0, name="sam", model=None):
    """Parameters after some steps of a small network without BatchNorm."""
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = make(torch.optim.SGD(model.parameters(), **BASE))
    x, y = dataset().tensors
    for step in range(steps):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:8]
        optimizer.step(WRAPPERS[name].closure(optimizer, model, x[rows], y[rows]))
    return [p.detach() for p in model.parameters()]


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def small_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@pytest.mark.oracle
def test_sam_equals_pytorch_optimizers():
    import pytorch_optimizer

    model = small_network()
    other = pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, rho=0.2, **BASE)
    x, y = dataset().tensors
    for step in range(10):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:8]

        def closure(rows=rows):
            other.zero_grad()
            loss = cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        closure()  # its step wants the first gradients to be there already
        other.step(closure)
    ours = train(lambda base: SAM(base, rho=0.2))
    assert_close(ours, [p.detach() for p in model.parameters()])


@pytest.mark.oracle
def test_gsam_equals_pytorch_optimizers():
    """Its decomposition is ours; its rho comes from a scheduler of its own, here held constant."""
    import pytorch_optimizer

    class Constant:
        def step(self):
            return 0.2

    model = small_network()
    base = torch.optim.SGD(model.parameters(), **BASE)
    other = pytorch_optimizer.GSAM(model.parameters(), base, model, Constant(), alpha=0.3)
    x, y = dataset().tensors
    for step in range(10):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:8]
        other.set_closure(cross_entropy, x[rows], y[rows])
        other.step()
    ours = train(lambda base: GSAM(base, rho=0.2, rho_min=0.2, alpha=0.3))
    assert_close(ours, [p.detach() for p in model.parameters()])


@pytest.mark.oracle
def test_asam_differs_from_pytorch_optimizers_on_vectors_alone():
    """It scales by |w|, ours by |w| + eta and, as the paper's code, leaves biases unscaled."""
    import pytorch_optimizer

    model = nn.Linear(FEATURES, CLASSES, bias=False)
    start = model.weight.detach().clone()
    other = pytorch_optimizer.SAM(
        model.parameters(), torch.optim.SGD, rho=0.2, adaptive=True, **BASE
    )
    x, y = dataset().tensors

    def closure():
        other.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    closure()
    other.step(closure)
    twin = nn.Linear(FEATURES, CLASSES, bias=False)
    twin.weight.data.copy_(start)
    ours = ASAM(torch.optim.SGD(twin.parameters(), **BASE), rho=0.2, eta=0.0)
    ours.step(WRAPPERS["asam"].closure(ours, twin, x, y))
    torch.testing.assert_close(twin.weight, model.weight)


def test_looksam_takes_no_rounding_error_for_a_direction():
    assert_close(train(lambda base: LookSAM(base, rho=1e-7)), train(plain))


def test_esam_wants_the_rows_it_asks_for():
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = ESAM(torch.optim.SGD(model.parameters(), lr=0.1), gamma=0.5)
    x, y = dataset().tensors
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"12 rows.*24 losses"):
        optimizer.step(lambda rows: cross_entropy(model(x), y, reduction="none"))
    assert torch.equal(model.weight, before)


def test_a_groups_own_rho_outlives_a_plain_checkpoint():
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "rho": 0.0}]
    optimizer = SAM(torch.optim.SGD(groups, lr=0.1))
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer.load_state_dict(torch.optim.SGD(groups, lr=0.5).state_dict())
    assert climbs_by(optimizer, 0) == pytest.approx(0.05, rel=1e-3)
    assert climbs_by(optimizer, 1) == 0
    other = ASAM(optimizer.base_optimizer)
    other.load_state_dict(optimizer.state_dict())
    assert climbs_by(other, 0) > 0 == climbs_by(other, 1)


def test_products_of_half_precision_do_not_overflow():
    big = [torch.full((4,), 300.0, dtype=torch.float16)]
    rest, removed = orthogonal(big, big)
    assert rest[0].count_nonzero() == 0
    assert removed.item() == pytest.approx(600.0)
    small = [torch.full((4,), 1e-4, dtype=torch.float16)]
    assert orthogonal(small, big)[1].item() == pytest.approx(2e-4, rel=1e-2)


def test_orthogonal_parts():
    left, right = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.eye(2)[0], torch.ones(1)]
    rest, removed = orthogonal(left, right)  # <left, right> / |right|^2 is 4 / 2
    assert_close(rest, [torch.tensor([-1.0, 2.0]), torch.tensor([1.0])])
    assert removed.item() == pytest.approx(2 * 2**0.5)
    nothing = [torch.zeros(2), torch.zeros(1)]
    assert_equal(orthogonal(left, nothing)[0], left)


def climbs_by(optimizer, group=0):
    """How far a step moves the weights of a group."""
    for other in optimizer.param_groups:
        for p in other["params"]:
            p.grad = torch.ones_like(p) if other is optimizer.param_groups[group] else None
    members = optimizer.param_groups[group]["params"]
    before = [p.detach().clone() for p in members]
    optimizer.first_step()
    squares = [((p.detach() - b) ** 2).sum() for p, b in zip(members, before, strict=True)]
    optimizer.cancel()
    return float(sum(squares)) ** 0.5


def plain(base):
    return base


ROOTS = {
    "sam": lambda base: SAM(base, rho=0.0),
    "asam": lambda base: ASAM(base, rho=0.0),
    "gsam": lambda base: GSAM(base, rho=0.0, rho_min=0.0),
    "looksam": lambda base: LookSAM(base, rho=0.0),
    "msam": lambda base: MSAM(base, rho=0.0),
    "esam": lambda base: ESAM(base, rho=0.0, gamma=1.0),
}


@pytest.mark.parametrize("name", ROOTS)
def test_rho_0_is_the_base_optimizer_bit_for_bit(name):
    assert_equal(train(ROOTS[name], name=name), train(plain))


def test_relatives_of_sam_bit_for_bit():
    expected = train(lambda base: SAM(base, rho=0.2))
    assert not torch.equal(expected[0], train(plain)[0])
    assert_equal(train(lambda base: LookSAM(base, rho=0.2, interval=1)), expected)
    assert_equal(train(lambda b: GSAM(b, rho=0.2, rho_min=0.2, alpha=0.0)), expected)
    whole = train(lambda base: ESAM(base, rho=0.2, beta=1.0, gamma=1.0), name="esam")
    assert_close(whole, expected)  # the mean of the rows' losses, not the loss of the batch


def test_interval_is_sam_in_its_steps_and_the_base_in_the_others():
    both = train(lambda base: SAM(base, rho=0.2, interval=2), steps=2)
    model = small_network()
    base = torch.optim.SGD(model.parameters(), **BASE)
    x, y = dataset().tensors
    for step, optimizer in enumerate((SAM(base, rho=0.2), base)):
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:8]
        optimizer.step(WRAPPERS["sam"].closure(optimizer, model, x[rows], y[rows]))
    assert_equal(both, [p.detach() for p in model.parameters()])


def test_gsams_rho_follows_the_learning_rate():
    model = nn.Linear(2, 2)
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = GSAM(base, rho=0.4, rho_min=0.1)
    group = optimizer.param_groups[0]
    for lr, rho in ((1.0, 0.4), (0.5, 0.25), (0.0, 0.1), (2.0, 0.4)):
        group["lr"] = lr
        assert climbs_by(optimizer) == pytest.approx(rho, rel=1e-4)
    group["lr"] = torch.tensor(0.5)
    assert climbs_by(optimizer) == pytest.approx(0.25, rel=1e-4)
    warming = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(warming, lambda step: 0.1)
    late = GSAM(warming, rho=0.4, rho_min=0.0)
    assert climbs_by(late) == pytest.approx(0.04, rel=1e-4)


def test_esam_takes_the_rows_whose_loss_rose_most():
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = ESAM(torch.optim.SGD(model.parameters(), lr=0.1), gamma=0.5)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.first_step(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0]))
    rows = optimizer.select(torch.tensor([1.5, 0.0, 3.0, 1.1, 2.0]))
    assert rows.tolist() == [0, 2, 4]
    optimizer.cancel()


def test_esam_chooses_each_tensor_with_probability_beta_and_the_same_on_a_resume():
    model = network()
    optimizer = ESAM(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.6)
    parameters = list(model.parameters())
    shares = []
    for optimizer.steps in range(2000):
        joining = optimizer.joining()
        assert joining == optimizer.joining()
        shares.append(len(joining) / len(parameters))
    assert np.mean(shares) == pytest.approx(0.6, abs=0.02)
    other = ESAM(torch.optim.SGD(model.parameters(), lr=0.1), beta=0.6, seed=1)
    other.steps = optimizer.steps = 5
    assert optimizer.joining() != other.joining()


def test_looksam_steps_between_need_a_direction_that_is_finite():
    """After an overflow in its SAM step, the steps between are plain ones."""
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = LookSAM(torch.optim.SGD(model.parameters(), lr=0.0), interval=2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.first_step()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("inf"))
    optimizer.second_step(torch.amp.GradScaler("cpu", enabled=False))
    kept = optimizer.state_dict()["method"]["kept"].values()
    assert len(kept) == 2 and not any(g_v.count_nonzero() for g_v in kept)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    assert not optimizer.first_step()
    optimizer.second_step()
    assert all((parameter.grad == 1e3).all() for parameter in model.parameters())


def test_gsam_after_a_one_cycle_schedule():
    base = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(base, max_lr=1.0, total_steps=10)
    optimizer = GSAM(base, rho=0.4, rho_min=0.0)
    assert climbs_by(optimizer) == pytest.approx(0.4 * 0.04, rel=1e-4)


def test_msam_looks_for_the_momentum():
    class Renamed(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for state in self.state.values():
                state["velocity"] = state.pop("momentum_buffer")

    model = nn.Linear(FEATURES, CLASSES)
    optimizer = MSAM(Renamed(model.parameters(), lr=0.1, momentum=0.9))
    x, y = dataset().tensors
    closure = WRAPPERS["msam"].closure(optimizer, model, x, y)
    optimizer.step(closure)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"Renamed.*momentum_buffer, exp_avg"):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)


def test_looksam_climbs_with_whichever_parameters_have_a_gradient():
    heads = [torch.nn.Linear(3, 2) for _ in range(2)]
    parameters = [p for head in heads for p in head.parameters()]
    optimizer = LookSAM(torch.optim.SGD(parameters, lr=0.1), interval=2)
    x = torch.randn(4, 3)
    for step in range(8):

        def closure(head=heads[step // 2 % 2]):
            optimizer.zero_grad()
            loss = (head(x) ** 2).mean()
            loss.backward()
            return loss

        before = [p.clone() for p in heads[1 - step // 2 % 2].parameters()]
        optimizer.step(closure)
        after = heads[1 - step // 2 % 2].parameters()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
