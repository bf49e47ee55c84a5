"""What is checked of a cascade before anything runs: what is planned for, and each call."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.binding import Checked
from splitkv.backends.cascade.calls import prefix_spec
from splitkv.backends.cascade.plan import CascadePlan, check_mask_tokens
from splitkv.backends.registry import select
from splitkv.common.cache import PagedCache, check_index
from splitkv.common.call import DecodeCall
from splitkv.common.quantised import scale_shapes
from splitkv.common.spec import INT4, DecodeSpec, ScaleKind
from splitkv.common.validate import Validate, check_call, check_types
from splitkv.common.visibility import IntArray, as_lengths


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A call that was checked, and the array of lengths that the plan held then."""

    lengths: IntArray
    call: Checked


def check_cascade_types(cache: object, spec: object, tensors: Mapping[str, object]) -> None:
    """Raise ValueError unless this is a paged cache with pages like the spec's, and tensors."""
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f"cache must be a PagedCache, got {type(cache).__name__}: requests share pages; "
            "without them use decode"
        )
    check_types(spec, cache, tensors)
    assert isinstance(spec, DecodeSpec)
    if spec.kv_start:
        raise ValueError(
            "kv_start: the queries of a cascade's group see all of its pages; use decode"
        )
    if (cache.layout, cache.page_size) != (spec.layout, spec.page_size):
        raise ValueError(
            f"the cache has layout {cache.layout.value} and page size {cache.page_size}, the spec "
            f"{spec.layout.value} and {spec.page_size}"
        )


def check_plannable(
    cache: PagedCache, spec: DecodeSpec, cu_seqlens_q: Tensor | None, mask_tokens: int | None
) -> None:
    """Raise ValueError unless calls of ``spec`` over this cache can be well formed: such a call is
    checked in full, with queries of no memory, and without what only it can bring.
    """
    check_cascade_types(cache, spec, {"cu_seqlens_q": cu_seqlens_q})
    check_mask_tokens(mask_tokens)
    scales = _scales_of_groups(cache, spec)
    plain = replace(
        spec,
        alibi=False,
        attn_bias=False,
        sinks=False,
        k_scale=spec.k_scale if scales else None,
        v_scale=spec.v_scale if scales else None,
        k_zero=False,
        v_zero=False,
    )
    rows: tuple[int, ...] = (cache.batch, spec.num_queries)
    if spec.packed_queries and cu_seqlens_q is not None:
        check_index("cu_seqlens_q", cu_seqlens_q, "[B + 1]", 1)
        rows = (max(int(cu_seqlens_q[-1]), 0) if len(cu_seqlens_q) else 0,)
    q = cache.k.new_empty((), dtype=spec.dtype).expand(*rows, spec.num_q_heads, spec.head_dim)
    mask = None
    if spec.attn_mask:
        # pages that the mask may hide need not be there
        hidden = cache.capacity if mask_tokens is None else min(mask_tokens, cache.capacity)
        mask = cache.k.new_zeros((), dtype=torch.bool).expand(cache.batch, spec.num_queries, hidden)
    call = DecodeCall(q, cache, plain, cu_seqlens_q, attn_mask=mask, **scales)
    check_call(call, None, Validate.FULL)


def _scales_of_groups(cache: PagedCache, spec: DecodeSpec) -> dict[str, Tensor]:
    """Ones of no memory for int4 codes, which mean nothing without their scales."""
    if spec.cache_dtype != INT4:
        return {}
    one = cache.k.new_ones((), dtype=torch.float32)
    parts = {"k_scale": cache.k, "v_scale": cache.v}
    shapes = {name: scale_shapes(ScaleKind.GROUP, part, cache) for name, part in parts.items()}
    return {name: one.expand(found[0] if found else ()) for name, found in shapes.items()}


def check_cascade(
    call: DecodeCall, plan: CascadePlan, backend: str | None, level: Validate, *, again: bool
) -> tuple[Backend, IntArray]:
    """Who serves the call, and the plan's lengths that it was checked by; a call like one that was
    checked by the same lengths is not checked again.
    """
    if not isinstance(plan, CascadePlan):
        raise ValueError(f"plan must be a CascadePlan, got {type(plan).__name__}")
    # at this level: what was checked less vouches for nothing
    key, lengths = ("checked", level, call.spec, backend), plan.seq_lens
    known = plan.bound.get(key)
    if (
        isinstance(known, _Known)
        and not again
        and known.lengths is lengths
        and known.call.vouches_for(call, level)
    ):
        return known.call.backend, lengths
    check_call(call, None, level)
    if level is not Validate.NONE:
        _check_shapes(call, plan)
        _check_values(call, plan, lengths, level)
    chosen = select(call.spec, call.q.device, backend)
    if plan.groups:
        select(prefix_spec(plan), call.q.device, chosen.name)
    plan.bound[key] = _Known(lengths, Checked.of(chosen, call))
    return chosen, lengths


def _check_shapes(call: DecodeCall, plan: CascadePlan) -> None:
    if plan.batch != call.batch:
        raise ValueError(f"plan is for {plan.batch} requests, the cache has {call.batch}")
    if plan.spec != call.spec:
        raise ValueError(f"plan was made for {plan.spec}, the call's spec is {call.spec}")
    if len(call.q) != (rows := int(plan.counts.sum())) and call.cu_seqlens_q is not None:
        raise ValueError(f"plan is for {rows} queries, q has {len(call.q)}")
    for name, tensor in (("attn_mask", call.attn_mask), ("attn_bias", call.attn_bias)):
        if plan.groups and tensor is not None and tensor.shape[-1] > (plan.mask_tokens or 0):
            raise ValueError(
                f"{name} covers {tensor.shape[-1]} positions, the plan was made for mask_tokens "
                f"{plan.mask_tokens}"
            )
    assert isinstance(call.cache, PagedCache)
    capacity, shared = call.cache.capacity, int(plan.shared.max(initial=0))
    if shared > capacity:
        raise ValueError(f"the plan shares {shared} tokens, the block table holds {capacity}")


def _check_values(call: DecodeCall, plan: CascadePlan, planned: IntArray, level: Validate) -> None:
    """What the host has, and at level "full" what it has to fetch."""
    cache = call.cache
    assert isinstance(cache, PagedCache)
    full = level is Validate.FULL
    if call.cu_seqlens_q is not None and (full or call.cu_seqlens_q.device.type == "cpu"):
        counts = np.diff(as_lengths("cu_seqlens_q", call.cu_seqlens_q))
        if not np.array_equal(counts, plan.counts):
            raise ValueError("cu_seqlens_q gives other numbers of queries than the plan's")
    if full or cache.seq_lens.device.type == "cpu":
        lengths = as_lengths("seq_lens", cache.seq_lens)
        plan.check_lengths(lengths)
        if (longer := np.flatnonzero(lengths > planned)).size:
            index = int(longer[0])
            raise ValueError(
                f"seq_lens[{index}] is {lengths[index]}, the plan was made for "
                f"{planned[index]}; call plan.refresh(seq_lens)"
            )
    if full or cache.block_table.device.type == "cpu":
        plan.check_table(cache.block_table.detach().cpu().numpy())
