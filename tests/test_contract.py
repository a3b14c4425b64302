"""What every method of the SAM family promises."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from problems import (
    CLASSES,
    FEATURES,
    WRAPPERS,
    dataset,
    network,
)
from torch import nn
from torch.nn.functional import cross_entropy

import saltflat
from saltflat.sam import ASAM, ESAM, GSAM, MSAM, SAM, LookSAM

every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def wrapped(wrapper, model, lr=0.1, base=torch.optim.SGD, **kwargs):
    settings = {"momentum": 0.9} if base is torch.optim.SGD else {}
    optimizer = base(model.parameters(), lr=lr, **settings)
    return wrapper.make(optimizer, **{"model": model, **kwargs})


def step(wrapper, optimizer, model, seed=0, rows=8):
    x, y = dataset(seed).tensors
    return optimizer.step(wrapper.closure(optimizer, model, x[:rows], y[:rows]))


def with_dropout():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, CLASSES),
    )


@every_wrapper
def test_a_step_costs_the_passes_it_says(wrapper):
    model = network()
    rows = {"forward": 0, "backward": 0}

    def count(direction, tensors):
        rows[direction] += len(tensors)

    model[0].register_forward_hook(lambda m, i, o: count("forward", o))
    model[3].register_full_backward_hook(lambda m, i, o: count("backward", o[0]))
    optimizer = wrapped(wrapper, model)
    for seed in range(10):
        step(wrapper, optimizer, model, seed)
    assert rows["forward"] == pytest.approx(wrapper.forwards * 80)
    assert rows["backward"] == pytest.approx(wrapper.backwards * 80)


@every_wrapper
def test_returns_the_first_loss(wrapper):
    model = network()
    x, y = dataset().tensors
    expected = cross_entropy(copy.deepcopy(model)(x[:8]), y[:8])
    torch.testing.assert_close(step(wrapper, wrapped(wrapper, model), model), expected)


@every_wrapper
def test_statistics_random_numbers_and_flags_are_those_of_one_pass(wrapper):
    model, plain = with_dropout(), with_dropout()
    optimizer = wrapped(wrapper, model)
    torch.manual_seed(1)
    plain(dataset().tensors[0][:8])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    step(wrapper, optimizer, model)
    assert torch.equal(torch.get_rng_state(), after)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), name
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


@every_wrapper
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_resume_is_bit_exact(wrapper, base, tmp_path):
    straight, first = with_dropout(), with_dropout()
    one, two = wrapped(wrapper, straight, base=base), wrapped(wrapper, first, base=base)
    for seed in range(13):
        torch.manual_seed(seed)
        step(wrapper, one, straight, seed)
    for seed in range(7):
        torch.manual_seed(seed)
        step(wrapper, two, first, seed)
    torch.save({"model": first.state_dict(), "optimizer": two.state_dict()}, tmp_path / "c.pt")

    state = torch.load(tmp_path / "c.pt", weights_only=True)
    second = with_dropout()
    third = wrapped(wrapper, second, base=base, lr=0.7)
    second.load_state_dict(state["model"])
    third.load_state_dict(state["optimizer"])
    for seed in range(7, 13):
        torch.manual_seed(seed)
        step(wrapper, third, second, seed)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    for mine, other in zip(straight.parameters(), second.parameters(), strict=True):
        for key, value in one.state[mine].items():
            assert torch.equal(value, third.state[other][key]), key


@every_wrapper
def test_a_base_optimizers_own_state_will_do(wrapper):
    model = network()
    optimizer = wrapped(wrapper, model)
    step(wrapper, optimizer, model)
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.5).state_dict())
    assert optimizer.steps == 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["momentum"] = 0.9
    step(wrapper, optimizer, model)


@every_wrapper
def test_is_one_with_its_base_optimizer(wrapper):
    model = network()
    base = torch.optim.SGD(model[0].parameters(), lr=0.4, momentum=0.9)
    optimizer = wrapper.make(base, model=model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups and optimizer.state is base.state
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.2, "rho": 0.7})
    assert [g["lr"] for g in base.param_groups] == [0.4, 0.2]
    assert base.param_groups[1]["rho"] == 0.7
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for seed in range(2):
        step(wrapper, optimizer, model, seed)
        schedule.step()
    assert [g["lr"] for g in base.param_groups] == [0.1, 0.05]
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups and optimizer.state is base.state
    twin_model, twin = copy.deepcopy((model, optimizer))
    step(wrapper, optimizer, model, 2)
    step(wrapper, twin, twin_model, 2)
    assert torch.equal(twin_model[0].weight, model[0].weight)


@every_wrapper
def test_a_groups_own_rho_moves_its_own_weights(wrapper):
    """With rho 0 a group does not move; its norm still counts in what moves the others."""
    model = network()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "rho": 0.0}]
    optimizer = wrapper.make(torch.optim.SGD(groups, lr=0.1, momentum=0.9), model=model)
    seen = []
    model.register_forward_pre_hook(
        lambda *_: seen.append([p.detach().clone() for p in model.parameters()])
    )
    start = [p.detach().clone() for p in model.parameters()]
    for seed in range(2):  # the second, because the first of MSAM is a plain one
        seen.clear()
        start = [p.detach().clone() for p in model.parameters()]
        if optimizer.interval > 1:
            optimizer.steps = 0
        step(wrapper, optimizer, model, seed)
    moved = [not torch.equal(a, b) for a, b in zip(seen[-1], start, strict=True)]
    assert any(moved[:2])
    assert not any(moved[2:])


@every_wrapper
def test_frozen_and_unused_parameters_stay(wrapper):
    model = network()
    model[0].weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)  # registered, so among the parameters, but never called
    model.forward = nn.Sequential(*list(model)[:4]).forward
    optimizer = wrapped(wrapper, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for seed in range(3):
        step(wrapper, optimizer, model, seed)
    for name, parameter in model.named_parameters():
        if name == "0.bias":
            continue  # BatchNorm cancels it: only rounding moves it
        stays = name == "0.weight" or name.startswith("unused")
        assert torch.equal(parameter, before[name]) == stays, name
    assert not model[0].weight.requires_grad


@every_wrapper
def test_a_branch_that_the_second_pass_skips_comes_back(wrapper):
    class Fickle(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.once = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.always(x) + (self.once(x) if self.calls == 1 else 0)

    torch.manual_seed(0)
    model = Fickle()
    before = model.once.weight.detach().clone()
    optimizer = wrapped(wrapper, model, beta=1.0) if wrapper.per_row else wrapped(wrapper, model)
    step(wrapper, optimizer, model)
    if wrapper.forwards > 1:
        assert torch.equal(model.once.weight, before)
    else:
        assert not torch.equal(model.once.weight, before)


@every_wrapper
@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_any_pass_leaves_the_weights_as_they_were(wrapper, call):
    model = network()
    optimizer = wrapped(wrapper, model)
    step(wrapper, optimizer, model)
    optimizer.steps = 0  # a step that climbs, for those with an interval
    before = [p.detach().clone() for p in model.parameters()]
    places = [p.data_ptr() for p in model.parameters()]
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == call:
            raise KeyError("the data are gone")

    hook = model.register_forward_pre_hook(fail)
    if call <= (3 if wrapper.per_row else int(wrapper.forwards + 0.9)):
        with pytest.raises(KeyError, match="the data are gone"):
            step(wrapper, optimizer, model)
        assert_all_equal(before, model.parameters())
    hook.remove()
    assert all(p.requires_grad for p in model.parameters())
    assert model[1].track_running_stats
    step(wrapper, optimizer, model)
    assert [p.data_ptr() for p in model.parameters()] == places


def assert_all_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@every_wrapper
def test_micro_batches_in_the_closure_equal_the_whole_batch(wrapper):
    def linear():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    whole, parts = linear(), linear()
    ours, theirs = wrapped(wrapper, whole), wrapped(wrapper, parts)
    x, y = dataset().tensors
    x = x[:8].double()
    y = y[:8]

    def per_row(rows):
        rows = torch.arange(8) if rows is None else rows
        halves = [cross_entropy(parts(x[r]), y[r], reduction="none") for r in rows.chunk(2)]
        return torch.cat(halves)

    def mean():
        theirs.zero_grad()
        losses = [cross_entropy(parts(x[i : i + 4]), y[i : i + 4]) / 2 for i in (0, 4)]
        for loss in losses:
            loss.backward()
        return sum(losses)

    for _ in range(3):
        ours.step(wrapper.closure(ours, whole, x, y))
        theirs.step(per_row if wrapper.per_row else mean)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def two_calls(
    wrapper, optimizer, model, x, y, scaler, dtype=torch.float16, clip=None, unscale=None
):
    """A step in the two-call form, as its users write it."""

    def losses(rows=slice(None)):
        with torch.autocast(x.device.type, dtype, enabled=dtype.itemsize == 2):
            return cross_entropy(model(x[rows]), y[rows], reduction="none")

    def backward(values):
        optimizer.zero_grad()
        scaler.scale(values.mean()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)

    def finish():
        if unscale is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), unscale)
        return optimizer.second_step(scaler)

    if isinstance(optimizer, MSAM):
        optimizer.first_step()
        backward(losses())
        return finish()
    first = losses()
    backward(first)
    if optimizer.first_step(first) if wrapper.per_row else optimizer.first_step():
        with optimizer.frozen_running_stats():
            rows = slice(None)
            if wrapper.per_row:
                with torch.no_grad():
                    rows = optimizer.select(losses())
            backward(losses(rows))
    return finish()


@every_wrapper
def test_the_two_call_form_equals_the_closure(wrapper):
    ours, theirs = network().double(), network().double()
    by_closure, by_calls = wrapped(wrapper, ours), wrapped(wrapper, theirs)
    x, y = dataset().tensors
    x, y = x[:8].double(), y[:8]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(6):
        by_closure.step(wrapper.closure(by_closure, ours, x, y))
        two_calls(wrapper, by_calls, theirs, x, y, scaler, dtype=torch.float64)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@every_wrapper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_a_scaler_stays_near_float32(wrapper, dtype, device):
    half, full = network().to(device), network().to(device)
    ours, theirs = wrapped(wrapper, half), wrapped(wrapper, full)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    off = torch.amp.GradScaler(device.type, enabled=False)
    x, y = (tensor[:16].to(device) for tensor in dataset().tensors)
    start = half[0].weight.detach().clone()
    for _ in range(6):
        two_calls(wrapper, ours, half, x, y, scaler, dtype, clip=1e6)
        scaler.update()
        two_calls(wrapper, theirs, full, x, y, off, torch.float32)
    assert (full[0].weight - start).norm() > 0.02
    gap = (half[0].weight - full[0].weight).norm() / (full[0].weight - start).norm()
    assert gap < 0.25


@every_wrapper
@pytest.mark.parametrize("bad_pass", [1, 2])
def test_an_overflow_in_either_pass_leaves_the_weights_as_they_were(wrapper, bad_pass):
    if bad_pass == 2 and wrapper.forwards == 1:
        bad_pass = 1  # it has no second
    model = network()
    optimizer, scaler = wrapped(wrapper, model), torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = dataset().tensors
    two_calls(wrapper, optimizer, model, x, y, scaler)
    scaler.update()
    optimizer.steps = 0
    before = copy.deepcopy(model.state_dict())
    momenta = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    calls = []

    def overflow(gradient):
        calls.append(1)
        return gradient * float("inf") if len(calls) == bad_pass else gradient

    hook = model[3].weight.register_hook(overflow)
    two_calls(wrapper, optimizer, model, x, y, scaler)
    scaler.update()
    hook.remove()
    assert len(calls) >= bad_pass
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert_all_equal(momenta, [optimizer.state[p]["momentum_buffer"] for p in model.parameters()])
    assert scaler.get_scale() == 2.0
    for _ in range(3):
        two_calls(wrapper, optimizer, model, x, y, scaler)
        scaler.update()
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(p.isfinite().all() for p in model.parameters())


@every_wrapper
def test_clipping_between_the_passes_is_clipping_of_the_step(wrapper):
    model = network()
    optimizer = wrapper.make(
        torch.optim.SGD(model.parameters(), lr=1.0, momentum=1e-9), model=model
    )
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = dataset().tensors
    two_calls(wrapper, optimizer, model, x, y, scaler, torch.bfloat16, clip=1e-3)
    moved = [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]
    length = torch.cat([m.flatten() for m in moved]).norm()
    assert 5e-4 < length < 1.5e-3


@every_wrapper
def test_compiled_models(wrapper):
    torch._dynamo.reset()
    plain, compiled = network(), network()
    fast = torch.compile(compiled, backend="eager")
    ours = wrapped(wrapper, plain, beta=1.0) if wrapper.per_row else wrapped(wrapper, plain)
    theirs = wrapped(wrapper, fast, **({"beta": 1.0} if wrapper.per_row else {}))
    for seed in range(3):
        step(wrapper, ours, plain, seed)
        step(wrapper, theirs, fast, seed)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], tensor)


@every_wrapper
def test_bad_settings_of_the_family(wrapper):
    model = network()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="rho"):
        wrapper.make(base, rho=-0.1)
    with pytest.raises(TypeError, match=r"base_optimizer.*got generator"):
        wrapper.make(model.parameters())
    optimizer = wrapper.make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=r"rho.*got -1"):
        optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)], "rho": -1})
    assert len(optimizer.param_groups) == 1
    for unsuitable in (optimizer, torch.optim.LBFGS(model.parameters())):
        with pytest.raises(TypeError, match=f"base_optimizer.*got {type(unsuitable).__name__}"):
            wrapper.make(unsuitable)


@pytest.mark.parametrize(
    ("make", "kwargs", "message"),
    [
        (SAM, {"interval": 0}, "interval.*got 0"),
        (LookSAM, {"interval": 0}, "interval.*got 0"),
        (LookSAM, {"alpha": -1}, "alpha.*got -1"),
        (ESAM, {"gamma": 0}, r"gamma.*\(0, 1\].*got 0"),
        (ESAM, {"beta": 1.1}, r"beta.*\(0, 1\].*got 1.1"),
        (ASAM, {"eta": -1}, "eta.*got -1"),
        (GSAM, {"alpha": -1}, "alpha.*got -1"),
        (GSAM, {"rho_min": 0.5}, r"rho_min.*\[0, rho=0.04\].*got 0.5"),
        (GSAM, {"lr_min": 0.1}, "lr_max.*lr_min=0.1.*got 0.1"),
        (SAM, {"m_sharpness": True}, "m_sharpness needs model=.*got NoneType"),
    ],
)
def test_bad_settings_of_one_method(make, kwargs, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **kwargs)


def test_msam_needs_momentum():
    model = network()
    with pytest.raises(ValueError, match=r"momentum.*got 0"):
        MSAM(torch.optim.SGD(model.parameters(), lr=0.1))


@every_wrapper
def test_steps_out_of_order_change_nothing(wrapper):
    model = network()
    optimizer = wrapped(wrapper, model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="step needs a closure"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="second_step needs first_step"):
        optimizer.second_step()
    if not isinstance(optimizer, MSAM):
        with pytest.raises(RuntimeError, match=r"must call loss.backward\(\)"):
            optimizer.first_step()
        x, y = dataset().tensors
        cross_entropy(model(x), y).backward()
    optimizer.first_step()
    with pytest.raises(RuntimeError, match="first_step was called twice"):
        optimizer.first_step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"must call loss.backward\(\)"):
        optimizer.second_step()
    assert_all_equal(before, model.parameters())


@every_wrapper
def test_a_closure_without_a_backward_pass_changes_nothing(wrapper):
    model = network()
    optimizer = wrapped(wrapper, model)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = dataset().tensors
    closure = (lambda rows: cross_entropy(model(x), y)) if wrapper.per_row else lambda: model(x)
    message = "must return the loss of each row" if wrapper.per_row else "must call loss.backward"
    for _ in range(2):  # with no gradient there, and with those of an earlier step
        with pytest.raises(RuntimeError, match=message):
            optimizer.step(closure)
        assert_all_equal(before, model.parameters())
        step(wrapper, optimizer, model)
        before = [p.detach().clone() for p in model.parameters()]


@every_wrapper
def test_a_step_can_be_cancelled(wrapper):
    model = network()
    optimizer = wrapped(wrapper, model)
    step(wrapper, optimizer, model)
    optimizer.steps = 0
    before = [p.detach().clone() for p in model.parameters()]
    x, y = dataset().tensors
    for way_out in (optimizer.cancel, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        cross_entropy(model.eval()(x), y).backward()
        model.train()
        optimizer.first_step()
        assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        way_out()
        assert_all_equal(before, model.parameters())
    step(wrapper, optimizer, model)


@every_wrapper
def test_an_interrupt_in_the_middle_of_a_step_leaves_the_weights_as_they_were(wrapper):
    """At every fifth line of the package: either nothing was done, or the whole step."""
    package = str(Path(saltflat.__file__).parent)
    lines = 0
    while True:
        model = network()
        optimizer = wrapped(wrapper, model)
        step(wrapper, optimizer, model)
        optimizer.steps = 0
        before = [p.detach().clone() for p in model.parameters()]
        twin_model, twin = copy.deepcopy((model, optimizer))
        step(wrapper, twin, twin_model)
        seen = []

        def interrupt(frame, event, argument, seen=seen, stop=lines):
            if not frame.f_code.co_filename.startswith(package):
                return None
            # What undoes a step is not itself interrupted.
            if frame.f_code.co_name in {"_restore", "__exit__", "set_random_state"}:
                return None
            if event == "line":
                seen.append(1)
                if len(seen) > stop:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return interrupt

        previous = sys.gettrace()
        sys.settrace(interrupt)
        try:
            step(wrapper, optimizer, model)
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(previous)
        assert any(
            all(torch.equal(a, b) for a, b in zip(model.parameters(), state, strict=True))
            for state in (before, twin_model.parameters())
        ), lines
        step(wrapper, optimizer, model)
        lines += 5
    assert lines > 20


@every_wrapper
def test_unscaling_and_clipping_as_torchs_guide_has_it(wrapper):
    """unscale_ on the wrapper, clip, then step: as without a scaler, whatever the scale."""
    changes = []
    for scale in (1.0, 2.0**14):
        model = network().double()
        optimizer = wrapped(wrapper, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        x, y = dataset().tensors
        for _ in range(2):
            two_calls(wrapper, optimizer, model, x.double(), y, scaler, torch.float64, unscale=0.05)
            scaler.update()
        changes.append([p.detach() for p in model.parameters()])
    for a, b in zip(*changes, strict=True):
        torch.testing.assert_close(a, b)


@every_wrapper
def test_an_overflow_in_the_very_first_step(wrapper):
    model = network()
    optimizer, scaler = wrapped(wrapper, model), torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = dataset().tensors
    before = [p.detach().clone() for p in model.parameters()]
    hook = model[3].weight.register_hook(lambda gradient: gradient * float("inf"))
    two_calls(wrapper, optimizer, model, x, y, scaler)
    scaler.update()
    assert_all_equal(before, model.parameters())
    hook.remove()
    for _ in range(6):
        two_calls(wrapper, optimizer, model, x, y, scaler)
        scaler.update()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(before[0], model[0].weight)


@every_wrapper
def test_sparse_gradients_are_refused(wrapper):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten())
    optimizer = wrapped(wrapper, model)
    x, y = torch.arange(8), torch.arange(8) % 4
    with pytest.raises(RuntimeError, match="dense, real gradients only"):
        optimizer.step(wrapper.closure(optimizer, model, x[:, None], y))


def test_every_method_of_the_family_is_held_to_this():
    made = {getattr(w.make, "func", w.make).__name__ for w in WRAPPERS.values()}
    assert made == set(saltflat.sam.__all__)
