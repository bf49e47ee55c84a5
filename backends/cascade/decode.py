"""Shared prefixes: one prefix, many requests; planned by ``plan_cascade``, computed by
``cascade_decode``.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.binding import Checked
from splitkv.backends.cascade.calls import attend, prefix_spec, queries_per_read
from splitkv.backends.cascade.plan import CascadePlan, plan_groups
from splitkv.backends.decode import validate_level
from splitkv.backends.registry import select
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, finish
from splitkv.common.support import Range
from splitkv.common.validate import Validate, check_call, check_sinks, check_types
from splitkv.common.visibility import as_lengths


def plan_cascade(
    cache: PagedCache,
    spec: DecodeSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    mask_tokens: int | None = None,
    backend: str | None = None,
    always: bool = False,
) -> CascadePlan:
    """Find what the requests of ``cache`` share, and decide what is read once.

    Copies table and lengths to the host. cu_seqlens_q: int [B + 1], as for ``decode``. mask_tokens:
    n of the ``attn_mask`` or ``attn_bias`` that will come. always: share whatever the cost model
    says.

    Raises:
        ValueError: the cache is not paged or does not fit ``spec``, or lengths and table do not fit
        together. UnsupportedError: no backend takes ``spec``.
    """
    _check_cache(cache, spec)
    chosen = select(spec, cache.k.device, backend)
    counts = None if cu_seqlens_q is None else np.diff(as_lengths("cu_seqlens_q", cu_seqlens_q))
    plan = plan_groups(
        spec,
        cache.block_table.detach().cpu().numpy(),
        as_lengths("seq_lens", cache.seq_lens),
        profile=chosen.profile(),
        query_counts=counts,
        mask_tokens=mask_tokens,
        queries_per_read=queries_per_read(chosen, spec),
        most_queries=_most_queries(chosen),
        always=always,
    )
    if plan.groups and (refused := chosen.refusals(prefix_spec(plan))):
        why = (*plan.why, *(f"the groups' call: {reason}" for reason in refused))
        return replace(
            plan, groups=(), shared=np.zeros_like(plan.shared), saved_seconds=0.0, why=why
        )
    return plan


def cascade_decode(
    q: Tensor,
    cache: PagedCache,
    spec: DecodeSpec,
    *,
    plan: CascadePlan,
    cu_seqlens_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    validate: str | None = None,
) -> tuple[Tensor, Tensor]:
    """``decode`` by a cascade's plan: the same numbers up to the rounding of the merge.

    Arguments as for ``decode``; one plan serves all layers of a step. Lengths and table may change
    as long as the shared pages do not (``plan.refresh``); what the host can read of them is
    compared with the plan ("full" reads all of it).

    Returns:
        ``(out, lse)``: out in q's shape with Dv and q's dtype, lse float32 [B, (S,) H].

    Raises:
        ValueError: malformed, or not what the plan was made for. UnsupportedError: the backend does
        not take the call.
    """
    check_types(spec, cache, {"q": q, "sinks": sinks})
    check_sinks(sinks, spec, q.device)
    state = cascade_partial(
        q,
        cache,
        replace(spec, sinks=False),
        plan=plan,
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        k_scale=k_scale,
        v_scale=v_scale,
        backend=backend,
        validate=validate,
    )
    return finish(state, sinks=sinks, dtype=q.dtype)


def cascade_partial(
    q: Tensor,
    cache: PagedCache,
    spec: DecodeSpec,
    *,
    plan: CascadePlan,
    cu_seqlens_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    validate: str | None = None,
) -> PartialState:
    """The state of the queries by a cascade's plan; arguments as for ``cascade_decode``.

    Returns:
        ``PartialState`` with max, lse [B, (S,) H] and out [B, (S,) H, Dv], float32.
    """
    extras = {
        "cu_seqlens_q": cu_seqlens_q,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    check_types(spec, cache, {"q": q, **extras})
    _check_cache(cache, spec)
    squeezed = not spec.packed_queries and q.ndim == 3
    call = DecodeCall(q[:, None] if squeezed else q, cache, spec, **extras)
    level = validate_level(validate, q.device)
    chosen = _checked(call, plan, backend, level, again=validate == "full")
    state = attend(chosen, call, plan)
    if squeezed:
        return PartialState(state.max[:, 0], state.lse[:, 0], state.out[:, 0])
    return state


def _most_queries(backend: Backend) -> int | None:
    declared = backend.support.num_queries
    return declared.high if isinstance(declared, Range) else max(declared.values)


def _check_cache(cache: object, spec: DecodeSpec) -> None:
    if not isinstance(cache, PagedCache):
        raise ValueError(
            f"cache must be a PagedCache, got {type(cache).__name__}: requests share pages; "
            "without them use decode"
        )
    if (cache.layout, cache.page_size) != (spec.layout, spec.page_size):
        raise ValueError(
            f"the cache has layout {cache.layout.value} and page size {cache.page_size}, the spec "
            f"{spec.layout.value} and {spec.page_size}"
        )


def _checked(
    call: DecodeCall, plan: CascadePlan, backend: str | None, level: Validate, *, again: bool
) -> Backend:
    """Who serves the call, which is checked unless it is like one that was."""
    if not isinstance(plan, CascadePlan):
        raise ValueError(f"plan must be a CascadePlan, got {type(plan).__name__}")
    key = ("checked", level is not Validate.NONE, call.spec, backend)
    known = plan.bound.get(key)
    if isinstance(known, Checked) and not again and known.vouches_for(call, level):
        return known.backend
    check_call(call, None, level)
    if level is not Validate.NONE:
        _check_shapes(call, plan)
        _check_values(call, plan, level)
    chosen = select(call.spec, call.q.device, backend)
    if plan.groups:
        select(prefix_spec(plan), call.q.device, chosen.name)
    plan.bound[key] = Checked.of(chosen, call)
    return chosen


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


def _check_values(call: DecodeCall, plan: CascadePlan, level: Validate) -> None:
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
        if (longer := np.flatnonzero(lengths > plan.seq_lens)).size:
            index = int(longer[0])
            raise ValueError(
                f"seq_lens[{index}] is {lengths[index]}, the plan was made for "
                f"{plan.seq_lens[index]}; call plan.refresh(seq_lens)"
            )
    if full:
        plan.check_table(cache.block_table.detach().cpu().numpy())
