"""What every trajectory term promises."""

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from problems import METHODS, Run, batches, network, recomputing_backend, same
from torch.nn.functional import cross_entropy

from saltflat import MESA, SAF, Batch

every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def assert_same_run(one, other):
    for name, tensor in one.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name
    assert all(torch.equal(a, b) for a, b in zip(one.losses, other.losses, strict=True))


@every_method
def test_training_is_bit_identical_to_plain_training_before_the_start(method):
    plain, ours = Run(), Run(method, start_epoch=4)
    for epoch in range(4):
        plain.epoch(epoch)
        ours.epoch(epoch)
    assert_same_run(plain, ours)
    plain.epoch(4)
    ours.epoch(4)
    assert not torch.equal(plain.model[0].weight, ours.model[0].weight)


@every_method
def test_weight_0_equals_cross_entropy_alone(method):
    plain, ours = Run(), Run(method, weight=0.0)
    for epoch in range(5):
        plain.epoch(epoch)
        ours.epoch(epoch)
    assert_same_run(plain, ours)


@every_method
@pytest.mark.parametrize("stop", [(1, 1), (3, 2), (5, 0)])
def test_resume_in_the_middle_of_an_epoch_is_bit_exact(method, stop, tmp_path):
    last_epoch, batch = stop
    straight, first, second = Run(method), Run(method), Run(method)
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


@every_method
def test_state_is_tensors_by_name_alone(method):
    run = Run(method)
    run.epoch(0)
    assert all(isinstance(value, torch.Tensor) for value in run.term.state_dict().values())


@every_method
def test_after_loading_forward_needs_no_set_epoch(method):
    run = Run(method)
    run.epoch(3)
    term = method.make(run.model)
    term.load_state_dict(run.term.state_dict())
    index, x, _ = next(batches(3))
    logits = run.model(x)
    assert method.loss(term, logits, index, x).isfinite()
    with pytest.raises(ValueError, match=r"epoch 2.*epoch 3"):
        term.set_epoch(2)


@every_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler(method, dtype, device):
    """The scaled half-precision run stays close to the float32 one, with no row left out."""
    runs = {}
    for half in (False, True):
        model = network().to(device)
        term, optimizer = method.make(model), torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, enabled=half and dtype == torch.float16)
        terms = []
        for epoch in range(5):
            term.set_epoch(epoch)
            for index, x, y in batches(epoch):
                x, y = x.to(device), y.to(device)
                with torch.autocast(device.type, dtype, enabled=half):
                    logits = model(x)
                    extra = method.loss(term, logits, index, x)
                    loss = cross_entropy(logits, y) + extra
                assert logits.dtype == (dtype if half else torch.float32)
                assert extra.dtype == torch.float32
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                method.after_step(term, model)
                terms.append(extra.item())
        assert term.nonfinite_rows == 0
        runs[half] = torch.tensor(terms)
    assert runs[False].max() > 0.01
    torch.testing.assert_close(runs[True], runs[False], rtol=0.1, atol=0.02)


@every_method
def test_forward_before_set_epoch(method):
    model = network()
    index, x, _ = next(batches(0))
    with pytest.raises(RuntimeError, match="set_epoch"):
        method.loss(method.make(model), model(x), index, x)


@every_method
@pytest.mark.parametrize("epoch", [-1, 1.5, True, "3", None, 2**31])
def test_bad_epoch(method, epoch):
    with pytest.raises(ValueError, match=f"epoch.*got {epoch!r}"):
        method.make(network()).set_epoch(epoch)


@every_method
def test_an_epoch_that_goes_backwards_changes_nothing(method):
    run = Run(method)
    run.epoch(3)
    before = copy.deepcopy(run.term.state_dict())
    with pytest.raises(ValueError, match=r"epoch 1.*epoch 3"):
        run.term.set_epoch(1)
    for name, tensor in run.term.state_dict().items():
        assert torch.equal(tensor, before[name])
    run.epoch(3)


@every_method
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": -0.1}, "weight.*got -0.1"),
        ({"weight": float("nan")}, "weight.*got nan"),
        ({"weight": "1"}, "weight.*got '1'"),
        ({"weight": None}, "weight.*got None"),
        ({"weight": True}, "weight.*got True"),
        ({"temperature": 0}, "temperature.*got 0"),
        ({"temperature": float("inf")}, "temperature.*got inf"),
        ({"temperature": 1e300}, r"temperature.*got 1e\+300"),
        ({"temperature": [5.0]}, r"temperature.*got \[5.0\]"),
        ({"start_epoch": -1}, "start_epoch.*got -1"),
        ({"start_epoch": 5.5}, "start_epoch.*got 5.5"),
        ({"start_epoch": "5"}, "start_epoch.*got '5'"),
    ],
)
def test_bad_settings(method, kwargs, message):
    with pytest.raises(ValueError, match=message):
        method.make(network(), **kwargs)


@every_method
def test_numbers_of_any_kind(method):
    term = method.make(network(), weight=np.float32(0.5), temperature=np.float64(2), start_epoch=2)
    term.set_epoch(np.int64(3))
    assert (term.epoch, term.weight, term.temperature) == (3, 0.5, 2.0)
    assert {type(number) for number in (term.epoch, term.weight)} == {int, float}


@every_method
def test_a_batch_says_the_same_as_arguments(method):
    runs = Run(method), Run(method)
    for epoch in range(4):
        for run in runs:
            run.term.set_epoch(epoch)
        index, x, y = next(batches(epoch))
        losses = [method.loss(runs[0].term, runs[0].model(x), index, x)]
        losses.append(runs[1].term(runs[1].model(x), Batch(index, ((x,), {}), y)))
        assert torch.equal(*losses)
        for run in runs:
            with torch.no_grad():
                run.model[0].weight += 0.1
            method.after_step(run.term, run.model)
    assert losses[0] > 0


@every_method
def test_a_copy_goes_on_by_itself(method):
    """Also one that was pickled."""
    run = Run(method)
    for epoch in range(3):
        run.epoch(epoch)
    before = copy.deepcopy(run.term.state_dict())
    index, x, _ = next(batches(3))
    logits = run.model(x).detach()
    losses = []
    for term in (copy.deepcopy(run.term), pickle.loads(pickle.dumps(run.term)), run.term):
        assert same(dict(run.term.state_dict()), dict(before))
        term.set_epoch(3)
        losses.append(method.loss(term, logits, index, x))
    assert losses[0] == losses[1] == losses[2] > 0


@every_method
def test_warnings_show_the_callers_line(method):
    """Of an epoch in which the loss was on and 0, or the teacher was not updated."""
    run = Run(method)
    run.epoch(3)
    term = method.make(run.model)
    term.set_epoch(0)
    index, x, _ = next(batches(0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        method.loss(term, run.model(x), index * 0, x)
        term.set_epoch(1)
    assert [warning.filename for warning in said] == [__file__]


@every_method
def test_further_arguments_are_not_ignored(method):
    model = network()
    term = method.make(model)
    term.set_epoch(0)
    index, x, y = next(batches(0))
    with pytest.raises(TypeError):
        term(model(x), index if term.needs_index else x, y)
    if term.needs_index:
        for nothing in ((), (None,)):
            with pytest.raises(TypeError, match=r"SAF.*index"):
                term(model(x), *nothing)


@every_method
def test_loading_a_state_of_another_size_changes_nothing(method):
    run = Run(method)
    run.epoch(0)
    before = copy.deepcopy(run.term.state_dict())
    for name in [name for name in before if not name.endswith("_extra_state")]:
        other = {key: tensor + 1 for key, tensor in before.items()}
        other[name] = torch.cat([before[name].reshape(-1)] * 2)
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=rf"{re.escape(name)}.*other settings"):
                run.term.load_state_dict(other, strict=strict)
    with pytest.raises(RuntimeError, match="Missing key"):
        run.term.load_state_dict({"epochs": before["epochs"] + 1})
    for key, tensor in run.term.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@every_method
def test_logits_that_are_not_numbers_for_a_softmax(method):
    model = network()
    term = method.make(model)
    term.set_epoch(0)
    index, x, _ = next(batches(0))
    with pytest.raises(ValueError, match=r"outputs.*torch.int64"):
        method.loss(term, torch.zeros(8, 4, dtype=int), index, x)


@every_method
def test_compiled_training_equals_eager_training(method):
    """With the partitioner that decides what the backward pass computes again."""
    eager, compiled = Run(method), Run(method)

    def forward(index, x, y):
        logits = compiled.model(x)
        return cross_entropy(logits, y) + method.loss(compiled.term, logits, index, x)

    torch._dynamo.reset()
    step = torch.compile(forward, backend=recomputing_backend, fullgraph=True)
    for epoch in range(5):
        eager.epoch(epoch)
        compiled.term.set_epoch(epoch)
        for index, x, y in batches(epoch):
            loss = step(index, x, y)
            compiled.optimizer.zero_grad()
            loss.backward()
            compiled.optimizer.step()
            method.after_step(compiled.term, compiled.model)
            compiled.losses.append(loss.detach())
    torch.testing.assert_close(compiled.losses, eager.losses)
    for mine, other in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_objects_of_the_wrong_kind():
    model = network()
    for wrong in (None, "model", torch.nn.Linear):
        with pytest.raises(TypeError, match=r"model.*got"):
            MESA(wrong)
    for settings, message in (
        ({"output": 0}, "output.*got 0"),
        ({"output": "logits"}, "output.*got 'logits'"),
        ({"class_dim": "1"}, "class_dim.*got '1'"),
        ({"class_dim": 1.0}, "class_dim.*got 1.0"),
        ({"decay": "0.9"}, "decay.*got '0.9'"),
        ({"decay": 1.5}, "decay.*got 1.5"),
        ({"decay": None}, "decay.*got None"),
        *(({"freeze_epoch": bad}, f"freeze_epoch.*got {bad!r}") for bad in (0, -1, True, 2.0, "2")),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            MESA(model, **settings)
    for settings, message in (
        ({"num_samples": 2**62}, f"num_samples.*{2**62}"),
        ({"num_samples": [1, 2]}, r"num_samples.*got \[1, 2\]"),
        ({"num_classes": "10"}, "num_classes.*got '10'"),
        ({"lag": 0}, "lag.*got 0"),
        ({"lag": 1.5}, "lag.*got 1.5"),
        ({"storage": "half"}, "storage.*got 'half'"),
        ({"storage": torch.float16}, "storage.*got torch.float16"),
        ({"device": "gpu"}, "gpu"),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            SAF(**{"num_samples": 8, "num_classes": 4, **settings})
