import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from saltflat.memory.codecs import CODECS, codec_for

FINITE = hnp.arrays(
    "float32",
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize("storage", CODECS)
@given(logits=FINITE)
def test_finite_logits_come_back_finite_and_in_order(storage, logits):
    logits = torch.from_numpy(logits)
    codec = codec_for(storage)
    stored = codec.encode(logits)
    assert stored.dtype == codec.dtype
    assert stored.shape == (len(logits), codec.width(logits.shape[1]))
    decoded = codec.decode(stored).float()
    assert decoded.isfinite().all()
    ordered = torch.take_along_dim(decoded, logits.argsort(-1), -1)
    assert (ordered.diff(dim=-1) >= 0).all()


@given(logits=FINITE)
def test_float32_is_exact(logits):
    logits = torch.from_numpy(logits)
    assert torch.equal(CODECS["float32"].decode(CODECS["float32"].encode(logits)), logits)


@given(logits=FINITE)
def test_float16_rounds_and_saturates(logits):
    logits = torch.from_numpy(logits)
    decoded = CODECS["float16"].decode(CODECS["float16"].encode(logits)).float()
    bounded = logits.clamp(-65504, 65504)
    torch.testing.assert_close(decoded, bounded, rtol=2**-11, atol=2**-25)


@given(logits=FINITE)
def test_uint8_is_within_half_a_step_and_exact_at_both_ends(logits):
    logits = torch.from_numpy(logits)
    bounded = logits.clamp(-65504, 65504).double()
    decoded = CODECS["uint8"].decode(CODECS["uint8"].encode(logits)).double()
    low, high = bounded.aminmax(dim=-1, keepdim=True)
    rounding = 1e-6 * torch.maximum(low.abs(), high.abs()) + 1e-35
    assert ((decoded - bounded).abs() <= (high - low) / 510 * (1 + 1e-5) + rounding).all()
    assert ((decoded.amin(-1, keepdim=True) - low).abs() <= rounding).all()
    assert ((decoded.amax(-1, keepdim=True) - high).abs() <= rounding).all()


def test_unknown_storage():
    with pytest.raises(ValueError, match=r"storage.*got 'int4'"):
        codec_for("int4")
