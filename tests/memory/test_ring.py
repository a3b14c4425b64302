import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import RingModel

from saltflat.memory import CODECS, Ring

SAMPLES, CLASSES = 5, 3


def write(memory, index, rows, keep=None):
    """What a term does: place, then write."""
    index = torch.as_tensor(index)
    if memory.device is None:
        memory.place(rows.device)
    keep = torch.ones(len(index), dtype=torch.bool) if keep is None else torch.tensor(keep)
    memory.write(index.to(memory.device), rows, keep.to(rows.device))


def read(memory, index, device="cpu"):
    if memory.device is None:
        memory.place(torch.device(device))
    return memory.read(torch.as_tensor(index).to(memory.device), torch.device(device))


def state_of(memory):
    return {name: tensor.clone() for name, tensor in memory.state().items()}


@st.composite
def visits(draw):
    """Epochs that only go up, some skipped; batches in any order, with duplicates and gaps."""
    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=7))
    batch = st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=7)
    return [(sum(steps[: i + 1]), draw(st.lists(batch, max_size=4))) for i in range(len(steps))]


@given(lag=st.integers(1, 4), visits=visits())
def test_a_ring_equals_a_dictionary(lag, visits):
    memory = Ring(SAMPLES, CLASSES, lag=lag, storage="float32")
    model, serial = RingModel(lag), 0
    for epoch, epoch_batches in visits:
        memory.begin_epoch(epoch)
        for index in epoch_batches:
            rows = np.arange(serial, serial + len(index) * CLASSES, dtype="float32")
            rows, serial = rows.reshape(-1, CLASSES), serial + rows.size
            reference, valid = read(memory, index)
            write(memory, index, torch.from_numpy(rows))
            expected = model.swap(epoch, index, rows)
            assert valid.tolist() == [row is not None for row in expected]
            for got, row in zip(reference, expected, strict=True):
                assert row is None or got.tolist() == row.tolist()
        seen = {i for index in epoch_batches for i in index}
        assert memory.written() == len(seen)


@pytest.mark.parametrize("storage", CODECS)
def test_of_a_duplicate_the_first_row_stays_whole(storage, device):
    memory = Ring(4, 50, lag=1, storage=storage)
    rows = torch.randn(256, 50, generator=torch.Generator().manual_seed(0)).to(device)
    memory.begin_epoch(0)
    write(memory, torch.arange(256) % 4, rows)
    memory.begin_epoch(1)
    reference, valid = read(memory, range(4), device)
    codec = CODECS[storage]
    assert valid.all()
    assert torch.equal(reference, codec.decode(codec.encode(rows[:4])))


def test_of_a_duplicate_the_first_that_is_kept_stays(device):
    memory = Ring(1, 1, lag=1, storage="float32")
    memory.begin_epoch(0)
    rows = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    write(memory, [0, 0, 0], rows, [False, True, True])
    memory.begin_epoch(1)
    reference, valid = read(memory, [0], device)
    assert (reference.item(), valid.item()) == (2.0, True)


def test_the_first_write_of_an_epoch_wins(device):
    memory = Ring(3, 2, lag=1, storage="float32")
    memory.begin_epoch(0)
    write(memory, range(3), torch.ones(3, 2, device=device), [True, False, True])
    write(memory, range(3), torch.full((3, 2), 2.0, device=device))
    memory.begin_epoch(1)
    reference, valid = read(memory, range(3), device)
    assert reference[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert valid.all()


def test_a_slot_that_is_read_is_not_written():
    memory = Ring(SAMPLES, CLASSES, lag=2, storage="float32")
    for epoch in range(7):
        memory.begin_epoch(epoch)
        before, valid = read(memory, range(SAMPLES))
        write(memory, range(SAMPLES), torch.full((SAMPLES, CLASSES), float(epoch)))
        after, _ = read(memory, range(SAMPLES))
        assert torch.equal(before, after)
        assert valid.all() == (epoch >= 2)
        assert epoch < 2 or (before == epoch - 2).all()


def test_an_index_out_of_range_is_neither_read_nor_written():
    memory = Ring(SAMPLES, CLASSES, lag=1, storage="float32")
    memory.begin_epoch(0)
    write(memory, [0, SAMPLES], torch.ones(2, CLASSES))
    assert memory.written() == 1
    memory.begin_epoch(1)
    assert read(memory, [0, SAMPLES, SAMPLES - 1])[1].tolist() == [True, False, False]


@pytest.mark.parametrize("storage", CODECS)
@pytest.mark.parametrize("lag", [1, 3])
def test_a_state_travels_between_places(storage, lag, device):
    def filled(**kwargs):
        memory = Ring(6, 4, lag=lag, storage=storage, **kwargs)
        generator = torch.Generator().manual_seed(0)
        for epoch in range(4):
            memory.begin_epoch(epoch)
            index = torch.randperm(6, generator=generator)[:4]
            write(memory, index, torch.randn(4, 4, generator=generator).to(device))
        return memory

    source = filled()
    state = {name: tensor.cpu().clone() for name, tensor in source.state().items()}
    source.begin_epoch(4)
    expected = read(source, range(6), device)
    assert expected[1].any()
    for target in (Ring(6, 4, lag=lag, storage=storage), filled(device="cpu"), filled()):
        target.load(state)
        target.begin_epoch(4)
        for ours, theirs in zip(read(target, range(6), device), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert target.nbytes == source.nbytes


def test_a_state_is_plain_tensors_and_loads_in_place(tmp_path):
    memory = Ring(6, 4, lag=2)
    state = memory.state()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "table": (3, 6, 4),
        "stamps": (3, 6),
    }
    torch.save(state, tmp_path / "state.pt")
    memory.begin_epoch(0)
    write(memory, range(6), torch.ones(6, 4))
    place = memory.state()["table"].data_ptr()
    memory.load(torch.load(tmp_path / "state.pt", weights_only=True))
    assert memory.state()["table"].data_ptr() == place
    assert (memory.state()["stamps"] < 0).all()


def test_an_unused_memory_takes_no_room():
    state = Ring(10**6, 1000).state()
    assert state["table"].untyped_storage().nbytes() == 2
    assert state["table"].shape == (4, 10**6, 1000)


def test_a_pickled_memory_goes_on():
    memory = Ring(SAMPLES, CLASSES, lag=1)
    memory.begin_epoch(0)
    write(memory, range(SAMPLES), torch.ones(SAMPLES, CLASSES))
    again = pickle.loads(pickle.dumps(memory))
    again.begin_epoch(1)
    assert read(again, range(SAMPLES))[1].all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lag": 0}, "lag.*got 0"),
        ({"lag": True}, "lag.*got True"),
        ({"lag": "3"}, "lag.*got '3'"),
        ({"num_samples": -5}, "num_samples.*got -5"),
        ({"num_samples": 6.0}, "num_samples.*got 6.0"),
        ({"num_samples": None}, "num_samples.*got None"),
        ({"num_samples": 2**62}, f"num_samples.*{2**62}"),
        ({"num_classes": 2.5}, "num_classes.*got 2.5"),
        ({"num_classes": 0}, "num_classes.*got 0"),
        ({"storage": "int4"}, "storage.*got 'int4'"),
        ({"storage": 16}, "storage.*got 16"),
    ],
)
def test_bad_settings_of_a_ring(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Ring(**{"num_samples": 6, "num_classes": 4, **kwargs})


def test_built_or_first_used_in_a_strange_mode():
    with torch.device("meta"):
        memory = Ring(6, 4, lag=1)
        memory.begin_epoch(0)
    with torch.inference_mode():
        write(memory, range(6), torch.ones(6, 4))
    memory.begin_epoch(1)
    assert read(memory, range(6))[1].all()
    write(memory, range(6), torch.ones(6, 4))


def test_a_loaded_table_follows_the_outputs_unless_a_device_was_given():
    full = Ring(SAMPLES, CLASSES, lag=1)
    full.begin_epoch(0)
    write(full, range(SAMPLES), torch.ones(SAMPLES, CLASSES))
    for place, follows in ((None, True), ("cpu", False)):
        memory = Ring(SAMPLES, CLASSES, lag=1, device=place)
        memory.load(full.state())
        memory.place(torch.device("meta"))
        assert (memory.device.type == "meta") == follows
