"""Wrong use that gave a wrong or no loss, and said nothing."""

import warnings

import pytest
import torch
from problems import CLASSES, SAMPLES, dataset, network
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from saltflat import MESA, SAF, with_index

N = SAMPLES


def logits(rows, seed=0):
    return torch.randn(rows, CLASSES, generator=torch.Generator().manual_seed(seed))


def make(lag=1, **kwargs):
    return SAF(kwargs.pop("num_samples", N), CLASSES, lag=lag, start_epoch=lag, **kwargs)


def shuffled(epoch, num_samples=N, batch_size=8):
    generator = torch.Generator().manual_seed(epoch)
    return torch.randperm(num_samples, generator=generator).split(batch_size)


def train(saf, epochs, calls=1):
    """Feed a term epochs of indices, given by the epoch's number; returns losses by epoch."""
    losses = {}
    for epoch, indices in epochs.items():
        saf.set_epoch(epoch)
        losses[epoch] = [
            saf(logits(len(index), 100 * epoch + step), index).item()
            for step, index in enumerate(indices)
            for _ in range(calls)
        ]
    return losses


def warnings_of(saf, epochs):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(saf, epochs)
    return [str(warning.message) for warning in said]


def halves():
    x, y = dataset().tensors
    return [TensorDataset(x[part], y[part]) for part in (slice(N // 2), slice(N // 2, N))]


def indices_of(data, **kwargs):
    loader = DataLoader(data, 8, generator=torch.Generator().manual_seed(0), **kwargs)
    return [index for index, *_ in loader]


def test_colliding_indices_warn_once():
    data = ConcatDataset([with_index(half) for half in halves()])
    epochs = {epoch: indices_of(data, shuffle=True) for epoch in range(4)}
    (said,) = warnings_of(make(), epochs)
    assert "SAF: epoch 0 had 24 rows but only 12 distinct indices" in said
    assert "with_index(ConcatDataset([a, b]))" in said


def test_the_cure_for_colliding_indices():
    data = with_index(ConcatDataset(halves()))
    assert warnings_of(make(), {e: indices_of(data, shuffle=True) for e in range(4)}) == []


def test_labels_as_indices_warn_once():
    labels = dataset().tensors[1]
    epochs = {e: [labels[index] for index in shuffled(e)] for e in range(4)}
    (said,) = warnings_of(make(), epochs)
    assert f"24 rows but only {len(labels.unique())} distinct" in said


def test_the_place_in_the_batch_as_an_index_warns_once():
    (said,) = warnings_of(make(), {e: [torch.arange(8)] * 3 for e in range(4)})
    assert "24 rows but only 8 distinct" in said


def test_sampling_with_replacement_warns_once():
    data = with_index(dataset())
    generator = torch.Generator().manual_seed(0)
    sampler = RandomSampler(data, replacement=True, num_samples=N, generator=generator)
    epochs = {epoch: indices_of(data, sampler=sampler) for epoch in range(4)}
    distinct = len(torch.cat(epochs[0]).unique())
    assert distinct < 0.9 * N
    (said,) = warnings_of(make(), epochs)
    assert f"24 rows but only {distinct} distinct" in said and "with replacement" in said


def assert_silent(saf, epochs, **how):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train(saf, epochs, **how)
        saf.set_epoch(saf.epoch + 1)
    assert not said, said[0].message


def test_proper_use_does_not_warn():
    assert_silent(make(), {epoch: shuffled(epoch) for epoch in range(4)})
    dropped = {
        epoch: [i for i in shuffled(epoch, batch_size=5) if len(i) == 5] for epoch in range(4)
    }
    assert_silent(make(), dropped)
    assert_silent(
        make(lag=1), {epoch: shuffled(epoch)[:1] for epoch in range(9)}
    )  # a part of each epoch
    assert_silent(make(), {epoch: shuffled(epoch) for epoch in range(4)}, calls=2)
    assert_silent(make(), {epoch: [torch.arange(N).repeat(3)] for epoch in range(4)})
    assert_silent(make(), {5: shuffled(5), 6: shuffled(6), 7: shuffled(7)})
    assert_silent(make(lag=2), {epoch: shuffled(epoch) for epoch in (0, 2, 4)})


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_samplers_padding_does_not_warn(world_size):
    def batches(epoch):
        orders = []
        for rank in range(world_size):
            sampler = DistributedSampler(range(N - 1), world_size, rank)
            sampler.set_epoch(epoch)
            orders.append(torch.tensor(list(sampler)))
        return torch.cat(orders).split(6)

    assert_silent(make(num_samples=N - 1), {epoch: batches(epoch) for epoch in range(4)})


def test_rows_that_are_not_finite_do_not_look_like_missing_samples():
    saf = make()
    for epoch in range(3):
        saf.set_epoch(epoch)
        for index in shuffled(epoch):
            rows = logits(8)
            rows[:4] = torch.nan
            saf(rows, index)
    assert saf.nonfinite_rows == 3 * N // 2


def test_an_epoch_that_never_ends_warns_once():
    saf = make()
    saf.set_epoch(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4096):
            saf(logits(8), torch.arange(8) + 8 * (step % 3))
    assert len(said) == 1
    assert "rows since set_epoch(0)" in str(said[0].message)


def test_set_epoch_once_for_all_epochs_of_the_digits_warns_once():
    """1,797 samples in batches of 64, thirty times; and MESA, which knows no number of samples."""
    saf, rows = SAF(1797, 10), torch.randn(64, 10)
    mesa = MESA(torch.nn.Linear(2, 10))
    for term in (saf, mesa):
        term.set_epoch(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(30 * 28):
            saf(rows, (torch.arange(64) + 64 * step) % 1797)
        for _ in range(8192):
            mesa(rows[:1], rows[:1, :2])
    assert [str(each.message).split(":")[0] for each in said] == ["SAF", "MESA"]
    assert all(each.filename == __file__ for each in said), "the user's own line"


def test_a_large_epoch_does_not_look_endless():
    saf = make(num_samples=20_000)
    saf.set_epoch(0)
    for index in torch.arange(20_000).split(8):
        saf(logits(len(index)), index)
    assert saf._steps == 2500


def test_steps_for_epochs_warn_once():
    """No sample comes back `lag` steps later."""
    indices = [index for epoch in range(3) for index in shuffled(0)]
    steps = {step: [index] for step, index in enumerate(indices)}
    (said,) = warnings_of(make(lag=2), steps)
    assert "no row of epoch 2 had a reference" in said and "consecutive" in said


def test_epochs_that_skip_warn_once():
    (said,) = warnings_of(make(lag=3), {epoch: shuffled(epoch) for epoch in range(0, 14, 2)})
    assert "no row of epoch 4 had a reference" in said


def test_an_epoch_without_a_batch_does_not_warn():
    assert_silent(make(), {epoch: [] for epoch in range(4)})


def test_an_epoch_repeated_after_a_resume_works():
    saf = make(lag=1)
    losses = train(saf, {epoch: shuffled(epoch) for epoch in range(3)})
    state = {name: tensor.clone() for name, tensor in saf.state_dict().items()}
    again = make(lag=1)
    again.load_state_dict(state)
    repeated = train(again, {epoch: shuffled(epoch) for epoch in (2, 3, 4)})
    assert repeated[2] == losses[2]
    straight = train(saf, {epoch: shuffled(epoch) for epoch in (3, 4)})
    assert {epoch: repeated[epoch] for epoch in (3, 4)} == straight
    assert min(min(epoch) for epoch in repeated.values()) > 0


def test_repeated_augmentation_works():
    """Each sample several times in a batch: the first of its outputs is kept."""
    saf, once = make(storage="float32"), make(storage="float32")
    for epoch in range(3):
        saf.set_epoch(epoch), once.set_epoch(epoch)
        for index in shuffled(epoch):
            rows = logits(24, epoch)
            loss = saf(rows, index.repeat(3))
            once(rows[:8], index)
            assert (loss > 0) == (epoch > 0)
        one, other = saf.state_dict(), once.state_dict()
        assert torch.equal(one["memory.table"], other["memory.table"])


def test_mesa_is_on_whatever_the_epochs_are_called():
    model = network()
    mesa = MESA(model, start_epoch=2, decay=0.5)
    x = dataset().tensors[0]
    for epoch in (0, 2, 7, 8):
        mesa.set_epoch(epoch)
        with torch.no_grad():
            model[0].weight += 0.1
        assert (mesa(model(x), x) > 0) == (epoch >= 2)
        mesa.update(model)


def test_a_teacher_that_gives_no_number_warns_once():
    model = torch.nn.Linear(2, 2)
    mesa = MESA(model, start_epoch=0)
    mesa.teacher.module.weight.fill_(torch.nan)
    x = torch.ones(4, 2)
    mesa.set_epoch(0)
    mesa(model(x), x)
    mesa.update(model)
    with pytest.warns(UserWarning, match=r"MESA: no row of epoch 0 had a reference"):
        mesa.set_epoch(1)
    mesa(model(x), x)
    mesa.set_epoch(2)
