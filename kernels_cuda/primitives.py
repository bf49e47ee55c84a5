"""The pieces that the kernels are written in. Scores and states are in natural logarithms.

Triton's interpreter, which runs the kernels without a GPU, cuts bits off where a cast to bfloat16
should round, and multiplies bfloat16 as if it were integers: ``narrow`` and ``dot`` keep the
kernels' meaning there.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels run in Triton's interpreter; fixed when triton is imported."""


def device_function(function: Callable[..., Any]) -> Any:
    """Make ``function`` callable from kernels.

    In the interpreter it stays plain Python: the kernel that calls it has been prepared already,
    and to prepare it anew at every call takes longer than the call.
    """
    return function if INTERPRETED.value else triton.jit(function)


@device_function
def _widen_bfloat16(x):
    bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
    return bits.to(tl.float32, bitcast=True)


@device_function
def narrow(x, dtype: tl.constexpr):
    """float32 ``x`` rounded to the nearest ``dtype``, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)  # the carry could turn a NaN into an infinity
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@device_function
def dot(a, b, acc=None):
    """``a @ b`` in float32, added to ``acc``; float32 factors keep all their bits (no TF32)."""
    if INTERPRETED and a.dtype == tl.bfloat16:
        a = _widen_bfloat16(a)
        b = _widen_bfloat16(b)
    return tl.dot(a, b, acc, input_precision="ieee")


@device_function
def loop_bound(x):
    """A scalar as ``tl.range`` takes it.

    The interpreter holds it as an array [1], which NumPy 2.4 no longer takes for an integer.
    """
    if INTERPRETED:
        return x.handle.data.item()
    return x


@device_function
def span(values, index, OFFSETS: tl.constexpr):
    """``(first, count)`` of one request, int64 and int32, by offsets [B + 1] or counts [B]."""
    if OFFSETS:
        first = tl.load(values + index).to(tl.int64)
        count = (tl.load(values + index + 1) - first).to(tl.int32)
    else:
        first = tl.zeros([], tl.int64)
        count = tl.load(values + index).to(tl.int32)
    return first, count


@device_function
def locate(
    at,
    seen,
    request,
    first_token,
    block_table,
    table_strides,
    PAGE_SIZE: tl.constexpr,
    FULL: tl.constexpr,
):
    """Where tokens ``at`` lie, as int64: page and slot in it, or request and row (PAGE_SIZE 0).

    Unless all are seen (FULL), table entries of unseen tokens are not loaded: they may be garbage,
    or past the table's end.
    """
    if PAGE_SIZE == 0:
        page = request
        row = first_token + at.to(tl.int64)
    else:
        entries = block_table + request * table_strides[0]
        entries += (at // PAGE_SIZE).to(tl.int64) * table_strides[1]
        if FULL:
            page = tl.load(entries).to(tl.int64)
        else:
            page = tl.load(entries, mask=seen, other=0).to(tl.int64)
        row = (at % PAGE_SIZE).to(tl.int64)
    return page, row


@device_function
def load_tile(
    tokens,
    dim,
    stride,
    seen,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    FULL: tl.constexpr,
):
    """Keys or values [N, BLOCK_DIM] at ``tokens`` [N]; 0 past DIM and (unless FULL) if unseen."""
    cells = tokens[:, None] + dim[None, :] * stride
    if FULL and DIM == BLOCK_DIM:
        tile = tl.load(cells)
    elif FULL:
        tile = tl.load(cells, mask=(dim < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(cells, mask=seen[:, None] & (dim < DIM)[None, :], other=0.0)
    return tile


@device_function
def soft_cap(scores, cap):
    """``cap * tanh(scores / cap)``; exp sees no positive number, so nothing overflows."""
    x = scores / cap
    size = tl.abs(x)
    decay = tl.exp(-2.0 * size)
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x  # Taylor's series: near 0 the quotient loses all relative accuracy
    small = size * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
    tanh = tl.where(size < 0.2, small, large)
    return cap * tl.where(x < 0, -tanh, tanh)


@device_function
def finite_or_zero_top(top):
    """``top``, or 0 where it is -inf: exp(-inf - 0) is 0, where exp(-inf + inf) is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@device_function
def online_softmax(scores, top, total):
    """A tile of scores [M, N] joins maximum and sum [M]: ``(weights, decay, top, total)``.

    ``decay`` [M] is what the sums so far are to be multiplied by.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = finite_or_zero_top(new_top)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(top - base)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@device_function
def normalise(top, total, summed):
    """``(lse, out)`` of maximum, sum [M] and weighted values [M, Dv]; (-inf, 0) of nothing."""
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), top + tl.log(divisor))
    return lse, tl.where(nothing[:, None], 0.0, summed / divisor[:, None])


@device_function
def add_sink(lse, sink):
    """``(lse, share)`` with a learned logit ``sink``: the new lse, and what it leaves of out."""
    top = finite_or_zero_top(tl.maximum(lse, sink))
    with_sink = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    return with_sink, tl.exp(lse - finite_or_zero_top(with_sink))
