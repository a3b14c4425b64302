import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from references import kl, kl_gradient

from saltflat import trajectory_loss

ROWS = (5, 7)


def outputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("tau_squared", [False, True])
def test_equals_the_papers_equation(temperature, tau_squared, device):
    logits = outputs(*ROWS, seed=1).to(device).requires_grad_()
    reference = outputs(*ROWS, seed=2).to(device)
    loss = trajectory_loss(logits, reference, temperature=temperature, tau_squared=tau_squared)
    loss.backward()
    scale = (temperature**2 if tau_squared else 1) / len(logits)
    pairs = list(zip(reference.cpu().numpy(), logits.detach().cpu().numpy(), strict=True))
    expected = scale * sum(kl(r, z, temperature) for r, z in pairs)
    gradient = scale * np.stack([kl_gradient(r, z, temperature) for r, z in pairs])
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    np.testing.assert_allclose(logits.grad.cpu().numpy(), gradient, rtol=1e-10, atol=1e-15)


def test_equals_torchs_kl_div(device):
    logits, reference = outputs(*ROWS, seed=1).to(device), outputs(*ROWS, seed=2).to(device)
    expected = torch.nn.functional.kl_div(
        (logits / 5).log_softmax(-1), (reference / 5).softmax(-1), reduction="batchmean"
    )
    torch.testing.assert_close(trajectory_loss(logits, reference), 25 * expected)


def test_first_and_second_derivatives(device):
    logits = outputs(*ROWS, seed=1).to(device).requires_grad_()
    reference = outputs(*ROWS, seed=2).to(device)
    valid = torch.tensor([True, False, True, True, False], device=device)
    for mask in (None, valid):

        def loss(z, mask=mask):
            return trajectory_loss(z, reference, valid=mask)

        assert torch.autograd.gradcheck(loss, (logits,))
        assert torch.autograd.gradgradcheck(loss, (logits,))


def test_a_second_derivative_of_rows_that_may_hold_anything():
    logits = outputs(*ROWS, seed=1)
    logits[1] = float("nan")
    logits.requires_grad_()
    valid = torch.tensor([True, False, True, True, True])
    loss = trajectory_loss(logits, outputs(*ROWS, seed=2), valid=valid)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    gradient.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[1].count_nonzero() == 0 < logits.grad[0].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_identical_reference_gives_exactly_zero(dtype, device):
    logits = outputs(64, 100, dtype=dtype).to(device).requires_grad_()
    loss = trajectory_loss(logits, logits.detach().clone())
    loss.backward()
    assert loss == 0
    assert logits.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype, device):
    half = outputs(*ROWS, seed=1, dtype=dtype).to(device).requires_grad_()
    full = half.detach().float().requires_grad_()
    reference = outputs(*ROWS, seed=2, dtype=torch.float32).to(device)
    loss, expected = trajectory_loss(half, reference), trajectory_loss(full, reference)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    assert torch.equal(half.grad, full.grad.to(dtype))


def test_autocast_changes_nothing(device):
    logits = outputs(*ROWS, seed=1, dtype=torch.float32).to(device)
    reference = outputs(*ROWS, seed=2, dtype=torch.float32).to(device)
    expected = trajectory_loss(logits, reference)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(trajectory_loss(logits, reference), expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_valid_may_hold_anything(poison, device):
    logits, reference = outputs(*ROWS, seed=1).to(device), outputs(*ROWS, seed=2).to(device)
    valid = torch.tensor([True, False, True, False, True], device=device)
    clean = logits[valid].requires_grad_()
    expected = trajectory_loss(clean, reference[valid]) * 3 / 5  # the divisor counts all rows
    expected.backward()
    logits[1], reference[3, 0] = poison, poison
    logits.requires_grad_()
    loss = trajectory_loss(logits, reference, valid=valid)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad[valid], clean.grad)
    assert logits.grad[~valid].count_nonzero() == 0


def test_no_valid_row_gives_zero_loss_and_zero_gradient(device):
    logits = outputs(*ROWS).to(device).requires_grad_()
    loss = trajectory_loss(
        logits, outputs(*ROWS, seed=1).to(device), valid=torch.zeros(5, dtype=bool, device=device)
    )
    loss.backward()
    assert loss == 0
    assert logits.grad.count_nonzero() == 0


def test_an_empty_batch_gives_zero():
    assert trajectory_loss(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


def test_each_position_of_a_dense_output_is_a_row(device):
    logits = outputs(2, 3, 4, 6, seed=1).to(device).requires_grad_()
    reference = outputs(2, 3, 4, 6, seed=2).to(device)
    flat = logits.detach().reshape(-1, 6).requires_grad_()
    loss, expected = (
        trajectory_loss(logits, reference),
        trajectory_loss(flat, reference.reshape(-1, 6)),
    )
    (loss + expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad.reshape(-1, 6), flat.grad)


def test_valid_speaks_for_samples_or_for_positions():
    logits, reference = outputs(2, 3, 6, seed=1), outputs(2, 3, 6, seed=2)
    whole = trajectory_loss(logits, reference, valid=torch.tensor([False, True]))
    torch.testing.assert_close(whole, trajectory_loss(logits[1], reference[1]) / 2)
    tokens = torch.tensor([[True, False, False], [True, True, False]])
    single = trajectory_loss(logits, reference, valid=tokens)
    torch.testing.assert_close(single, trajectory_loss(logits[tokens], reference[tokens]) * 3 / 6)


def test_the_reference_is_a_constant():
    reference = outputs(*ROWS, seed=2).requires_grad_()
    trajectory_loss(outputs(*ROWS).requires_grad_(), reference).backward()
    assert reference.grad is None


@given(st.integers(1, 6), st.integers(1, 12), st.floats(0.1, 50), st.integers(0, 10**6))
def test_never_negative_and_blind_to_shifts(rows, classes, temperature, seed):
    logits, reference = outputs(rows, classes, seed=seed), outputs(rows, classes, seed=seed + 1)
    loss = trajectory_loss(logits, reference, temperature=temperature)
    assert loss >= -1e-12
    shifted = trajectory_loss(logits + 3.0, reference - 7.0, temperature=temperature)
    torch.testing.assert_close(shifted, loss, rtol=1e-9, atol=1e-9)


def test_compiles_without_a_graph_break(device):
    torch._dynamo.reset()
    compiled = torch.compile(trajectory_loss, fullgraph=True, backend="aot_eager")
    logits = outputs(*ROWS, seed=1).to(device).requires_grad_()
    reference = outputs(*ROWS, seed=2).to(device)
    valid = torch.tensor([True, False, True, True, False], device=device)
    expected = torch.autograd.grad(trajectory_loss(logits, reference, valid=valid), logits)[0]
    got = torch.autograd.grad(compiled(logits, reference, valid=valid), logits)[0]
    torch.testing.assert_close(got, expected)


def test_functional_transforms():
    logits, reference = outputs(*ROWS, seed=1), outputs(*ROWS, seed=2)
    gradient = torch.func.grad(trajectory_loss)(logits, reference)
    leaf = logits.clone().requires_grad_()
    trajectory_loss(leaf, reference).backward()
    torch.testing.assert_close(gradient, leaf.grad)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.0}, "temperature.*got 0"),
        ({"temperature": -1.0}, "temperature.*got -1"),
        ({"temperature": float("nan")}, "temperature.*got nan"),
        ({"reference": torch.zeros(5, 6)}, r"reference.*\(5, 7\) and \(5, 6\)"),
        ({"valid": torch.ones(4, dtype=bool)}, r"valid.*\(5,\).*\(4,\)"),
        ({"valid": torch.ones(5)}, "valid.*torch.float32"),
    ],
)
def test_bad_input(kwargs, message):
    with pytest.raises(ValueError, match=message):
        trajectory_loss(torch.zeros(ROWS), **{"reference": torch.zeros(ROWS), **kwargs})
