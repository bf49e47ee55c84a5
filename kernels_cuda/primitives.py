"""The pieces that the kernels are written in. Scores and states are in natural logarithms.

Triton's interpreter, which runs the kernels without a GPU, cuts bits off where a cast to bfloat16
should round, and multiplies bfloat16 as if it were integers: ``narrow`` and ``dot`` keep the
kernels' meaning there.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels run in Triton's interpreter; fixed when triton is imported."""
_SUMMED_AT_ONCE = tl.constexpr(32)


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
def score_dot(q, keys):
    """``q @ keys`` in float32, q [M, D], or 16 bits in several parts [P, M, D].

    Under float32 queries every ``_SUMMED_AT_ONCE`` dims are summed by themselves, as a processor's
    blocked product does: one sum over D in order loses more bits than float32 answers may.
    """
    if q.dtype == tl.float32 and q.shape[len(q.shape) - 1] > _SUMMED_AT_ONCE:
        blocks: tl.constexpr = q.shape[1] // _SUMMED_AT_ONCE
        q = tl.permute(tl.reshape(q, (q.shape[0], blocks, _SUMMED_AT_ONCE)), (1, 0, 2))
        keys = tl.reshape(keys, (blocks, _SUMMED_AT_ONCE, keys.shape[1]))
        products = tl.sum(dot(q, keys), 0)
    else:
        products = dot(q, keys)
    return products


@device_function
def loop_bound(x):
    """A scalar as ``tl.range`` takes it.

    The interpreter holds it as an array [1], which NumPy 2.4 no longer takes for an integer.
    """
    if INTERPRETED:
        return x.handle.data.item()
    return x


@device_function
def down(x):
    """A number per row [..., M] as a column [..., M, 1] of a tile."""
    return tl.expand_dims(x, -1)


@device_function
def across(x):
    """A number per token [..., N] as a row [..., 1, N] of a tile."""
    return tl.expand_dims(x, -2)


@device_function
def turned(tile):
    """[..., N, D] as [..., D, N]."""
    return tl.trans(tile) if len(tile.shape) == 2 else tl.permute(tile, (0, 2, 1))


@device_function
def let_merge_start(EARLY: tl.constexpr):
    """The merge may be launched now, and wait (CUDA's programmatic dependent launch).

    To be called when little is left to do: its programs take the first room that they find, and so
    crowd on few multiprocessors as long as the split kernel fills the others.
    """
    if EARLY:
        gdc_launch_dependents()


@device_function
def wait_for_splits(EARLY: tl.constexpr):
    """All that the split kernel wrote is there. What was written before it was there already."""
    if EARLY:
        gdc_wait()


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
def table_entries(at, seen, request, block_table, table_strides, PAGE_SIZE: tl.constexpr):
    """Page of each token ``at`` as the table has it, or ``request`` of a cache without pages.

    Entries of unseen tokens are not loaded: they may be garbage, or past the table's end.
    """
    if PAGE_SIZE == 0:
        page = request
    else:
        entries = block_table + request * table_strides[0]
        block = at.to(tl.uint32) // PAGE_SIZE
        page = tl.load(entries + block.to(tl.int64) * table_strides[1], mask=seen, other=0)
    return page


@device_function
def fetch_table(start, end, request, block_table, table_strides, PAGE_SIZE: tl.constexpr):
    """Have a split's part of the block table brought to the second-level cache.

    Keys wait for their page, which the stream of other keys would have driven out.
    """
    if not INTERPRETED:
        lines = start // PAGE_SIZE + tl.arange(0, 128) * 32  # 32 entries of int32 in 128 bytes
        lines = tl.where(lines * PAGE_SIZE < end, lines, start // PAGE_SIZE)
        entries = block_table + request * table_strides[0]
        entries += lines.to(tl.int64) * table_strides[1]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [entries.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@device_function
def token_offsets(
    page, at, first, first_token, strides, PAGE_SIZE: tl.constexpr, WIDE: tl.constexpr
):
    """Elements from the cache's start to tokens ``at`` of the tile at ``first``, int64.

    Products within a page, or a tile of a cache without pages, have 32 bits unless WIDE: those of
    64 take three instructions.
    """
    if PAGE_SIZE == 0:
        far = page * strides[0] + (first_token + first) * strides[1]
        near = at - first
    else:
        far = page.to(tl.int64) * strides[0]
        near = (at.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
    if WIDE:
        near = near.to(tl.int64)
    return far + near * strides[1]


@device_function
def aligned_offsets(
    page, lead, within, strides, PAGE_SIZE: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr
):
    """``token_offsets`` of tokens ``lead`` [P] + ``within`` [n], where none of the P groups of n
    leaves its ``page`` [P]: [n] of one part, else [P, n].
    """
    slot = (lead.to(tl.uint32) % PAGE_SIZE).to(tl.int64)
    far = page.to(tl.int64) * strides[0] + slot * strides[1]
    near = within
    if WIDE:
        near = near.to(tl.int64)
    near = near * strides[1]
    return far + near if PARTS == 1 else down(far) + near


@device_function
def load_rows(row, offsets, dim, seen, DIM: tl.constexpr, FULL: tl.constexpr):
    """Keys or values [..., N, BLOCK_DIM]; 0 past DIM and where unseen. FULL: all are seen.

    row: pointers [BLOCK_DIM] to where a token at offset 0 would lie; offsets: elements [..., N].
    """
    cells = row + down(offsets)
    if FULL and dim.shape[0] == DIM:
        tile = tl.load(cells)
    elif dim.shape[0] == DIM:
        tile = tl.load(cells, mask=down(seen), other=0.0)
    elif FULL:
        tile = tl.load(cells, mask=dim < DIM, other=0.0)
    else:
        tile = tl.load(cells, mask=down(seen) & (dim < DIM), other=0.0)
    return tile


@device_function
def rows_of(at, first_token, PAGE_SIZE: tl.constexpr):
    """Slot of each token ``at`` in its page, or its row of the request (PAGE_SIZE 0); int64."""
    return first_token + at.to(tl.int64) if PAGE_SIZE == 0 else (at % PAGE_SIZE).to(tl.int64)


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
def weight_of(x, EXACT: tl.constexpr):
    """exp(x) for weights: what is below the smallest normal number becomes 0.

    ``tl.exp`` keeps such numbers, for four instructions instead of one. Both round x * log2(e),
    which float32 answers show; EXACT does not.
    """
    if INTERPRETED:
        return tl.exp(x)
    if EXACT:
        return libdevice.exp(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * 1.4426950408889634],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@device_function
def online_softmax(scores, top, total, EXACT: tl.constexpr):
    """``(weights, decay, top, total)``: scores [..., M, N] join maximum and sum [..., M].

    ``decay`` [..., M] is what the sums so far are to be multiplied by.
    """
    tokens: tl.constexpr = len(scores.shape) - 1  # pyright: ignore[reportAssignmentType]
    new_top = tl.maximum(top, tl.max(scores, tokens))
    base = finite_or_zero_top(new_top)
    weights = weight_of(scores - down(base), EXACT)
    decay = weight_of(top - base, EXACT)
    return weights, decay, new_top, total * decay + tl.sum(weights, tokens)


@device_function
def in_parts(x, PARTS: tl.constexpr):
    """A number per row [M], to meet tiles [M, N] or, in several parts, [P, M, N / P]."""
    return x if PARTS == 1 else x[None, :]


@device_function
def first_half(x):
    """The first half of the rows [P, M, ...]: in one thread with the second, it moves nothing."""
    if len(x.shape) == 2:
        halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
        halves = tl.permute(halves, (0, 2, 1))
    else:
        halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2, x.shape[2]))
        halves = tl.permute(halves, (0, 2, 3, 1))
    first, _second = tl.split(halves)
    return first


@device_function
def join_parts(top, total, summed, PARTS: tl.constexpr):
    """P softmaxes as one: maximum and sum [P, M] and weighted values [P, M, Dv]; P is 2, 4 or 8."""
    merged_top = tl.max(top, 0)
    share = tl.exp(top - finite_or_zero_top(merged_top)[None, :])
    # pairs in one thread add without the barriers of a sum over warps
    parts = tl.permute(summed * down(share), (1, 2, 0))
    for _halving in tl.static_range(PARTS // 4):
        pairs = tl.reshape(parts, (parts.shape[0], parts.shape[1], parts.shape[2] // 2, 2))
        even, odd = tl.split(pairs)
        parts = even + odd
    even, odd = tl.split(parts)
    return merged_top, tl.sum(total * share, 0), even + odd


@device_function
def keep_apart(values, visible):
    """``(values, foreign)``: values [..., N, Dv] without NaN and infinities, and [..., M, Dv] what
    the rows that see those are to have added.

    A product would carry them to every row, since 0 * inf is NaN. A NaN stands in for an infinity
    of either sign, whose sum it is.
    """
    wide = values.to(tl.float32)
    finite = wide - wide == 0.0
    seen = visible.to(values.dtype)
    above = dot(seen, narrow(tl.where(finite | (wide < 0.0), 0.0, 1.0), values.dtype))
    below = dot(seen, narrow(tl.where(finite | (wide > 0.0), 0.0, 1.0), values.dtype))
    infinity = float("inf")
    foreign = tl.where(above > 0.0, infinity, 0.0) + tl.where(below > 0.0, -infinity, 0.0)
    return tl.where(finite, values, 0.0), foreign


@device_function
def normalise(top, total, summed):
    """``(lse, out)`` of maximum, sum [M] and weighted values [M, Dv]; (-inf, 0) of nothing."""
    nothing = total == 0.0
    divisor = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), top + tl.log(divisor))
    return lse, tl.where(nothing[:, None], 0.0, summed / divisor[:, None])


@device_function
def add_sink(lse, sink):
    """``(lse, share)`` with a learned logit ``sink``: the new lse, and what it leaves of out.

    A sink of +inf leaves nothing: with 0 in its place below, no infinity meets another.
    """
    top = finite_or_zero_top(tl.maximum(lse, sink))
    top = tl.where(top == float("inf"), 0.0, top)
    with_sink = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
    return with_sink, tl.exp(lse - finite_or_zero_top(with_sink))
