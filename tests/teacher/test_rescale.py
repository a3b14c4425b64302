import pytest
import torch

from saltflat.teacher import scale_factor


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_a_multiple_is_found_whatever_is_added_to_each_row(factor):
    reference = rows(5, 4)
    logits = factor * reference + rows(5, 1, seed=1)
    torch.testing.assert_close(scale_factor(reference, logits).item(), factor)


def test_it_is_the_least_squares_factor():
    reference, logits = rows(5, 4), rows(5, 4, seed=1) + rows(5, 4)
    v, z = (x - x.mean(-1, keepdim=True) for x in (reference, logits))
    expected = torch.linalg.lstsq(v.reshape(-1, 1), z.reshape(-1, 1)).solution.item()
    assert scale_factor(reference, logits).item() == pytest.approx(expected)


def test_the_opposite_reference_is_clipped_at_0():
    assert scale_factor(-rows(3, 4), rows(3, 4)) == 0


@pytest.mark.parametrize("constant", [torch.zeros(3, 4), torch.ones(3, 4)])
def test_a_reference_without_variance_is_left_as_it_is(constant):
    assert scale_factor(constant, rows(3, 4)) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_are_not_finite_do_not_count(bad, side):
    pair = [rows(5, 4), rows(5, 4) + rows(5, 4, seed=1)]
    expected = scale_factor(pair[0][1:], pair[1][1:])
    pair[side][0, 2] = bad
    torch.testing.assert_close(scale_factor(*pair), expected)


def test_it_is_a_constant_to_the_gradient_in_float32_at_least():
    logits = rows(3, 4).bfloat16().requires_grad_()
    factor = scale_factor(rows(3, 4).bfloat16(), logits)
    assert factor.dtype == torch.float32 and not factor.requires_grad
    assert factor == 1
