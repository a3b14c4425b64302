"""What runs on the GPU, in Triton: `_fused` says what for."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch"])
def compare(
    logits, table, stamps, index, clock, pulls, rows,
    stride, batch, classes, samples, temperature,
    BLOCK: tl.constexpr, STORAGE: tl.constexpr, MODE: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < classes
    x = tl.load(logits + i * stride + column, mask, other=0.0).to(tl.float32)
    finite = _all_finite(x)
    valid = finite
    if STARTED:
        row = i
        if MODE == "ring":
            sample = tl.load(index + i).to(tl.int64)
            here = (sample >= 0) & (sample < samples)
            row = tl.load(clock) + tl.where(here, sample, 0)
            valid = valid & here & (tl.load(stamps + row) == tl.load(clock + 2))
        if MODE == "staged":
            valid = valid & (tl.load(stamps + i) != 0)
        y = _decoded(table, row, column, mask, classes, STORAGE)
        q, log_q = _softened(x, mask, temperature)
        p, log_p = _softened(y, mask, temperature)
        loss = tl.sum(tl.where(mask, p * (log_p - log_q), 0.0), 0)
        tl.store(rows + i, tl.where(valid, loss, 0.0))
        tl.store(pulls + i * classes + column, tl.where(valid, q - p, 0.0), mask)
        tl.store(rows + batch + i, valid.to(tl.float32))
    tl.store(rows + 2 * batch + i, finite.to(tl.float32))


@triton.jit(do_not_specialize=["batch"])
def finish(
    logits, table, stamps, index, clock, pulls, rows, loss, nonfinite,
    stride, batch, classes, samples, loss_scale, pull_scale,
    BLOCK: tl.constexpr, STORAGE: tl.constexpr, MODE: tl.constexpr, STARTED: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < classes
    keep = tl.load(rows + 2 * batch + i) != 0
    sample = i
    if MODE == "ring":
        sample = tl.load(index + i).to(tl.int64)
        keep = keep & (sample >= 0) & (sample < samples)

    # Over the batch: how many rows count, what they sum up to, which of them comes later.
    count, total, lost, outside = 0.0, 0.0, 0, 0
    for start in range(0, batch, CHUNK):
        j = start + tl.arange(0, CHUNK)
        there = j < batch
        ok = tl.load(rows + 2 * batch + j, there, other=1.0)
        lost += tl.sum((ok == 0).to(tl.int32), 0)
        if STARTED:
            total += tl.sum(tl.load(rows + j, there, other=0.0), 0)
            count += tl.sum(tl.load(rows + batch + j, there, other=0.0), 0)
        if MODE == "ring":
            other = tl.load(index + j, there, other=0).to(tl.int64)
            outside += tl.sum((there & ((other < 0) | (other >= samples))).to(tl.int32), 0)
            later = there & (j > i) & (other == sample) & (ok != 0)
            keep = keep & (tl.sum(later.to(tl.int32), 0) == 0)
    share = 1.0 / tl.maximum(count, 1.0)

    if STARTED:
        at = pulls + i * classes + column
        tl.store(at, tl.load(at, mask, other=0.0) * (pull_scale * share), mask)
    row = i
    if MODE == "ring":
        row = tl.load(clock) + sample
    if keep:
        x = tl.load(logits + i * stride + column, mask, other=0.0).to(tl.float32)
        _encode(table, row, column, mask, x, classes, STORAGE)
        if MODE == "ring":
            tl.store(stamps + row, tl.load(clock + 1).to(tl.int32))
    if i == 0:
        tl.store(loss, total * (loss_scale * share) if STARTED else 0.0)
        tl.store(nonfinite, tl.load(nonfinite) + lost)
        if MODE == "ring":
            tl.store(clock + 3, tl.load(clock + 3) + outside)


@triton.jit
def _all_finite(x):
    # Not below infinity: infinite, or NaN.
    return tl.sum((~(tl.abs(x) < float("inf"))).to(tl.int32), 0) == 0


@triton.jit
def _softened(x, mask, temperature):
    """softmax(x / T) and its logarithm."""
    z = tl.where(mask, tl.div_rn(x, temperature + tl.zeros_like(x)), -float("inf"))
    z = z - tl.max(z, 0)
    e = tl.exp(z)
    total = tl.sum(e, 0)
    return e / total, z - tl.log(total)


@triton.jit
def _decoded(table, row, column, mask, classes, STORAGE: tl.constexpr):
    """As of the codec of this name."""
    if STORAGE == "uint8":
        first = table + row * (classes + 8)
        codes = tl.load(first + column, mask, other=0).to(tl.float32)
        low, step = _float_at(first + classes), _float_at(first + classes + 4)
        return low + step * codes
    else:
        return tl.load(table + row * classes + column, mask, other=0.0).to(tl.float32)


@triton.jit
def _encode(table, row, column, mask, x, classes, STORAGE: tl.constexpr):
    if STORAGE == "float32":
        tl.store(table + row * classes + column, x, mask)
    else:
        x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
        if STORAGE == "float16":
            tl.store(table + row * classes + column, x.to(tl.float16), mask)
        else:
            first = table + row * (classes + 8)
            low = tl.min(tl.where(mask, x, float("inf")), 0)
            high = tl.max(tl.where(mask, x, -float("inf")), 0)
            step = tl.div_rn(high - low, 255.0)
            divisor = tl.maximum(step, 1.1754943508222875e-38) + tl.zeros_like(x)
            codes = tl.div_rn(x - low, divisor)
            # 1.5 * 2^23, beside which a float32 has no room for a fraction: rounds half to even.
            codes = (codes + 12582912.0) - 12582912.0
            tl.store(first + column, codes.to(tl.uint8), mask)
            _put_float(first + classes, low)
            _put_float(first + classes + 4, step)


@triton.jit
def _float_at(first):
    """A float32 from four bytes, which need not be aligned."""
    bits = tl.load(first).to(tl.uint32)
    for k in tl.static_range(1, 4):
        bits |= tl.load(first + k).to(tl.uint32) << (8 * k)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _put_float(first, value):
    bits = value.to(tl.uint32, bitcast=True)
    for k in tl.static_range(4):
        tl.store(first + k, ((bits >> (8 * k)) & 255).to(tl.uint8))
