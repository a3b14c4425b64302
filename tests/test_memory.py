import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import RingModel

from saltflat import OutputMemory
from saltflat.codecs import CODECS

SAMPLES, CLASSES = 5, 3


@st.composite
def visits(draw):
    """Epochs that only go up, some skipped; batches in any order, with duplicates and gaps."""
    steps = draw(st.lists(st.integers(0, 3), min_size=1, max_size=7))
    batch = st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=7)
    return [(sum(steps[: i + 1]), draw(st.lists(batch, max_size=4))) for i in range(len(steps))]


@pytest.mark.parametrize("placed", ["with the logits", "in a file"])
@given(lag=st.integers(1, 4), visits=visits())
def test_ring_equals_a_dictionary(placed, lag, visits, tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "table" if placed == "in a file" else None
    memory = OutputMemory(SAMPLES, CLASSES, lag=lag, storage="float32", path=path)
    model, serial = RingModel(lag), 0
    for epoch, epoch_batches in visits:
        memory.set_epoch(epoch)
        for index in epoch_batches:
            rows = np.arange(serial, serial + len(index) * CLASSES, dtype="float32")
            rows, serial = rows.reshape(-1, CLASSES), serial + rows.size
            location = memory.locate(torch.tensor(index))
            reference, valid = memory.read(location)
            memory.write(location, torch.from_numpy(rows))
            expected = model.swap(epoch, index, rows)
            assert valid.tolist() == [row is not None for row in expected]
            for got, row in zip(reference, expected, strict=True):
                assert row is None or got.tolist() == row.tolist()


@pytest.mark.parametrize("storage", CODECS)
def test_a_duplicate_leaves_one_whole_row(storage, device):
    memory = OutputMemory(4, 50, lag=1, storage=storage)
    rows = torch.randn(256, 50, generator=torch.Generator().manual_seed(0)).to(device)
    index = torch.arange(256) % 4
    memory.set_epoch(0)
    memory.write(memory.locate(index, device), rows)
    memory.set_epoch(1)
    reference, valid = memory.read(memory.locate(torch.arange(4), device))
    codec = CODECS[storage]
    assert valid.all()
    assert torch.equal(reference, codec.decode(codec.encode(rows[-4:])))


def test_rows_not_to_be_kept_stay_as_they_were(device):
    memory = OutputMemory(3, 2, lag=1, storage="float32")
    index = torch.arange(3)
    memory.set_epoch(0)
    memory.write(memory.locate(index, device), torch.ones(3, 2, device=device))
    keep = torch.tensor([True, False, True], device=device)
    memory.write(memory.locate(index, device), torch.full((3, 2), 2.0, device=device), keep)
    memory.set_epoch(1)
    reference, valid = memory.read(memory.locate(index, device))
    assert reference[:, 0].tolist() == [2.0, 1.0, 2.0]
    assert valid.all()


def test_of_a_duplicate_the_last_that_is_kept_stays(device):
    memory = OutputMemory(1, 1, lag=1, storage="float32")
    memory.set_epoch(0)
    keep = torch.tensor([True, True, False], device=device)
    rows = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    memory.write(memory.locate(torch.zeros(3, dtype=int), device), rows, keep)
    memory.set_epoch(1)
    reference, valid = memory.read(memory.locate(torch.tensor([0]), device))
    assert (reference.item(), valid.item()) == (2.0, True)


@pytest.mark.parametrize("storage", CODECS)
@pytest.mark.parametrize("lag", [1, 3])
def test_state_travels_between_places(storage, lag, tmp_path, device):
    def filled(**kwargs):
        memory = OutputMemory(6, 4, lag=lag, storage=storage, **kwargs)
        generator = torch.Generator().manual_seed(0)
        for epoch in range(4):
            memory.set_epoch(epoch)
            index = torch.randperm(6, generator=generator)[:4]
            rows = torch.randn(4, 4, generator=generator)
            memory.write(memory.locate(index, device), rows.to(device))
        return memory

    source = filled()
    state = {name: tensor.cpu() for name, tensor in source.state_dict().items()}
    for target in (
        OutputMemory(6, 4, lag=lag, storage=storage),
        OutputMemory(6, 4, lag=lag, storage=storage, device="cpu"),
        OutputMemory(6, 4, lag=lag, storage=storage, path=tmp_path / "table"),
        filled(),
    ):
        target.load_state_dict(state)
        for memory in (source, target):
            memory.set_epoch(4)
        read = [m.read(m.locate(torch.arange(6), device), device) for m in (source, target)]
        for ours, theirs in zip(*read, strict=True):
            assert torch.equal(ours, theirs)
        assert target.nbytes == source.nbytes


def test_state_holds_everything_in_plain_tensors(tmp_path):
    memory = OutputMemory(6, 4, lag=2)
    state = memory.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "table": (2, 6, 4),
        "stamps": (2, 6),
        "_extra_state": (),
    }
    torch.save(state, tmp_path / "state.pt")
    memory.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (memory.state_dict()["stamps"] < 0).all()


@pytest.mark.parametrize(
    "other",
    [
        {"num_samples": 7},
        {"num_classes": 5},
        {"lag": 3},
        {"storage": "float32"},
        {"num_samples": 2, "lag": 6},
    ],
)
def test_a_state_of_another_size_changes_nothing(other):
    settings = {"num_samples": 6, "num_classes": 4, "lag": 2}
    memory = OutputMemory(**settings)
    memory.set_epoch(0)
    memory.write(memory.locate(torch.arange(6)), torch.randn(6, 4))
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"\(lag, num_samples, ...\) here is .* of shape \(2, 6"):
        memory.load_state_dict(OutputMemory(**{**settings, **other}).state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        memory.load_state_dict({"table": torch.ones_like(before["table"])})
    assert memory.epoch == 0
    for name, tensor in memory.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_file_is_sparse_until_written(tmp_path):
    path = tmp_path / "table"
    memory = OutputMemory(1_000_000, 1000, path=path)
    assert path.stat().st_size == 6_000_002_000
    assert path.stat().st_blocks * 512 < 2**20
    memory.set_epoch(0)
    index = torch.tensor([0, 999_999])
    memory.write(memory.locate(index), torch.ones(2, 1000))
    memory.set_epoch(3)
    reference, valid = memory.read(memory.locate(index))
    assert valid.all() and (reference == 1).all()
    assert path.stat().st_blocks * 512 < 2**20


def test_a_file_is_not_shared_and_not_mistaken(tmp_path):
    path = tmp_path / "table"
    memory = OutputMemory(4, 3, path=path)
    with pytest.raises(RuntimeError, match="in use by another table"):
        OutputMemory(4, 3, path=path)
    memory.set_epoch(0)
    memory.write(memory.locate(torch.arange(4)), torch.ones(4, 3))
    del memory
    again = OutputMemory(4, 3, lag=3, path=path)
    again.set_epoch(3)
    assert not again.read(again.locate(torch.arange(4)))[1].any()  # what lasts is the state_dict
    other = tmp_path / "somebody's data"
    other.write_bytes(b"precious")
    with pytest.raises(ValueError, match="exists and is not this table"):
        OutputMemory(4, 3, path=other)
    assert other.read_bytes() == b"precious"


@pytest.mark.parametrize("path", ["missing/table", "."])
def test_a_path_that_cannot_be_a_file(path, tmp_path):
    with pytest.raises(ValueError, match="is not a file in an existing folder"):
        OutputMemory(4, 3, path=tmp_path / path)


def test_a_file_larger_than_its_disk_is_refused(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ValueError, match=r"will grow to \d+ bytes, but its disk has only"):
        OutputMemory(free // 1000, 1000, path=tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([0, 6]),
        torch.tensor([-1, 2]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([True, False]),
        torch.tensor([[0, 1]]),
        torch.tensor(3),
    ],
)
def test_bad_index(index):
    memory = OutputMemory(6, 4)
    memory.set_epoch(0)
    with pytest.raises(ValueError, match="index must be"):
        memory.locate(index)


def test_an_index_that_is_not_waited_for_is_reported_later():
    """As it goes for an index on a GPU: masked in the step, an error at the next epoch."""
    memory = OutputMemory(6, 4, lag=1)
    memory.set_epoch(0)

    @torch.compile(fullgraph=True, backend="eager")
    def swap(index, rows):
        location = memory.locate(index)
        reference, valid = memory.read(location)
        memory.write(location, rows)
        return reference, valid

    torch._dynamo.reset()
    swap(torch.tensor([5, 6, -1]), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"2 indices since the last set_epoch were outside 0..5"):
        memory.set_epoch(1)
    memory.set_epoch(1)
    assert swap(torch.tensor([5, 6, -1]), torch.ones(3, 4))[1].tolist() == [True, False, False]
    assert (memory.state_dict()["stamps"] >= 0).sum() == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lag": 0}, "lag must be a whole number of at least 1, got 0"),
        ({"num_samples": -5}, "num_samples must be"),
        ({"num_classes": 2.5}, "num_classes must be"),
        ({"storage": "int4"}, "storage must be one of"),
        ({"path": "x", "device": "cuda"}, "in a file is in host memory"),
    ],
)
def test_bad_settings(kwargs, message):
    with pytest.raises(ValueError, match=message):
        OutputMemory(**{"num_samples": 6, "num_classes": 4, **kwargs})


def test_the_first_epoch_must_be_set_and_epochs_only_go_up():
    memory = OutputMemory(6, 4)
    with pytest.raises(RuntimeError, match=r"call set_epoch\(epoch\)"):
        memory.locate(torch.tensor([0]))
    memory.set_epoch(2)
    with pytest.raises(ValueError, match="epoch 1 comes after epoch 2"):
        memory.set_epoch(1)


def test_built_or_first_used_in_a_strange_mode():
    with torch.device("meta"):
        memory = OutputMemory(6, 4, lag=1)
    memory.set_epoch(0)
    with torch.inference_mode():
        memory.write(memory.locate(torch.arange(6)), torch.ones(6, 4))
    memory.set_epoch(1)
    assert memory.read(memory.locate(torch.arange(6)))[1].all()
    memory.write(memory.locate(torch.arange(6)), torch.ones(6, 4))


def test_logits_of_another_shape():
    memory = OutputMemory(6, 4)
    memory.set_epoch(0)
    with pytest.raises(ValueError, match=r"\(2, 4\) for an index of length 2, got \(2, 5\)"):
        memory.write(memory.locate(torch.tensor([0, 1])), torch.zeros(2, 5))


def test_a_loaded_table_follows_the_logits_all_the_same():
    """A checkpoint is read into host memory; only a table that stays there is reached by copies."""
    full = OutputMemory(SAMPLES, CLASSES, lag=1)
    full.set_epoch(0)
    full.write(full.locate(torch.arange(SAMPLES)), torch.ones(SAMPLES, CLASSES))
    for place, travels in ((None, False), ("cpu", True)):
        memory = OutputMemory(SAMPLES, CLASSES, lag=1, device=place)
        memory.load_state_dict(full.state_dict())
        assert memory._crosses(torch.device("cuda")) == travels
        assert not memory._crosses(torch.device("cpu"))
