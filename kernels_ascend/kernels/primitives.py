"""The pieces that the kernels are written in, in the dialect of Triton that Triton-Ascend 3.2 and
Triton 3.6 share: no tuples as arguments, no atomics, rows side by side in memory.

Triton's interpreter cuts bits off where a cast to bfloat16 should round, and multiplies bfloat16 as
if it were integers: ``narrow`` and ``widen`` keep the kernels' meaning there.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))
"""Whether the kernels run in Triton's interpreter; fixed when triton is imported."""


def device_function(function: Callable[..., Any]) -> Any:
    """Make ``function`` callable from kernels.

    In the interpreter it stays plain Python: the kernel that calls it has been prepared already,
    and to prepare it anew at every call takes longer than the call.
    """
    return function if INTERPRETED.value else triton.jit(function)


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
def widen(x):
    """``x`` in float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@device_function
def loop_bound(x):
    """A scalar as a loop's bound.

    The interpreter holds it as an array [1], which NumPy 2.4 no longer takes for an integer.
    """
    if INTERPRETED:
        return x.handle.data.item()
    return x


@device_function
def finite_or_zero(top):
    """``top``, or 0 where it is -inf: exp(-inf - 0) is 0, where exp(-inf + inf) is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


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
def dot(a, b):
    """``a @ b`` in float32."""
    if INTERPRETED:
        return tl.dot(widen(a), widen(b), input_precision="ieee")
    return tl.dot(a, b)
