import copy
import warnings

import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, dataset, recomputing_backend
from references import saf_training
from torch.nn.functional import cross_entropy

from saltflat import SAF, trajectory_loss
from saltflat.memory import CODECS

EVERY = torch.arange(4)


def outputs(*shape, seed=0):
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ready(**kwargs):
    """SAF in epoch 1, when the four samples' outputs of epoch 0 are its references."""
    saf = SAF(**{"num_samples": 4, "num_classes": 3, "lag": 1, "start_epoch": 1, **kwargs})
    saf.set_epoch(0)
    assert saf(outputs(4, 3), EVERY) == 0
    saf.set_epoch(1)
    return saf


@pytest.mark.parametrize("tau_squared", [True, False])
def test_training_equals_algorithm_1(tau_squared):
    generator = np.random.default_rng(0)
    data = [tensor.numpy() for tensor in dataset().tensors]
    x, y = data[0].astype("float64"), data[1]
    weight = generator.normal(size=(FEATURES, CLASSES))
    epochs = []
    for _ in range(9):  # drop_last: 24 samples in batches of 5, so 4 have no reference later
        order = generator.permutation(SAMPLES)[:20].reshape(4, 5)
        epochs.append([(index, x[index], y[index]) for index in order])
    settings = {"temperature": 3.0, "lag": 2, "start_epoch": 3}
    strength = 0.7 * (9.0 if tau_squared else 1.0)
    expected = saf_training(weight, epochs, learning_rate=0.2, strength=strength, **settings)

    theta = torch.tensor(weight, requires_grad=True)
    saf = SAF(SAMPLES, CLASSES, weight=0.7, storage="float32", tau_squared=tau_squared, **settings)
    trace = []
    for epoch, batches in enumerate(epochs):
        saf.set_epoch(epoch)
        for index, *batch in batches:
            features, labels = map(torch.from_numpy, batch)
            logits = features @ theta
            loss = cross_entropy(logits, labels) + saf(logits, torch.from_numpy(index))
            loss.backward()
            with torch.no_grad():
                theta -= 0.2 * theta.grad
            theta.grad = None
            trace.append((loss.item(), theta.detach().numpy().copy()))
    assert len(trace) == len(expected) == 36
    for (loss, weights), (expected_loss, expected_weights) in zip(trace, expected, strict=True):
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)  # the memory is float32
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-6, atol=1e-6)


def test_reads_the_epoch_before_and_records_this_one(device):
    saf = ready(temperature=2.0, weight=0.5, storage="float32")
    past, now = outputs(4, 3).to(device), outputs(4, 3, seed=1).to(device)
    expected = 0.5 * trajectory_loss(now, past, temperature=2.0)
    torch.testing.assert_close(saf(now, EVERY), expected)
    saf.set_epoch(2)
    again = outputs(4, 3, seed=2).to(device)
    expected = 0.5 * trajectory_loss(again, now, temperature=2.0)
    torch.testing.assert_close(saf(again, EVERY), expected)


def test_only_rows_exactly_lag_old_count():
    saf = SAF(4, 3, lag=2, start_epoch=2, storage="float32")
    rows = {epoch: outputs(4, 3, seed=epoch) for epoch in range(6)}
    for epoch, seen in {0: [0, 1, 2], 1: [3], 2: [0, 3], 3: [3], 5: [0, 1, 2]}.items():
        saf.set_epoch(epoch)
        loss = saf(rows[epoch][seen], torch.tensor(seen))
        if epoch == 2:  # of 0 and 3, only 0 was seen in epoch 0; the divisor counts both
            expected = 0.3 * trajectory_loss(rows[2][:1], rows[0][:1]) / 2
            torch.testing.assert_close(loss, expected)
        elif epoch == 3:
            torch.testing.assert_close(loss, 0.3 * trajectory_loss(rows[3][3:], rows[1][3:]))
        else:
            assert loss == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("storage", CODECS)
def test_a_row_that_is_not_finite_is_left_out_and_counted(bad, storage, device):
    saf, clean = ready(storage=storage), ready(storage=storage)
    now, rest = outputs(4, 3, seed=1).to(device), torch.tensor([0, 1, 3])
    poisoned = now.clone()
    poisoned[2, 1] = bad
    poisoned.requires_grad_()
    others = now[rest].requires_grad_()
    loss, expected = saf(poisoned, EVERY), clean(others, rest) * 3 / 4
    (loss + expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(poisoned.grad[rest], others.grad)
    assert poisoned.grad[2].count_nonzero() == 0
    assert (saf.nonfinite_rows, clean.nonfinite_rows) == (1, 0)
    for epoch, part in ((2, 3 / 4), (3, 1)):  # not recorded: no reference once, then all is well
        saf.set_epoch(epoch), clean.set_epoch(epoch)
        later = outputs(4, 3, seed=epoch).to(device)
        kept = rest if epoch == 2 else EVERY
        expected = clean(later[kept], kept) * part
        if epoch == 2:
            clean(later[2:3], torch.tensor([2]))  # records it
        torch.testing.assert_close(saf(later, EVERY), expected)
    assert saf.nonfinite_rows == 1


def test_each_position_of_a_dense_output_is_a_sample():
    dense, flat = ready(num_samples=6, storage="float32"), ready(num_samples=6, storage="float32")
    logits, index = outputs(2, 2, 3, seed=1), torch.tensor([[3, 2], [1, 5]])
    expected = flat(logits.reshape(4, 3), index.flatten())
    assert expected > 0
    assert torch.equal(dense(logits, index), expected)


def test_an_index_of_plain_numbers():
    tensor, listed, array = ready(), ready(), ready()
    now, index = outputs(4, 3, seed=1), [2, 0, 3, 1]
    expected = tensor(now, torch.tensor(index))
    assert expected > 0
    assert torch.equal(listed(now, index), expected)
    assert torch.equal(array(now, np.array(index)), expected)


def test_numbers_too_large_for_the_memory_count_as_infinite():
    saf = ready(storage="float32")
    saf(torch.tensor([[1e39, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    assert saf.nonfinite_rows == 1


def test_eval_mode_records_nothing():
    saf = ready()
    before = copy.deepcopy(saf.state_dict())
    saf.eval()
    assert saf(outputs(4, 3, seed=1), EVERY) == 0
    for name, tensor in saf.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_memory_stays_as_it_is_inside_a_model_that_is_cast():
    saf = ready()
    torch.nn.ModuleList([saf]).to(torch.bfloat16)
    assert saf.state_dict()["memory.table"].dtype == torch.float16
    assert saf(outputs(4, 3, seed=1), EVERY) > 0


@pytest.mark.parametrize("storage", CODECS)
@pytest.mark.parametrize("seen", [4, 3])
def test_gradient_accumulation_gives_the_loss_of_the_large_batch(storage, seen, device):
    """Also where one of the rows has no reference."""
    whole, parts = (SAF(4, 3, lag=1, start_epoch=1, storage=storage) for _ in range(2))
    for saf in (whole, parts):
        saf.set_epoch(0)
        saf(outputs(seen, 3).to(device), EVERY[:seen])
        saf.set_epoch(1)
    large = outputs(4, 3, seed=1).to(device).requires_grad_()
    small = large.detach().clone().requires_grad_()
    loss = whole(large, EVERY)
    loss.backward()
    halves = [parts(small[i : i + 2], torch.arange(i, i + 2)) / 2 for i in (0, 2)]
    sum(halves).backward()
    torch.testing.assert_close(sum(halves), loss)
    torch.testing.assert_close(small.grad, large.grad)


@pytest.mark.parametrize("storage", CODECS)
def test_compiles_without_a_graph_break_and_follows_the_epochs(storage, device):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (
        SAF(8, 3, lag=1, start_epoch=2, storage=storage, device=device).to(device) for _ in range(2)
    )

    def loss_part(logits, labels, index):
        return cross_entropy(logits, labels) + compiled(logits, index)

    step = torch.compile(loss_part, fullgraph=True, backend=recomputing_backend)
    labels = torch.tensor([0, 2, 1, 0], device=device)
    for epoch in range(10):
        plain.set_epoch(epoch), compiled.set_epoch(epoch)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(4):
            logits = outputs(4, 3, seed=epoch).to(device).requires_grad_()
            twin = logits.detach().clone().requires_grad_()
            loss = step(logits, labels, index.to(device))
            expected = cross_entropy(twin, labels) + plain(twin, index)
            (loss + expected).backward()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(logits.grad, twin.grad)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(compiled.state_dict()[name], tensor), name
    # Before and after the start: an epoch of itself compiles nothing.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_loss_of_plain_torch_on_its_memory_compiles_too(device):
    """The default partitioner would gather its references again, from a table written meanwhile."""

    class Squared(SAF):
        def loss(self, outputs, reference, valid, batch):
            rows = (outputs.softmax(-1) - reference.float().softmax(-1)).square().sum(-1)
            return torch.where(valid, rows, 0.0).mean()

    torch._dynamo.reset()
    terms = [Squared(4, 3, lag=1, start_epoch=1, device=device) for _ in range(2)]
    calls = [terms[0], torch.compile(terms[1], fullgraph=True, backend=recomputing_backend)]
    for epoch in range(4):
        seen = []
        for term, call in zip(terms, calls, strict=True):
            term.set_epoch(epoch)
            logits = outputs(4, 3, seed=epoch).to(device).requires_grad_()
            loss = call(logits, EVERY.to(device))
            if epoch:
                loss.backward()
            seen.append((loss.detach(), logits.grad))
        assert not epoch or seen[0][1].abs().min() > 0
        torch.testing.assert_close(*seen)


def test_takes_the_bytes_it_says():
    for storage in CODECS:
        for lag in (1, 3):
            saf = SAF(1000, 37, lag=lag, storage=storage)
            assert SAF.estimate_bytes(1000, 37, lag=lag, storage=storage) == saf.nbytes
            saf.set_epoch(0)
            saf(torch.zeros(1, 37), [0])
            kept = sum(t.nbytes for n, t in saf.state_dict().items() if "memory" in n)
            assert saf.nbytes - kept == saf.nbytes // (1000 * (lag + 1) + 1)  # the last row


def test_bytes_for_imagenet_and_cifar():
    """Four slots of the paper's three: 4/3 of its memory."""
    mib, imagenet = 2**20, (1_281_167, 1000)
    stamps = 1_281_167 * 4 * 4
    full = SAF.estimate_bytes(*imagenet, storage="float32") - stamps
    assert round(full / mib) == 19_549
    half = SAF.estimate_bytes(*imagenet, storage="float16") - stamps
    assert half / full == pytest.approx(0.5, abs=1e-6)
    assert round(SAF.estimate_bytes(*imagenet, storage="uint8") / 2**30, 1) == 4.8
    assert int(SAF.estimate_bytes(50_000, 100, storage="float32") / mib) == 77


def test_one_word_about_references_that_come_later():
    with pytest.warns(UserWarning, match="start_epoch=1.*lag=3.*epoch 3"):
        SAF(4, 3, lag=3, start_epoch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAF(4, 3, lag=3, start_epoch=3)


def test_one_class_has_no_trajectory():
    """Its probability is always 1."""
    with pytest.raises(ValueError, match=r"num_classes.*got 1.*torch.cat"):
        SAF(4, 1)


@pytest.mark.parametrize(
    ("logits", "index", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 4]), r"index.*0..3, got 0 to 4"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), r"index.*0..3, got -1 to 0"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "index.*torch.float32"),
        (torch.zeros(2, 3), torch.tensor([True, False]), "index.*torch.bool"),
        (torch.zeros(2, 3), torch.tensor([0, 1, 2]), r"index.*\(2,\).*got \(3,\)"),
        (torch.zeros(2, 3), torch.tensor([[0, 1]]), r"index.*\(2,\).*got \(1, 2\)"),
        (torch.zeros(2, 3), torch.tensor(0), r"index.*\(2,\).*got \(\)"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), r"outputs.*3\), got \(2, 5\)"),
        (torch.zeros(3), torch.tensor([0]), r"outputs.*got \(3,\)"),
        (torch.zeros(2, 3, dtype=int), torch.tensor([0, 1]), "outputs.*torch.int64"),
    ],
)
def test_a_bad_batch_changes_nothing(logits, index, message):
    saf = ready()
    before = copy.deepcopy(saf.state_dict())
    with pytest.raises(ValueError, match=message):
        saf(logits, index)
    for name, tensor in saf.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_classes_in_dimension_1_are_refused_with_the_cure():
    saf = ready(num_samples=2 * 4 * 5)
    index = torch.arange(40).view(2, 4, 5)
    images = outputs(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"movedim\(1, -1\)"):
        saf(images, index)
    saf(images.movedim(1, -1), index)


@pytest.mark.filterwarnings("ignore:SAF.*start_epoch", "ignore:start_epoch")
@pytest.mark.parametrize(("lag", "start_epoch", "first"), [(3, 1, 3), (1, 2, 2), (2, 0, 2)])
def test_the_first_epoch_that_has_a_loss(lag, start_epoch, first):
    saf = SAF(2, 3, lag=lag, start_epoch=start_epoch)
    torch.manual_seed(0)
    seen = []
    for epoch in range(5):
        saf.set_epoch(epoch)
        seen.append(bool(saf(torch.randn(2, 3), torch.arange(2)) > 0))
    assert seen.index(True) == saf.first_epoch == first


def test_an_index_that_is_not_checked_in_the_step_is_reported_later():
    """As it goes for an index on a GPU: masked in the step, an error at the next epoch."""
    torch._dynamo.reset()
    saf = SAF(6, 4, lag=1, start_epoch=1, device="cpu")
    saf.set_epoch(0)
    call = torch.compile(saf, fullgraph=True, backend="eager")
    call(torch.ones(3, 4), torch.tensor([5, 6, -1]))
    assert (saf.state_dict()["memory.stamps"] >= 0).sum() == 1
    with pytest.raises(ValueError, match=r"index.*0..5 in 2 rows"):
        saf.set_epoch(1)
    assert saf.epoch == 0
    saf.set_epoch(1)
    assert call(torch.eye(3, 4), torch.tensor([5, 6, -1])) > 0


def test_a_call_on_the_cpu_passes_few_functions():
    """As a budget: what a reader must follow to know what one call does."""
    import sys
    from pathlib import Path

    import saltflat

    package, seen = str(Path(saltflat.__file__).parent), set()
    saf = ready()
    saf(outputs(4, 3, seed=1), EVERY)
    logits = outputs(4, 3, seed=2).requires_grad_()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            seen.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        saf(logits, EVERY)
    finally:
        sys.setprofile(None)
    assert len(seen) <= 16, sorted(seen)
    assert len({file for file, _ in seen}) <= 6, sorted(seen)


def test_settings_that_change_later_count():
    saf, cold = ready(storage="float32"), ready(storage="float32", temperature=1.0)
    now = outputs(4, 3, seed=1)
    saf.temperature = 1.0
    assert torch.equal(saf(now, torch.arange(4)), cold(now, torch.arange(4)))


def test_sizes_of_numpys_small_types():
    saf = SAF(np.uint8(200), np.uint8(250), lag=np.int8(127), start_epoch=127, storage="uint8")
    assert saf.nbytes == SAF.estimate_bytes(200, 250, lag=127, storage="uint8")
    assert (saf.lag, saf.memory.slots) == (127, 128)
