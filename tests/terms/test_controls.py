import pytest
import torch

from saltflat.core.registry import Part, registered
from saltflat.terms import SAF, Shuffled, Uniform, trajectory_loss

N, CLASSES = 12, 3
EVERY = torch.arange(N)


def logits(seed):
    return torch.randn(N, CLASSES, generator=torch.Generator().manual_seed(seed))


def test_uniform_pulls_to_equal_outputs():
    term = Uniform(start_epoch=1, weight=0.5, temperature=2.0)
    now = logits(0)
    for epoch in range(2):
        term.set_epoch(epoch)
        expected = 0.5 * trajectory_loss(now, torch.zeros(N, CLASSES), temperature=2.0) * epoch
        torch.testing.assert_close(term(now), expected)


def test_shuffled_compares_with_another_samples_outputs():
    """In an order of its own for each epoch; what it records is SAF's."""
    settings = {"lag": 1, "start_epoch": 1, "storage": "float32"}
    shuffled, saf, again = (kind(N, CLASSES, **settings) for kind in (Shuffled, SAF, Shuffled))
    orders = []
    for epoch in range(4):
        for term in (shuffled, saf, again):
            term.set_epoch(epoch)
        now = logits(epoch)
        loss = shuffled(now, EVERY)
        assert loss == again(now, EVERY)
        assert (loss == saf(now, EVERY)) == (epoch == 0)
        if epoch:
            order = shuffled._order[:N]
            assert sorted(order.tolist()) == EVERY.tolist()
            torch.testing.assert_close(loss, 0.3 * trajectory_loss(now, logits(epoch - 1)[order]))
            orders.append(tuple(order.tolist()))
        for name, tensor in saf.state_dict().items():
            assert torch.equal(shuffled.state_dict()[name], tensor), name
    assert len(set(orders)) == 3


@pytest.mark.parametrize("index", [[0, N], [-1, 0]])
def test_shuffled_refuses_an_index_out_of_range(index):
    term = Shuffled(N, CLASSES, lag=1, start_epoch=1)
    term.set_epoch(0)
    with pytest.raises(ValueError, match=r"index.*0\.\.11"):
        term(torch.zeros(2, CLASSES), torch.tensor(index))


def test_terms_are_registered_parts():
    built = {name: entry.build for name, entry in registered("term").items()}
    assert {"saf", "mesa", "saf_uniform", "saf_shuffled"} <= set(built)
    assert isinstance(SAF(N, CLASSES), Part) and isinstance(Uniform(), Part)
