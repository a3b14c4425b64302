"""SAM itself, and the protocol that the whole family shares. More of it is in test_contract.py."""

import pytest
import torch
from problems import CLASSES, FEATURES, WRAPPERS, dataset, network
from torch import nn
from torch.nn.functional import cross_entropy

from saltflat.core.cuda_graph import GraphedStep, withhold_ticks
from saltflat.core.registry import Part, registered
from saltflat.sam import ASAM, ESAM, GSAM, MSAM, SAM, LookSAM
from saltflat.sam.base import SharpnessAware

every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
BASES = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
}


def davda54(model, base, x, y, rho):
    """A step as github.com/davda54/sam has it, one norm over all parameters."""
    parameters = list(model.parameters())
    base.zero_grad()
    cross_entropy(model(x), y).backward()
    with torch.no_grad():
        length = torch.norm(torch.stack([p.grad.norm(p=2) for p in parameters]), p=2)
        old = [p.clone() for p in parameters]
        for p in parameters:
            p.add_(p.grad * (rho / (length + 1e-12)))  # climb to the local maximum "w + e(w)"
    base.zero_grad()
    cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, w in zip(parameters, old, strict=True):
            p.copy_(w)  # get back to "w" from "w + e(w)"
    base.step()


@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
def test_sam_equals_davda54s_to_the_bit_in_float64(make):
    ours, theirs = network().double(), network().double()
    optimizer, base = SAM(make(ours.parameters()), rho=0.2), make(theirs.parameters())
    x, y = dataset().tensors
    for start in range(0, 20, 4):
        rows = slice(start, start + 8)
        optimizer.step(WRAPPERS["sam"].closure(optimizer, ours, x[rows].double(), y[rows]))
        davda54(theirs, base, x[rows].double(), y[rows], rho=0.2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def built(wrapper):
    """A model, its wrapper after a first step that climbs in the next, and a batch."""
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    whole = {"beta": 1.0} if wrapper.per_row else {}  # all of ESAM's weights move
    optimizer = wrapper.make(base, model=model, **whole)
    x, y = (tensor[:8] for tensor in dataset().tensors)
    optimizer.step(wrapper.closure(optimizer, model, x, y))
    optimizer.steps = 0
    return model, optimizer, x, y


def first_half(optimizer, model, x, y):
    """The two-call form up to the climb."""
    if not isinstance(optimizer, MSAM):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
    assert optimizer.first_step()


def changed(model, before):
    """Which parameters differ from a state."""
    return [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@every_wrapper
@pytest.mark.parametrize("ending", ["second_step", "cancel", "load_state_dict"])
def test_weights_loaded_between_the_steps_are_an_error(wrapper, ending):
    model, optimizer, x, y = built(wrapper)
    before, other = copied(model), network(seed=1)
    first_half(optimizer, model, x, y)
    model.load_state_dict(other.state_dict())
    cross_entropy(model(x), y).backward()
    arguments = [optimizer.state_dict()] if ending == "load_state_dict" else []
    with pytest.raises(RuntimeError, match="changed between first_step and second_step"):
        getattr(optimizer, ending)(*arguments)
    assert changed(model, before) == []
    model.load_state_dict(other.state_dict())  # as the message says: when no step is under way
    getattr(optimizer, "cancel" if ending == "second_step" else ending)(*arguments)
    assert changed(model, other.state_dict()) == []


@every_wrapper
@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_a_step_without_a_second_backward_pass_is_an_error(wrapper, set_to_none):
    model, optimizer, x, y = built(wrapper)
    before = copied(model)
    first_half(optimizer, model, x, y)
    if set_to_none is not None:
        optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(RuntimeError, match=r"loss.backward\(\)"):
        optimizer.second_step()
    assert changed(model, before) == []
    optimizer.step(wrapper.closure(optimizer, model, x, y))
    assert changed(model, before)


@every_wrapper
@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_the_second_pass_may_come_in_parts(wrapper, set_to_none):
    """The gradients of the first pass are not in the sum, whether the user zeroes them or not."""
    results = []
    for parts in (1, 2):
        model, optimizer, x, y = built(wrapper)
        model[1].eval()
        first_half(optimizer, model, x, y)
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        for rows in torch.arange(8).chunk(parts):
            (cross_entropy(model(x[rows]), y[rows]) / parts).backward()
        optimizer.second_step()
        results.append([p.detach() for p in model.parameters()])
    for whole, sum_of_parts in zip(*results, strict=True):
        torch.testing.assert_close(whole, sum_of_parts)


def test_a_plain_step_between_climbs_needs_one_backward_pass():
    model = network()
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1), interval=2)
    x, y = dataset().tensors
    optimizer.step(WRAPPERS["sam"].closure(optimizer, model, x, y))
    before = copied(model)
    cross_entropy(model(x), y).backward()
    assert not optimizer.first_step()
    optimizer.second_step()
    assert changed(model, before)


@pytest.mark.parametrize("scale", [1.0, 2.0**14])
@pytest.mark.parametrize("clip", [False, True])
def test_gsams_gradients_are_combined_unscaled(scale, clip):
    """Whether the user unscales for clipping or not, and whatever the scale."""
    model, plain = network().double(), network().double()
    ours, theirs = (
        GSAM(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), alpha=0.5, rho=0.5)
        for m in (model, plain)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    x, y = dataset().tensors
    for _ in range(3):
        for m, optimizer in ((model, ours), (plain, theirs)):
            scaled = scaler if optimizer is ours else torch.amp.GradScaler("cpu", enabled=False)
            for finish in (optimizer.first_step, None):
                scaled.scale(cross_entropy(m(x.double()), y)).backward()
                if finish is not None:
                    finish()
            if clip:
                scaled.unscale_(optimizer)
                nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.second_step(scaled)
            scaled.update()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_two_call_form_satisfies_a_schedule():
    model = nn.Linear(FEATURES, CLASSES)
    optimizer = SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for finish in (optimizer.first_step, optimizer.second_step):
        model(torch.ones(1, FEATURES)).sum().backward()
        finish()
    schedule.step()  # warnings are errors here
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def host_state(value, seen=None):
    """What Python holds below an object; a tensor stands for its address and shape."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape
    if isinstance(value, dict):
        return [(host_state(k, seen), host_state(v, seen)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [host_state(part, seen) for part in value]
    if isinstance(value, torch.optim.Optimizer) and id(value) not in seen:
        seen.add(id(value))
        return host_state(vars(value), seen)
    return value if isinstance(value, int | float | str | None) else id(value)


@every_wrapper
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("steps", [0, 1])
def test_no_host_state_changes_inside_a_step(wrapper, base, steps):
    """What Python counts is in tick; tensors keep their places. So a CUDA graph can repeat it."""
    settings = {"momentum": 0.9} if base is torch.optim.SGD else {}
    model = network()
    optimizer = wrapper.make(base(model.parameters(), lr=0.1, **settings), model=model)
    x, y = (tensor[:8] for tensor in dataset().tensors)
    closure = wrapper.closure(optimizer, model, x, y)
    for _ in range(6):  # warm-up: buffers exist from then on
        optimizer.step(closure)
    optimizer.steps = steps  # the first climbs in any case; with an interval the second does not
    weights, before = copied(model), host_state(optimizer)
    generator = torch.get_rng_state()
    with withhold_ticks():
        optimizer.step(closure)
    assert host_state(optimizer) == before
    assert changed(model, weights)
    assert torch.equal(torch.get_rng_state(), generator)
    optimizer.step(closure)
    assert optimizer.steps == steps + 1


@every_wrapper
def test_a_graphed_step_counts_and_trains_as_a_plain_one(wrapper):
    results = []
    for graphed in (True, False):
        model = network()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = wrapper.make(base, model=model)

        def step(x, y, optimizer=optimizer, model=model):
            return optimizer.step(wrapper.closure(optimizer, model, x, y))

        batches = [dataset(seed).tensors for seed in range(7)]
        if graphed and isinstance(optimizer, ESAM):
            with pytest.raises(RuntimeError, match=r"ESAM.*without a GraphedStep"):
                GraphedStep(step, [optimizer])(*batches[0])
            return
        taken = GraphedStep(step, [optimizer]) if graphed else step
        losses = [taken(*batch) for batch in batches]
        assert optimizer.steps == 7
        results.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_family_is_registered_and_is_a_part_of_the_loop():
    entries = registered("optimizer")
    assert {"sam", "asam", "gsam", "esam", "looksam", "msam"} <= entries.keys()
    for name in ("sam", "asam", "gsam", "esam", "looksam", "msam"):
        model = network()
        base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = entries[name].build(base, model=model)
        assert isinstance(optimizer, SharpnessAware) and isinstance(optimizer, Part)
        assert optimizer.nbytes == 0
        forwards, backwards = map(float, entries[name].passes.split(" + "))
        wrapper = WRAPPERS[name]
        assert (forwards, backwards) == (wrapper.forwards, wrapper.backwards)


def test_looksam_keeps_a_copy_of_the_weights_in_bytes():
    model = network()
    optimizer = LookSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = dataset().tensors
    optimizer.step(WRAPPERS["looksam"].closure(optimizer, model, x, y))
    assert optimizer.nbytes == sum(p.nbytes for p in model.parameters())


WRONG = [
    *((method, {"rho": "0.1"}, "rho.*got '0.1'") for method in (SAM, ASAM, GSAM, LookSAM, MSAM)),
    *((method, {"rho": None}, "rho.*got None") for method in (SAM, ESAM, GSAM)),
    (SAM, {"rho": True}, "rho.*got True"),
    (SAM, {"rho": float("nan")}, "rho.*got nan"),
    (SAM, {"rho": float("inf")}, "rho.*got inf"),
    (SAM, {"interval": 1.5}, "interval.*got 1.5"),
    (SAM, {"interval": "2"}, "interval.*got '2'"),
    (SAM, {"model": "resnet18"}, "model.*got 'resnet18'"),
    (ASAM, {"eta": "0"}, "eta.*got '0'"),
    (MSAM, {"eta": None}, "eta.*got None"),
    (GSAM, {"alpha": "1"}, "alpha.*got '1'"),
    (GSAM, {"rho_min": None}, "rho_min.*got None"),
    (GSAM, {"lr_min": "0"}, "lr_min.*got '0'"),
    (GSAM, {"lr_max": "0.1"}, "lr_max.*got '0.1'"),
    (LookSAM, {"alpha": None}, "alpha.*got None"),
    (ESAM, {"beta": "1"}, "beta.*got '1'"),
    (ESAM, {"gamma": None}, "gamma.*got None"),
]


@pytest.mark.parametrize(("method", "settings", "message"), WRONG)
def test_a_wrong_type_is_refused_by_its_name_when_built(method, settings, message):
    base = torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9)
    with pytest.raises((TypeError, ValueError), match=message):
        method(base, **settings)


@pytest.mark.parametrize("method", [SAM, ASAM, GSAM, ESAM, LookSAM, MSAM])
@pytest.mark.parametrize("base", [None, 0.1, [torch.zeros(1)], nn.Linear(1, 1)])
def test_a_base_that_is_no_optimizer_is_refused(method, base):
    with pytest.raises(TypeError, match=f"base_optimizer.*got {type(base).__name__}"):
        method(base)


def test_a_groups_rho_of_a_wrong_type_is_refused():
    model = network()
    groups = [{"params": model.parameters(), "rho": "0.1"}]
    with pytest.raises(TypeError, match=r"rho.*got '0.1'"):
        SAM(torch.optim.SGD(groups, lr=0.1))
