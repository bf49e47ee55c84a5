"""Is a call well formed? Everything that can be said before anything runs.

``shapes`` looks at shapes, dtypes and devices and reads no device data. ``full`` also reads values:
lengths, used page ids, offsets, scales. Each message names the argument, the value and the limit.
"""

from collections.abc import Mapping
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.cache import (
    Cache,
    DenseCache,
    PackedCache,
    PagedCache,
    RingCache,
    check_index,
    check_offsets,
)
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.quantised import of_tokens, scale_shapes
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind, codes_per_item
from splitkv.common.visibility import IntArray, as_lengths, visible_bounds, visible_mask


class Validate(Enum):
    """How much of a call is checked."""

    FULL = "full"
    """shapes, and values: lengths, used page ids, offsets, scales"""
    SHAPES = "shapes"
    """shapes, dtypes and devices; no device data is read"""
    NONE = "none"


def check_call(call: DecodeCall, plan: SplitPlan | None, level: Validate) -> None:
    """Raise ValueError unless ``call`` (and ``plan``, if given) is well formed at ``level``."""
    if level is Validate.NONE:
        return
    _refuse_autograd(call)
    _check_queries(call)
    _check_cache(call.cache, call.spec, call.q)
    _check_index_devices(call)
    _check_extras(call)
    if plan is not None:
        _check_plan(plan, call)
    if level is Validate.FULL:
        _check_values(call, plan)
    elif not isinstance(call.cache, PackedCache) and call.cache.seq_lens.device.type == "cpu":
        # host data costs no sync, and a device would read past its end
        _check_lengths(call.cache, plan)


def check_types(spec: object, cache: object, tensors: Mapping[str, object]) -> None:
    """Raise ValueError unless a call is made of what it should be; None stands for what is not
    given (but for q).
    """
    if not isinstance(spec, DecodeSpec):
        raise ValueError(f"spec must be a DecodeSpec, got {type(spec).__name__}")
    if not isinstance(cache, DenseCache | PackedCache | PagedCache | RingCache):
        raise ValueError(
            "cache must be a DenseCache, PackedCache, PagedCache or RingCache, got "
            f"{type(cache).__name__}"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "q"):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")


def check_ring(ring: RingCache, spec: DecodeSpec, cu_seqlens_q: Tensor | None = None) -> None:
    """Raise ValueError unless every position that ``spec`` lets a query see is still in the ring;
    reads the lengths.
    """
    page, blocks = ring.page_size, ring.ring_blocks
    lengths = as_lengths("seq_lens", ring.seq_lens)
    counts: IntArray | int = spec.num_queries
    if cu_seqlens_q is not None and cu_seqlens_q.shape == (len(lengths) + 1,):
        counts = np.diff(as_lengths("cu_seqlens_q", cu_seqlens_q))
    anchor_end, start = visible_bounds(lengths, counts, spec)
    pinned = ring.anchor_blocks * page
    oldest = np.maximum((-(-lengths // page) - blocks) * page, pinned)
    wrapped = oldest > pinned
    lost = wrapped & ((start < oldest) | (anchor_end > pinned))
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        raise ValueError(
            f"seq_lens[{index}] is {lengths[index]}: the ring holds positions 0 to {pinned} and "
            f"{oldest[index]} to {lengths[index]}, the spec shows 0 to {anchor_end[index]} and "
            f"{start[index]} to {lengths[index]}; use more blocks than anchor_blocks "
            f"{ring.anchor_blocks} and ring_blocks {blocks}, or a smaller sliding_window"
        )


def check_sinks(sinks: Tensor | None, spec: DecodeSpec, device: torch.device) -> None:
    """Raise ValueError unless ``sinks`` is what ``spec`` promises: None, or [H] on ``device``."""
    if (sinks is not None) != spec.sinks:
        raise ValueError(
            f"spec.sinks is {spec.sinks}, but sinks is {'given' if sinks is not None else 'None'}"
        )
    if sinks is not None:
        _check_numbers("sinks", sinks, ((spec.num_q_heads,),), device)
        _refuse_grad("sinks", sinks)


def _refuse_grad(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, decode attention is for inference only; use torch.no_grad()"
        )


def _refuse_autograd(call: DecodeCall) -> None:
    for name, tensor in (("q", call.q), ("k", call.cache.k), ("v", call.cache.v)):
        _refuse_grad(name, tensor)
    for name in ("alibi_slopes", "attn_bias", "k_scale", "v_scale", "k_zero", "v_zero"):
        _refuse_grad(name, getattr(call, name))


def _check_shape(
    name: str, tensor: Tensor, allowed: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    if tuple(tensor.shape) not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name} must be {wanted}, got {list(tensor.shape)}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")


def _check_numbers(
    name: str, tensor: Tensor, allowed: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    _check_shape(name, tensor, allowed, device)
    if not tensor.is_floating_point():
        raise ValueError(f"{name} must be of a floating dtype, got {tensor.dtype}")


def _check_queries(call: DecodeCall) -> None:
    q, spec = call.q, call.spec
    if (call.cu_seqlens_q is not None) != spec.packed_queries:
        raise ValueError(
            f"spec.packed_queries is {spec.packed_queries}, but cu_seqlens_q says otherwise"
        )
    if spec.packed_queries:
        assert call.cu_seqlens_q is not None
        check_index("cu_seqlens_q", call.cu_seqlens_q, "[B + 1]", 1)
        if call.cu_seqlens_q.shape[0] != call.batch + 1:
            raise ValueError(
                f"cu_seqlens_q must have B + 1 = {call.batch + 1} entries, got "
                f"{call.cu_seqlens_q.shape[0]}"
            )
        wanted: tuple[int | None, ...] = (None, spec.num_q_heads, spec.head_dim)
    else:
        wanted = (call.batch, spec.num_queries, spec.num_q_heads, spec.head_dim)
    fits = len(wanted) == q.ndim and all(
        want in (None, got) for want, got in zip(wanted, q.shape, strict=True)
    )
    if not fits:
        shape = ["T" if want is None else want for want in wanted]
        raise ValueError(f"q must be {shape} for this cache and spec, got {list(q.shape)}")
    if q.dtype != spec.dtype:
        raise ValueError(f"q is {q.dtype}, spec.dtype is {spec.dtype}")


def _check_cache(cache: Cache, spec: DecodeSpec, q: Tensor) -> None:
    if cache.layout is not spec.layout:
        raise ValueError(
            f"cache layout {cache.layout.value} is not spec.layout {spec.layout.value}"
        )
    if cache.page_size != spec.page_size:
        raise ValueError(
            f"cache page size {cache.page_size} is not spec.page_size {spec.page_size}"
        )
    if cache.num_kv_heads != spec.num_kv_heads:
        raise ValueError(
            f"k has {cache.num_kv_heads} kv heads, spec.num_kv_heads is {spec.num_kv_heads}"
        )
    for name, tensor, dim in (("k", cache.k, spec.head_dim), ("v", cache.v, spec.head_dim_v)):
        held = tensor.shape[-1] * codes_per_item(spec.cache_dtype)
        if held != dim:
            raise ValueError(f"{name} has head dim {held}, spec says {dim}")
        if tensor.dtype != spec.cache_dtype:
            raise ValueError(f"{name} is {tensor.dtype}, spec.kv_dtype is {spec.cache_dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {tensor.device}")
    if isinstance(cache, PagedCache) and cache.block_table.device != q.device:
        raise ValueError(
            f"block_table must be on {q.device} like q, got {cache.block_table.device}"
        )


def _check_index_devices(call: DecodeCall) -> None:
    """Lengths and offsets may live on the host or with q; a block table lives with the pages."""
    cache = call.cache
    if isinstance(cache, PackedCache):
        lengths = ("cu_seqlens_k", cache.cu_seqlens_k)
    else:
        lengths = ("seq_lens", cache.seq_lens)
    allowed = (call.q.device, torch.device("cpu"))
    offsets = (("cu_seqlens_q", call.cu_seqlens_q), ("kv_start", call.kv_start))
    for name, tensor in (lengths, *offsets):
        if tensor is not None and tensor.device not in allowed:
            raise ValueError(
                f"{name} must be on {call.q.device} like q, or on cpu, got {tensor.device}"
            )


def _check_extras(call: DecodeCall) -> None:
    spec, device = call.spec, call.q.device
    flags = (
        ("kv_start", call.kv_start, spec.kv_start),
        ("alibi_slopes", call.alibi_slopes, spec.alibi),
        ("attn_bias", call.attn_bias, spec.attn_bias),
        ("attn_mask", call.attn_mask, spec.attn_mask),
        ("k_scale", call.k_scale, spec.k_scale is not None),
        ("v_scale", call.v_scale, spec.v_scale is not None),
        ("k_zero", call.k_zero, spec.k_zero),
        ("v_zero", call.v_zero, spec.v_zero),
    )
    for name, tensor, promised in flags:
        if (tensor is not None) != promised:
            said = "promises" if promised else "does not promise"
            raise ValueError(
                f"the spec {said} {name}, but {name} is {'None' if tensor is None else 'given'}"
            )
    heads, batch, steps = spec.num_q_heads, call.batch, spec.num_queries
    if call.kv_start is not None:
        check_index("kv_start", call.kv_start, "[B]", 1)
        _check_shape("kv_start", call.kv_start, ((batch,),), call.kv_start.device)
    if call.alibi_slopes is not None:
        _check_numbers("alibi_slopes", call.alibi_slopes, ((heads,), (batch, heads)), device)
    if call.attn_bias is not None:
        n = call.attn_bias.shape[-1] if call.attn_bias.ndim else 0
        allowed = tuple((b, h, steps, n) for b in (batch, 1) for h in (heads, 1))
        _check_numbers("attn_bias", call.attn_bias, allowed, device)
    if call.attn_mask is not None:
        n = call.attn_mask.shape[-1] if call.attn_mask.ndim else 0
        _check_shape("attn_mask", call.attn_mask, ((batch, steps, n),), device)
        if call.attn_mask.dtype != torch.bool:
            raise ValueError(
                f"attn_mask must be bool (True may be seen), got {call.attn_mask.dtype}"
            )
    for name, values, kind in _scales(call):
        part = call.cache.k if name.startswith("k") else call.cache.v
        shapes = scale_shapes(kind, part, call.cache)
        scale = getattr(call, f"{name[0]}_scale")
        if name.endswith("zero") and scale is not None:
            shapes = (tuple(scale.shape),)
        _check_numbers(name, values, shapes, device)


def _scales(call: DecodeCall) -> list[tuple[str, Tensor, ScaleKind]]:
    """Scales and zero points that are given, each with its name and kind."""
    spec = call.spec
    given = (
        ("k_scale", call.k_scale, spec.k_scale),
        ("v_scale", call.v_scale, spec.v_scale),
        ("k_zero", call.k_zero, spec.k_scale),
        ("v_zero", call.v_zero, spec.v_scale),
    )
    return [
        (name, values, kind)
        for name, values, kind in given
        if values is not None and kind is not None
    ]


def _check_plan(plan: SplitPlan, call: DecodeCall) -> None:
    if plan.batch != call.batch:
        raise ValueError(f"plan is for {plan.batch} requests, the cache has {call.batch}")
    if plan.spec.plan_key != call.spec.plan_key:
        raise ValueError(
            f"plan was made for {plan.spec}, the call's spec differs in heads, dims, dtype, page "
            "size, window or queries: "
            f"{call.spec}"
        )


def _check_values(call: DecodeCall, plan: SplitPlan | None) -> None:
    cache, spec = call.cache, call.spec
    if isinstance(cache, PackedCache):
        check_offsets("cu_seqlens_k", cache.cu_seqlens_k, cache.k.shape[0])
    lengths = _check_lengths(cache, plan)
    if call.kv_start is not None:
        _check_starts(as_lengths("kv_start", call.kv_start), lengths)
    counts = np.full(call.batch, spec.num_queries)
    if call.cu_seqlens_q is not None:
        counts = np.diff(check_offsets("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0]))
        if counts.size and counts.max() > spec.num_queries:
            raise ValueError(
                f"cu_seqlens_q gives request {int(counts.argmax())} {counts.max()} queries, "
                f"spec.num_queries is {spec.num_queries}"
            )
    if isinstance(cache, PagedCache):
        _check_page_ids(call, cache, np.where(counts > 0, lengths, 0), counts)
    _check_scales(call, np.where(counts > 0, lengths, 0), counts)
    for name, tensor in (("alibi_slopes", call.alibi_slopes),):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} must be finite, got {tensor.tolist()}")


def _check_starts(starts: IntArray, lengths: IntArray) -> None:
    over = np.flatnonzero(starts > lengths)
    if over.size:
        index = int(over[0])
        raise ValueError(
            f"kv_start[{index}] is {starts[index]}, the request has {lengths[index]} tokens: "
            "allowed are 0 to seq_len"
        )


def _check_scales(call: DecodeCall, lengths: IntArray, counts: IntArray) -> None:
    """``counts``: queries of each request; ``lengths``: 0 for a request without any."""
    for name, values, kind in _scales(call):
        if kind not in (ScaleKind.TOKEN, ScaleKind.GROUP):
            if not bool(torch.isfinite(values).all()):
                raise ValueError(f"{name} must be finite, got {values.tolist()}")
            continue
        seen = _seen_positions(call, lengths, counts, int(lengths.max(initial=0)))
        read = of_tokens(values, call.cache, seen)
        if bool((bad := ~torch.isfinite(read)).any()):
            raise ValueError(
                f"{name} of every token that a query sees must be finite, got {float(read[bad][0])}"
            )


def _check_lengths(cache: Cache, plan: SplitPlan | None) -> IntArray:
    lengths = as_lengths("seq_lens", cache.seq_lens)
    over = np.flatnonzero(lengths > cache.capacity)
    if over.size:
        index = int(over[0])
        what = "the block table's" if isinstance(cache, PagedCache) else "the cache's"
        raise ValueError(
            f"seq_lens[{index}] is {lengths[index]}, {what} capacity is {cache.capacity} tokens"
        )
    if plan is not None:
        longer = np.flatnonzero(lengths > plan.seq_lens)
        if longer.size:
            index = int(longer[0])
            raise ValueError(
                f"seq_lens[{index}] is {lengths[index]}, the plan was made for "
                f"{plan.seq_lens[index]}; call plan.refresh(seq_lens)"
            )
    return lengths


def _check_page_ids(
    call: DecodeCall, cache: PagedCache, lengths: IntArray, counts: IntArray
) -> None:
    """``counts``: queries of each request; ``lengths``: 0 for a request without any."""
    table = cache.block_table.detach().cpu().numpy()
    used = _used_pages(call, cache, lengths, counts)
    bad = np.argwhere(used & ((table < 0) | (table >= cache.num_pages)))
    if bad.size:
        row, col = (int(value) for value in bad[0])
        raise ValueError(
            f"block_table[{row}, {col}] is {int(table[row, col])}, "
            f"the pool has pages 0 to {cache.num_pages - 1}"
        )


def _used_pages(
    call: DecodeCall, cache: PagedCache, lengths: IntArray, counts: IntArray
) -> npt.NDArray[np.bool_]:
    """bool [B, max_blocks]: the entries whose page holds a position that some query may see."""
    page, columns = cache.page_size, cache.block_table.shape[1]
    anchor_end, start = visible_bounds(lengths, counts, call.spec)
    if call.attn_mask is None and call.kv_start is None:
        column = np.arange(columns)
        used = (column >= (start // page)[:, None]) & (column < (-(-lengths // page))[:, None])
        return np.asarray(used | (column < (-(-anchor_end // page))[:, None]))
    seen = _seen_positions(call, lengths, counts, columns * page)
    return np.asarray(seen.reshape(len(lengths), columns, page).any(2))


def _seen_positions(
    call: DecodeCall, lengths: IntArray, counts: IntArray, tokens: int
) -> npt.NDArray[np.bool_]:
    """bool [B, tokens]: the positions that some query may see; an infinite bias hides none."""
    anchor_end, start = visible_bounds(lengths, counts, call.spec)
    position = np.arange(tokens)
    seen = (position >= start[:, None]) | (position < anchor_end[:, None])
    seen &= position < lengths[:, None]
    if call.kv_start is not None:
        seen &= position >= as_lengths("kv_start", call.kv_start)[:, None]
    if call.attn_mask is None:
        return seen
    allowed = _allowed_columns(call, call.attn_mask.cpu(), lengths, counts)
    row, masked = np.nonzero(~allowed)
    masked += lengths[row] - allowed.shape[1]
    seen[row[masked >= 0], masked[masked >= 0]] = False
    return seen


def _allowed_columns(
    call: DecodeCall, mask: Tensor, lengths: IntArray, counts: IntArray
) -> npt.NDArray[np.bool_]:
    """bool [B, n]: of the last n positions, those that some query sees; the mask says which, and
    causality and window.
    """
    steps, n = mask.shape[1:]
    end, count = (torch.from_numpy(x.astype(np.int64))[:, None, None] for x in (lengths, counts))
    query, column = torch.arange(steps)[:, None], torch.arange(n)
    allowed = mask & (query < count)
    rule = visible_mask(end - count + query, end - n + column, call.spec)
    allowed = allowed if rule is None else allowed & rule
    return np.asarray(allowed.any(1).numpy())


def layout_of(layout: str | Layout | None) -> Layout | None:
    """The enum's member for ``layout``.

    Raises:
        ValueError: an unknown name; the text lists the known ones.
    """
    if layout is None or isinstance(layout, Layout):
        return layout
    known = [member.value for member in Layout]
    if layout not in known:
        raise ValueError(f"unknown layout {layout!r}, known: {known}")
    return Layout(layout)
