"""What runs on the GPU, in Triton: `_fused`, `_average` and `_convolution` say what for."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch"])
def products(
    logits, reference, rows, stride, batch, classes, BLOCK: tl.constexpr, MATCH: tl.constexpr
):  # fmt: skip
    """Of each row the two numbers that `_match.sums` adds up."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < classes
    x = _centred(logits + i * stride + column, mask, classes)
    y = _centred(reference + i * classes + column, mask, classes)
    if MATCH == "spread":
        want, have = tl.sum(x * x, 0) / classes, tl.sum(y * y, 0) / classes
    else:
        want, have = tl.sum(x * y, 0), tl.sum(y * y, 0)
    finite = (tl.abs(want) < float("inf")) & (have < float("inf"))
    tl.store(rows + i, tl.where(finite, want, 0.0))
    tl.store(rows + batch + i, tl.where(finite, have, 0.0))


@triton.jit
def _centred(at, mask, classes):
    x = tl.load(at, mask, other=0.0).to(tl.float32)
    return tl.where(mask, x - tl.sum(x, 0) / classes, 0.0)


@triton.jit(do_not_specialize=["batch"])
def compare(
    logits, table, stamps, index, clock, pulls, rows, sums,
    stride, batch, classes, samples, temperature,
    BLOCK: tl.constexpr, STORAGE: tl.constexpr, MODE: tl.constexpr, STARTED: tl.constexpr,
    MATCH: tl.constexpr,
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
        if MATCH != "none":
            y *= _multiple(sums, MATCH)
        if MODE == "given":
            finite = finite & _all_finite(y)
            valid = finite
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
    if MODE != "given":
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
def _multiple(sums, MATCH: tl.constexpr):
    """As `_match.multiple` has it."""
    ratio = tl.load(sums) / tl.load(sums + 1)
    ratio = tl.maximum(tl.where(tl.abs(ratio) < float("inf"), ratio, 1.0), 0.0)
    return tl.sqrt(ratio) if MATCH == "spread" else ratio


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


@triton.jit
def average(
    averages, lives, sizes, variances, tensor_of, start_of, weight,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """v += weight (x - v) as torch.lerp has it, of variances for their roots; a block of one of the
    tensors in each program."""
    program = tl.program_id(0)
    k = tl.load(tensor_of + program)
    start = tl.multiple_of(tl.load(start_of + program), BLOCK)
    size = tl.load(sizes + k)
    v = _pointer(averages + k, tl.pointer_type(tl.float32), ALIGNED)
    x = _pointer(lives + k, tl.pointer_type(tl.float32), ALIGNED)
    w = tl.load(weight)
    near, far = w.to(tl.float32), (1 - w).to(tl.float32)
    at = start + tl.arange(0, BLOCK)
    if tl.load(variances + k):
        mask = at < size
        old, new = tl.load(v + at, mask, other=0.0), tl.load(x + at, mask, other=0.0)
        root = _lerp(tl.sqrt_rn(old), tl.sqrt_rn(new), near, far)
        tl.store(v + at, root * root, mask)
    # A mask of unknown shape forbids loads of 16 bytes, and most blocks need none.
    elif start + BLOCK <= size:
        tl.store(v + at, _lerp(tl.load(v + at), tl.load(x + at), near, far))
    else:
        mask = at < size
        old, new = tl.load(v + at, mask, other=0.0), tl.load(x + at, mask, other=0.0)
        tl.store(v + at, _lerp(old, new, near, far), mask)


@triton.jit
def fold(
    weights, biases, gammas, betas, means, variances, outputs, output_biases,
    sizes, channel_sizes, epsilons, tensor_of, start_of, like,
    BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Convolutions that normalise their outputs; a block of one of the weights in each program."""
    program = tl.program_id(0)
    k = tl.load(tensor_of + program)
    start = tl.multiple_of(tl.load(start_of + program), BLOCK)
    size, epsilon = tl.load(sizes + k).to(tl.int32), tl.load(epsilons + k)
    weight = _pointer(weights + k, tl.pointer_type(tl.float32), ALIGNED)
    output = _pointer(outputs + k, like.dtype, ALIGNED)
    bias, beta = _floats(biases + k), _floats(betas + k)
    gamma, mean, variance = _floats(gammas + k), _floats(means + k), _floats(variances + k)
    output_bias = tl.load(output_biases + k).to(like.dtype)

    at = start + tl.arange(0, BLOCK)
    mask = at < size
    # The output channel is the slowest dimension, whichever is the fastest.
    channel_size = tl.load(channel_sizes + k).to(tl.int32)
    channel = tl.minimum(at, size - 1) // channel_size
    scale = tl.load(gamma + channel) * tl.rsqrt(tl.load(variance + channel) + epsilon)
    if start + BLOCK <= size:
        tl.store(output + at, (tl.load(weight + at) * scale).to(like.dtype.element_ty))
    else:
        w = tl.load(weight + at, mask, other=0.0) * scale
        tl.store(output + at, w.to(like.dtype.element_ty), mask)
    # Of each channel, the program that has its first number makes its bias.
    first = mask & (at == channel * channel_size)
    offset = tl.load(bias + channel, first, other=0.0) - tl.load(mean + channel, first, other=0.0)
    shift = tl.load(beta + channel, first, other=0.0) + offset * scale
    tl.store(output_bias + channel, shift.to(like.dtype.element_ty), first)


@triton.jit
def _pointer(table, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """An address from a table; the compiler cannot know by itself that it is aligned."""
    pointer = tl.load(table).to(TYPE)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _floats(table):
    return tl.load(table).to(tl.pointer_type(tl.float32))


@triton.jit
def _lerp(old, new, near, far):
    return tl.where(near < 0.5, old + near * (new - old), new - far * (new - old))
