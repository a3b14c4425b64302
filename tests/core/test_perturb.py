import pytest
import torch
from torch import nn

from saltflat.core.perturb import displaced


def weights():
    return [torch.randn(3, 4), torch.randn(5).to(torch.bfloat16), torch.randn(2, 2).double()]


def test_comes_back_bit_for_bit_in_the_same_storage(device):
    ws = [w.to(device) for w in weights()]
    before, places = [w.clone() for w in ws], [w.data_ptr() for w in ws]
    offsets = [1e3 * torch.randn_like(w) for w in ws]
    with displaced(ws, offsets):
        for w, old, offset in zip(ws, before, offsets, strict=True):
            assert torch.equal(w, old + offset)
    assert all(torch.equal(w, old) for w, old in zip(ws, before, strict=True))
    assert [w.data_ptr() for w in ws] == places


@pytest.mark.parametrize("offset", [float("nan"), float("inf")])
def test_comes_back_from_anywhere_also_after_an_error(offset):
    w = torch.tensor([0.1, -0.0])
    with pytest.raises(KeyError), displaced([w], [torch.full((2,), offset)]):
        raise KeyError
    assert torch.equal(w, torch.tensor([0.1, -0.0]))
    assert torch.signbit(w).tolist() == [False, True]


def test_nested_and_entered_again():
    w = torch.tensor([1.0])
    move = displaced([w], [torch.tensor([2.0])])
    with move:
        with move, displaced([w], [torch.tensor([10.0])]):
            assert w.item() == 15.0
        assert w.item() == 3.0
    with move:
        assert w.item() == 3.0
    assert w.item() == 1.0


def test_gradients_are_taken_where_the_weights_are():
    w = torch.tensor([3.0], requires_grad=True)
    with displaced([w], [torch.tensor([1.0])]):
        (w**2).sum().backward()
    assert w.grad.item() == 8.0
    assert w.is_leaf and w.requires_grad


def test_an_enclosing_autocast_sees_the_move():
    layer, x = nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        with displaced([layer.weight], [torch.ones(1, 2)]):
            moved = layer(x)
        after = layer(x)
    assert torch.equal(before, after)
    assert not torch.equal(before, moved)


def test_nothing_to_move():
    with displaced([], []):
        pass
    with pytest.raises(ValueError, match=r"offsets.*got 1 for 0"):
        displaced([], [torch.ones(1)])


def test_a_write_inside_is_noticed_until_the_exit():
    w = torch.tensor([1.0])
    move = displaced([w], [torch.tensor([2.0])])
    assert not move.overwritten()
    with move:
        assert not move.overwritten()
        w.fill_(5.0)
        assert move.overwritten()
    assert not move.overwritten()
    assert w.item() == 1.0


def test_offsets_of_another_shape_move_nothing():
    first, second = torch.zeros(2), torch.zeros(2)
    with pytest.raises(ValueError, match=r"offsets.*shape.*got 2 for 2"):
        displaced([first, second], [torch.ones(2), torch.ones(3)])
    assert first.tolist() == [0, 0]
