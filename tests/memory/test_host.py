import pytest
import torch

from saltflat.memory import Ring
from saltflat.memory.host import WriteBehind, to_device

CPU = torch.device("cpu")


def test_a_batch_is_copied_when_it_is_sent():
    rows, keep = torch.ones(2, 3), torch.tensor([True, False])
    batch = WriteBehind((rows, keep))
    rows.zero_()
    keep.fill_(True)
    arrived = batch.wait()
    assert (arrived[0] == 1).all() and arrived[1].tolist() == [True, False]
    assert torch.equal(to_device(arrived[0], CPU), arrived[0])


@pytest.mark.parametrize("flushed_by", ["read", "write", "begin_epoch", "state", "written"])
def test_a_batch_that_is_under_way_is_seen_by_all(flushed_by):
    memory = Ring(2, 1, lag=1, storage="float32", device="cpu")
    memory.begin_epoch(0)
    index, keep = torch.tensor([1]), torch.tensor([True])
    memory._pending = index, WriteBehind((torch.tensor([[4.0]]), keep))  # as from a GPU
    calls = {
        "read": lambda: memory.read(index, CPU),
        "write": lambda: memory.write(index, torch.tensor([[5.0]]), keep),
        "begin_epoch": lambda: memory.begin_epoch(1),
        "state": memory.state,
        "written": memory.written,
    }
    result = calls[flushed_by]()
    if flushed_by == "written":
        assert result == 1
    memory.begin_epoch(1)
    rows, valid = memory.read(index, CPU)
    assert (rows.item(), valid.item()) == (4.0, True)
