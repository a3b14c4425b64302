import warnings

import numpy as np
import pytest
import torch
from problems import CLASSES, FEATURES, SAMPLES, dataset, recomputing_backend
from references import saf_training
from torch.nn.functional import cross_entropy

from saltflat import SAF, trajectory_loss
from saltflat.codecs import CODECS


def outputs(*shape, seed=0):
    return 4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ready(**kwargs):
    """SAF in epoch 1, when the four samples' outputs of epoch 0 are its references."""
    saf = SAF(**{"num_samples": 4, "num_classes": 3, "lag": 1, "start_epoch": 1, **kwargs})
    saf.set_epoch(0)
    assert saf(outputs(4, 3), torch.arange(4)) == 0
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
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)  # the store is float32
        np.testing.assert_allclose(weights, expected_weights, rtol=1e-6, atol=1e-6)


def test_reads_before_it_overwrites(device):
    saf = ready(temperature=2.0, weight=0.5, storage="float32")
    past, now = outputs(4, 3).to(device), outputs(4, 3, seed=1).to(device)
    expected = 0.5 * trajectory_loss(now, past, temperature=2.0)
    torch.testing.assert_close(saf(now, torch.arange(4)), expected)
    saf.set_epoch(2)
    again = outputs(4, 3, seed=2).to(device)
    expected = 0.5 * trajectory_loss(again, now, temperature=2.0)
    torch.testing.assert_close(saf(again, torch.arange(4)), expected)


def test_only_rows_exactly_lag_old_count():
    saf = SAF(4, 3, lag=2, start_epoch=2, storage="float32")
    rows = {epoch: outputs(4, 3, seed=epoch) for epoch in range(6)}
    for epoch, seen in {0: [0, 1, 2], 1: [3], 2: [0, 3], 5: [0, 1, 2, 3]}.items():
        saf.set_epoch(epoch)
        loss = saf(rows[epoch][seen], torch.tensor(seen))
        if epoch == 2:  # of 0 and 3, only 0 was seen in epoch 0
            expected = 0.3 * trajectory_loss(rows[2][:1], rows[0][:1])
            torch.testing.assert_close(loss, expected)
        else:
            assert loss == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("storage", CODECS)
def test_a_row_that_is_not_finite_is_left_out_and_counted(bad, storage, device):
    saf, clean = ready(storage=storage), ready(storage=storage)
    now, index = outputs(4, 3, seed=1).to(device), torch.arange(4)
    rest = torch.tensor([0, 1, 3])
    poisoned = now.clone()
    poisoned[2, 1] = bad
    poisoned.requires_grad_()
    others = now[rest].requires_grad_()
    loss, expected = saf(poisoned, index), clean(others, rest)
    (loss + expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(poisoned.grad[rest], others.grad)
    assert poisoned.grad[2].count_nonzero() == 0
    assert (saf.nonfinite_rows, clean.nonfinite_rows) == (1, 0)
    for epoch in (2, 3):  # not recorded, so without a reference once, and then all is well again
        saf.set_epoch(epoch), clean.set_epoch(epoch)
        later = outputs(4, 3, seed=epoch).to(device)
        kept = rest if epoch == 2 else index
        expected = clean(later[kept], kept)
        if epoch == 2:
            clean.memory.write(clean.memory.locate(torch.tensor([2]), device), later[2:3])
        torch.testing.assert_close(saf(later, index), expected)
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


def test_numbers_too_large_for_the_store_count_as_infinite():
    saf = ready(storage="float32")
    saf(torch.tensor([[1e39, 0.0, 0.0]], dtype=torch.float64), torch.tensor([0]))
    assert saf.nonfinite_rows == 1


def test_eval_mode_records_nothing():
    saf = ready()
    before = {name: tensor.clone() for name, tensor in saf.state_dict().items()}
    saf.eval()
    assert saf(outputs(4, 3, seed=1), torch.arange(4)) == 0
    for name, tensor in saf.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_store_stays_as_it_is_inside_a_model_that_is_cast():
    saf = ready()
    torch.nn.ModuleList([saf]).to(torch.bfloat16)
    assert saf.memory.state_dict()["table"].dtype == torch.float16
    assert saf(outputs(4, 3, seed=1), torch.arange(4)) > 0


@pytest.mark.parametrize("storage", CODECS)
def test_gradient_accumulation_gives_the_loss_of_the_large_batch(storage, device):
    whole, parts = ready(storage=storage), ready(storage=storage)
    large = outputs(4, 3, seed=1).to(device).requires_grad_()
    small = large.detach().clone().requires_grad_()
    loss = whole(large, torch.arange(4))
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
    # Before and after the start: an epoch of itself compiles nothing.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_takes_the_bytes_it_says():
    for storage in CODECS:
        for lag in (1, 3):
            saf = SAF(1000, 37, lag=lag, storage=storage)
            assert SAF.estimate_bytes(1000, 37, lag=lag, storage=storage) == saf.memory.nbytes


def test_bytes_for_imagenet_and_cifar():
    mib, imagenet = 2**20, (1_281_167, 1000)
    stamps = 1_281_167 * 3 * 4
    full = SAF.estimate_bytes(*imagenet, storage="float32") - stamps
    assert round(full / mib) == 14_662
    half = SAF.estimate_bytes(*imagenet, storage="float16") - stamps
    assert half / full == pytest.approx(0.5, abs=1e-6)
    assert SAF.estimate_bytes(*imagenet, storage="uint8") / full < 0.26
    assert int(SAF.estimate_bytes(50_000, 100, storage="float32") / mib) == 57


def test_one_word_about_references_that_come_later():
    with pytest.warns(UserWarning, match="with lag=3 references exist from epoch 3"):
        SAF(4, 3, lag=3, start_epoch=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SAF(4, 3, lag=3, start_epoch=3)


def test_one_class_has_no_trajectory():
    """Its probability is always 1."""
    with pytest.raises(ValueError, match=r"num_classes must be at least 2, got 1.*torch.cat"):
        SAF(4, 1)


@pytest.mark.parametrize(
    ("logits", "index", "message"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 4]), r"within 0..3, got 0 to 4"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), r"within 0..3, got -1 to 0"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "whole numbers, got torch.float32"),
        (torch.zeros(2, 3), torch.tensor([0, 1, 2]), r"shape \(2,\) for logits .* got \(3,\)"),
        (torch.zeros(2, 3), torch.tensor(0), r"shape \(2,\) for logits"),
        (torch.zeros(2, 5), torch.tensor([0, 1]), r"\(batch, ..., 3\), got \(2, 5\)"),
        (torch.zeros(3), torch.tensor([0]), r"\(batch, ..., 3\), got \(3,\)"),
    ],
)
def test_a_bad_batch_changes_nothing(logits, index, message):
    saf = ready()
    before = {name: tensor.clone() for name, tensor in saf.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        saf(logits, index)
    for name, tensor in saf.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.filterwarnings("ignore::UserWarning")  # where the lag is longer
@pytest.mark.parametrize(("lag", "start_epoch", "first"), [(3, 1, 3), (1, 2, 2), (2, 0, 2)])
def test_the_first_epoch_that_has_a_loss(lag, start_epoch, first):
    saf = SAF(2, 3, lag=lag, start_epoch=start_epoch)
    torch.manual_seed(0)
    seen = []
    for epoch in range(5):
        saf.set_epoch(epoch)
        seen.append(bool(saf(torch.randn(2, 3), torch.arange(2)) > 0))
    assert seen.index(True) == saf.first_epoch == first
