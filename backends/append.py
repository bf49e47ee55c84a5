"""Writing new tokens into a cache: where each row goes, what is written, and the write itself.

No row is selected by its value, so nothing waits for a device. On an NPU the vendor's operator
writes where it takes the cache. Everywhere else torch operators do: a skipped row is sent to the
place of the first row that counts and writes that row's value there, the same bits twice; if no row
counts, all of them write slot 0 back to itself. Values move as integers of their width, so NaN
payloads and 8-bit floats keep their bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.cache import (
    Cache,
    DenseCache,
    PackedCache,
    PagedCache,
    RingCache,
    check_offsets,
)
from splitkv.common.spec import FLOAT_DTYPES, INT4, Layout
from splitkv.common.support import UnsupportedError, Why, dtype_name
from splitkv.common.visibility import as_lengths

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where each new row goes: ``outer`` and ``inner`` index views [outer, inner, K, D] of k and v.

    outer, inner: int64 [B, S]; counts: bool [B, S], False where the row is skipped.
    """

    k: Tensor
    v: Tensor
    outer: Tensor
    inner: Tensor
    counts: Tensor


def append_kv(
    cache: Cache | RingCache,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the newest tokens of each request in place; ``cache.seq_lens`` counts them already.

    k: [B, S, K, D], or [B, K, D] for S = 1; v: the same with Dv. Row t of a request goes to
    position seq_len - S + t. Skipped, nothing written: a position below 0 (a padding row of length
    0) and a row whose page id is negative; of more tokens than a ring holds, those it would evict
    at once. Rows are rounded to the cache's dtype; rows that have it already keep their bits.
    k_scale, v_scale: float [1], [K] or [B, K], for 8-bit float caches: the code is row / scale, and
    what lies beyond the format's largest number, infinities included, becomes that number (448 for
    e4m3fn); NaN stays NaN. No scale is chosen here: with scales per token or channel, or with zero
    points, the caller makes the codes and appends them; of an int4 cache two in a byte, rows [B, S,
    K, D / 2] (``splitkv.common.quantised`` makes them).

    Where the cache's v lies in the memory of its k, as for MLA, rows of v must be what rows of k
    put there: v is written last. Rows may lie in the cache themselves; they are copied first.
    Lengths, page ids and scales on the host are checked. On a device they are not read, and a row
    that would land outside of the cache is skipped.

    Raises:
        ValueError: types, shapes, dtypes, devices, lengths or page ids that do not fit, two rows
            for one slot, a scale that is not finite and above 0 or that the cache does not take, a
            cache that is expanded or made in inference mode and written outside of it, or a tensor
            that requires grad. Nothing is written then.
        UnsupportedError: an int8 or int4 cache and rows that are not its codes yet.
    """
    _check_types(cache, k, v)
    if k.ndim == 3 and v.ndim == 3:
        k, v = k[:, None], v[:, None]
    slots = _slots(cache, k, v)
    k_codes = _codes(k, slots.k.dtype, k_scale, "k_scale")
    v_codes = _codes(v, slots.v.dtype, v_scale, "v_scale")
    if not _written_by_operator(k_codes, v_codes, slots):
        # all is read before anything is written: rows may lie in the cache
        writes = [_values(slots.k, k_codes, slots), _values(slots.v, v_codes, slots)]
        for bits, places, values in writes:
            bits.index_put_(places, values)


def _slots(cache: Cache | RingCache, k: Tensor, v: Tensor) -> _Slots:
    batch = cache.seq_lens.shape[0]
    k_view, v_view = _token_major(cache)
    _check_rows("k", k, k_view, batch)
    _check_rows("v", v, v_view, batch)
    _check_writable("k", k_view)
    _check_writable("v", v_view)
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"k and v must bring one S, got {k.shape[1]} and {v.shape[1]} tokens")
    _check_lengths(cache)
    steps = torch.arange(k.shape[1], device=k.device)
    position = _at(cache.seq_lens, k.device)[:, None] - k.shape[1] + steps
    counts = position >= 0
    if isinstance(cache, DenseCache):
        outer = torch.arange(batch, device=k.device)[:, None].expand_as(position)
        inner = position
    elif isinstance(cache, PackedCache):
        outer = torch.zeros_like(position)
        inner = _at(cache.cu_seqlens_k, k.device)[:-1, None] + position
    else:
        outer, held = _pages(cache, position)
        inner = position % cache.page_size
        counts = counts & held
    counts = counts & (inner < k_view.shape[1])
    if isinstance(cache, PagedCache | RingCache) and _on_host(
        position, cache.seq_lens, cache.block_table
    ):
        _check_distinct(outer, inner, counts)
    return _Slots(k_view, v_view, outer, inner, counts)


def _on_host(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)


def _at(index: Tensor, device: torch.device) -> Tensor:
    """As int64 on the device of the cache, without waiting for that device."""
    if index.device == device:
        return index.to(torch.int64)
    # a fresh pageable copy: it is staged before the call returns, whatever the caller does next
    return index.to(torch.int64, copy=True).to(device, non_blocking=True)


def _token_major(cache: Cache | RingCache) -> tuple[Tensor, Tensor]:
    """Views of k and v as [outer, inner, K, D]: request or page, then the token in it."""
    if isinstance(cache, PackedCache):
        return cache.k[None], cache.v[None]
    if cache.layout in (Layout.BSND, Layout.NHD):
        return cache.k, cache.v
    return cache.k.transpose(1, 2), cache.v.transpose(1, 2)


def _pages(cache: PagedCache | RingCache, position: Tensor) -> tuple[Tensor, Tensor]:
    """Page of each position, and whether there is one; int64 and bool [B, S]."""
    block = position.clamp(min=0) // cache.page_size
    column, held = block, torch.ones_like(block, dtype=torch.bool)
    if isinstance(cache, RingCache):
        pinned, around = cache.anchor_blocks, max(cache.ring_blocks, 1)
        column = torch.where(block < pinned, block, pinned + (block - pinned) % around)
        held = (block < pinned) | (block > block[:, -1:] - around)
    columns, num_pages = cache.block_table.shape[1], cache.k.shape[0]
    if not columns:
        return block, torch.zeros_like(held)
    table = _at(cache.block_table, position.device)
    page = table.gather(1, column.clamp(max=columns - 1))
    held = held & (column < columns)
    if _on_host(cache.block_table, position):
        _check_page_ids(page, held & (position >= 0), num_pages)
    return page, held & (page >= 0) & (page < num_pages)


def _codes(rows: Tensor, dtype: torch.dtype, scale: Tensor | None, name: str) -> Tensor:
    """The rows as the cache stores them."""
    if rows.dtype == dtype and scale is None:
        return rows
    if dtype in FLOAT_DTYPES:
        if scale is not None:
            raise ValueError(f"{name} needs an 8-bit float cache, the cache is {dtype_name(dtype)}")
        return rows.to(dtype)
    if dtype not in _FLOAT8:
        raise _unrounded(dtype)
    values = rows.to(torch.float32)
    if scale is not None:
        values = values / _broadcast(scale, rows, name)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)  # clamp keeps NaN


def _unrounded(dtype: torch.dtype) -> UnsupportedError:
    return UnsupportedError(
        f"append_kv does not quantise to {dtype_name(dtype)}: no rounding rule is declared "
        f"({Why.NOT_YET.value}); quantise the rows and append the codes"
    )


def _broadcast(scale: Tensor, rows: Tensor, name: str) -> Tensor:
    batch, _, heads, _ = rows.shape
    allowed = ((1,), (heads,), (batch, heads))
    if not isinstance(scale, Tensor) or scale.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"{name} must be a float tensor, got {_kind(scale)}; give "
            "torch.tensor([scale], dtype=torch.float32)"
        )
    _check_no_grad(name, scale)
    if tuple(scale.shape) not in allowed or scale.device != rows.device:
        raise ValueError(
            f"{name} must be [1], [K] = [{heads}] or [B, K] = [{batch}, {heads}] on {rows.device}, "
            f"got {list(scale.shape)} on {scale.device}; with scales per token or channel, append "
            "codes, and write the scales beside them"
        )
    scale = scale.to(torch.float32)
    if _on_host(scale):
        bad = ~(scale.isfinite() & (scale > 0))  # in float32, where a small float64 is 0
        if bool(bad.any()):
            index = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name}{index} is {float(scale[tuple(index)])}, a scale must be finite and above 0"
            )
    return scale[:, None, :, None] if scale.ndim == 2 else scale[:, None]


def _written_by_operator(k: Tensor, v: Tensor, slots: _Slots) -> bool:
    """Whether the vendor's cache write took the rows; only an NPU has one."""
    if slots.k.device.type != "npu":
        return False
    from splitkv.kernels_ascend.cache_write import write

    block = torch.where(slots.counts, slots.outer, -1).flatten()
    memory = [part.untyped_storage()._cdata for part in (slots.k, slots.v)]
    k_rows, v_rows = (
        (part.clone() if part.untyped_storage()._cdata in memory else part).flatten(0, 1)
        for part in (k, v)
    )
    return write(slots.k, slots.v, k_rows, v_rows, block, slots.inner.flatten())


def _values(
    target: Tensor, rows: Tensor, slots: _Slots
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """Bits, places and values so that ``bits[places] = values`` is ``target[outer, inner] = rows``
    where the row counts; target: any strides.
    """
    bits = target.view(_BITS[target.dtype.itemsize])
    values = rows.view(bits.dtype).flatten(0, 1)
    counts, outer, inner = (x.flatten() for x in (slots.counts, slots.outer, slots.inner))
    if not rows.numel() or not target.numel():
        return bits, (outer[:0], inner[:0]), values[:0]
    donor = counts.to(torch.int8).argmax(keepdim=True)  # the first that counts
    some = counts.any()
    outer = torch.where(counts, outer, torch.where(some, outer[donor], 0))
    inner = torch.where(counts, inner, torch.where(some, inner[donor], 0))
    spare = torch.where(some, values[donor], bits[:1, 0])
    return bits, (outer, inner), torch.where(counts[:, None, None], values, spare)


def _kind(given: object) -> str:
    return f"a {given.dtype} tensor" if isinstance(given, Tensor) else type(given).__name__


def _check_types(cache: object, k: object, v: object) -> None:
    if not isinstance(cache, Cache | RingCache):
        raise ValueError(
            "cache must be a DenseCache, PackedCache, PagedCache or RingCache, "
            f"got {type(cache).__name__}"
        )
    for name, rows in (("k", k), ("v", v)):
        if not isinstance(rows, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(rows).__name__}")


def _check_no_grad(name: str, tensor: Tensor) -> None:
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError(
            f"{name} requires grad, a cache is for inference only; use torch.no_grad()"
        )


def _check_rows(name: str, rows: Tensor, target: Tensor, batch: int) -> None:
    heads, dim = target.shape[2:]
    if target.dtype == INT4 and rows.dtype != INT4:
        raise _unrounded(target.dtype)
    if rows.ndim != 4 or (rows.shape[0], *rows.shape[2:]) != (batch, heads, dim):
        raise ValueError(
            f"{name} must be [{batch}, S, {heads}, {dim}] or [{batch}, {heads}, {dim}] "
            f"for this cache, got {list(rows.shape)}"
        )
    if rows.device != target.device:
        raise ValueError(f"{name} must be on {target.device} like the cache, got {rows.device}")
    if rows.dtype not in (*FLOAT_DTYPES, target.dtype):
        raise ValueError(
            f"{name} must be of a float dtype or {target.dtype} like the cache, got {rows.dtype}"
        )
    _check_no_grad(name, rows)


def _check_writable(name: str, view: Tensor) -> None:
    """Slots of an expanded tensor are one piece of memory: a row written to one is in all."""
    _check_no_grad(f"the cache's {name}", view)
    if view.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"the cache's {name} was made in inference mode and can be written only there; "
            "use torch.inference_mode()"
        )
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"the cache's {name} is expanded (strides {view.stride()}): slots share memory, "
                "and a row would overwrite others; use .contiguous()"
            )


def _check_lengths(cache: Cache | RingCache) -> None:
    """What a request's length, or the offsets of a packed cache, must hold; only if on the host."""
    if isinstance(cache, PackedCache):
        if cache.cu_seqlens_k.device.type == "cpu":
            check_offsets("cu_seqlens_k", cache.cu_seqlens_k, cache.k.shape[0])
        return
    if cache.seq_lens.device.type != "cpu":
        return
    lengths = as_lengths("seq_lens", cache.seq_lens).tolist()
    if isinstance(cache, RingCache):
        if any(lengths) and not cache.block_table.shape[1]:
            raise ValueError(
                f"seq_lens has a request of {max(lengths)} tokens, the ring's block_table has 0 "
                "columns: it holds none"
            )
        return
    for index, length in enumerate(lengths):
        if length > cache.capacity:
            raise ValueError(
                f"seq_lens[{index}] is {length}, the cache holds {cache.capacity} tokens"
            )


def _check_page_ids(page: Tensor, written: Tensor, num_pages: int) -> None:
    bad = written & (page >= num_pages)
    if bool(bad.any()):
        row, step = bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_table sends token {step} of request {row} to page {int(page[row, step])}, "
            f"the pool has pages 0 to {num_pages - 1}"
        )


def _check_distinct(page: Tensor, inner: Tensor, counts: Tensor) -> None:
    """Which of two rows a slot holds in the end is not defined."""
    places = torch.stack([page[counts], inner[counts]], dim=1)
    distinct, which = places.unique(dim=0, return_inverse=True)
    if len(distinct) == len(places):
        return
    order = which.argsort(stable=True)
    first = int((which[order].diff() == 0).nonzero()[0])
    one, other = (counts.nonzero()[order[at]].tolist() for at in (first, first + 1))
    shared, offset = places[order[first]].tolist()
    raise ValueError(
        f"block_table sends token {one[1]} of request {one[0]} and token {other[1]} of request "
        f"{other[0]} to page {shared}, offset {offset}: give each a page of its own"
    )
