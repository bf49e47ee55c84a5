"""Shared prefixes: one prefix, many requests; planned by ``plan_cascade``, computed by
``cascade_decode``.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.cascade.calls import attend, prefix_spec, queries_per_read
from splitkv.backends.cascade.checks import check_cascade, check_cascade_types, check_plannable
from splitkv.backends.cascade.plan import CascadePlan, plan_groups
from splitkv.backends.decode import validate_level
from splitkv.backends.registry import select
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, finish
from splitkv.common.support import Range
from splitkv.common.validate import check_sinks
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
        ValueError: the cache is not paged or does not fit ``spec``; lengths, offsets or used page
        ids out of their range; a ``mask_tokens`` below 0. UnsupportedError: no backend takes
        ``spec``.
    """
    check_plannable(cache, spec, cu_seqlens_q, mask_tokens)
    chosen = select(spec, cache.k.device, backend)
    counts = None if cu_seqlens_q is None else np.diff(as_lengths("cu_seqlens_q", cu_seqlens_q))
    plan = plan_groups(
        spec,
        cache.block_table.detach().cpu().numpy(),
        as_lengths("seq_lens", cache.seq_lens),
        profile=chosen.profile_for(spec),
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
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
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
    check_cascade_types(cache, spec, {"q": q, "sinks": sinks})
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
        k_zero=k_zero,
        v_zero=v_zero,
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
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    backend: str | None = None,
    validate: str | None = None,
) -> PartialState:
    """The state of the queries by a cascade's plan; arguments as for ``cascade_decode``. Never
    holds a sink.

    Returns:
        ``PartialState`` with max, lse [B, (S,) H] and out [B, (S,) H, Dv], float32.
    """
    if getattr(spec, "sinks", False):
        raise ValueError(
            "a partial state never holds a sink: use a spec with sinks=False and give the sinks to "
            "finish()"
        )
    extras = {
        "cu_seqlens_q": cu_seqlens_q,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_zero": k_zero,
        "v_zero": v_zero,
    }
    check_cascade_types(cache, spec, {"q": q, **extras})
    squeezed = not spec.packed_queries and q.ndim == 3
    call = DecodeCall(q[:, None] if squeezed else q, cache, spec, **extras)
    level = validate_level(validate, q.device)
    chosen, lengths = check_cascade(call, plan, backend, level, again=validate == "full")
    state = attend(chosen, call, plan, lengths)
    if squeezed:
        return PartialState(state.max[:, 0], state.lse[:, 0], state.out[:, 0])
    return state


def _most_queries(backend: Backend) -> int | None:
    declared = backend.support.num_queries
    return declared.high if isinstance(declared, Range) else max(declared.values)
