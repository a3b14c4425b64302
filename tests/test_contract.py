"""What SAF and MESA both promise, whatever their reference is."""

import copy

import pytest
import torch
from problems import TERMS, Run, batches, network, saf
from torch.nn.functional import cross_entropy

every_term = pytest.mark.parametrize("make", TERMS.values(), ids=TERMS)


def assert_same_run(one, other):
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))


@every_term
def test_training_is_bit_identical_to_plain_training_before_the_start(make):
    plain, ours = Run(), Run(lambda model: make(model, start_epoch=4))
    for epoch in range(4):
        plain.epoch(epoch)
        ours.epoch(epoch)
    assert_same_run(plain, ours)
    plain.epoch(4)
    ours.epoch(4)
    assert not torch.equal(plain.model[0].weight, ours.model[0].weight)


@every_term
def test_weight_0_equals_cross_entropy_alone(make):
    plain, ours = Run(), Run(lambda model: make(model, weight=0.0))
    for epoch in range(5):
        plain.epoch(epoch)
        ours.epoch(epoch)
    assert_same_run(plain, ours)


@every_term
@pytest.mark.parametrize("stop", [(1, 1), (3, 2), (5, 0)])
def test_resume_in_the_middle_of_an_epoch_is_bit_exact(make, stop, tmp_path):
    last_epoch, batch = stop
    straight, first, second = Run(make), Run(make), Run(make)
    for epoch in range(7):
        straight.epoch(epoch)
    for epoch in range(last_epoch):
        first.epoch(epoch)
    first.epoch(last_epoch, stop=batch)
    torch.save(first.state(), tmp_path / "checkpoint.pt")

    second.model.load_state_dict(network(seed=9).state_dict())
    second.load(torch.load(tmp_path / "checkpoint.pt", weights_only=True))
    assert second.term.epoch == last_epoch
    second.epoch(last_epoch, skip=batch)
    for epoch in range(last_epoch + 1, 7):
        second.epoch(epoch)
    second.losses = first.losses + second.losses
    assert_same_run(straight, second)
    for name, tensor in straight.term.state_dict().items():
        assert torch.equal(tensor, second.term.state_dict()[name]), name


@every_term
def test_state_is_tensors_by_name_alone(make):
    run = Run(make)
    run.epoch(0)
    assert all(isinstance(value, torch.Tensor) for value in run.term.state_dict().values())


@every_term
def test_after_loading_forward_needs_no_set_epoch(make):
    run = Run(make)
    run.epoch(3)
    term = make(run.model)
    term.load_state_dict(run.term.state_dict())
    index, x, _ = next(batches(3))
    logits = run.model(x)
    assert term(logits, index if make is saf else x).isfinite()
    with pytest.raises(ValueError, match="epoch 2 comes after epoch 3"):
        term.set_epoch(2)


@every_term
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler(make, dtype, device):
    """The scaled half-precision run stays close to the float32 one, with no row left out."""
    runs = {}
    for half in (False, True):
        model = network().to(device)
        term, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, enabled=half and dtype == torch.float16)
        terms = []
        for epoch in range(5):
            term.set_epoch(epoch)
            for index, x, y in batches(epoch):
                x, y = x.to(device), y.to(device)
                with torch.autocast(device.type, dtype, enabled=half):
                    logits = model(x)
                    extra = term(logits, index if make is saf else x)
                    loss = cross_entropy(logits, y) + extra
                assert logits.dtype == (dtype if half else torch.float32)
                assert extra.dtype == torch.float32
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if make is not saf:
                    term.update(model)
                terms.append(extra.item())
        assert term.nonfinite_rows == 0
        runs[half] = torch.tensor(terms)
    assert runs[False].max() > 0.01
    torch.testing.assert_close(runs[True], runs[False], rtol=0.1, atol=0.02)


@every_term
def test_forward_before_set_epoch(make):
    model = network()
    index, x, _ = next(batches(0))
    with pytest.raises(RuntimeError, match=r"call set_epoch\(epoch\)"):
        make(model)(model(x), index if make is saf else x)


@every_term
@pytest.mark.parametrize("epoch", [-1, 1.5, True, "3", None])
def test_bad_epoch(make, epoch):
    with pytest.raises(ValueError, match="epoch must be a whole number from 0"):
        make(network()).set_epoch(epoch)


@every_term
def test_an_epoch_that_goes_backwards_changes_nothing(make):
    run = Run(make)
    run.epoch(3)
    before = copy.deepcopy(run.term.state_dict())
    with pytest.raises(ValueError, match="epoch 1 comes after epoch 3"):
        run.term.set_epoch(1)
    for name, tensor in run.term.state_dict().items():
        assert torch.equal(tensor, before[name])
    run.epoch(3)


@every_term
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": -0.1}, "weight must be 0 or more"),
        ({"weight": float("nan")}, "weight must be 0 or more"),
        ({"temperature": 0}, "temperature must be positive"),
        ({"temperature": float("inf")}, "temperature must be positive"),
        ({"start_epoch": -1}, "start_epoch counts from 0"),
    ],
)
def test_bad_settings(make, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(network(), **kwargs)
