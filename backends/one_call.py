"""The one-call form: tensors in, spec and cache built from them, then ``decode``."""

from typing import Any

from torch import Tensor

from splitkv.backends.call_arguments import Lengths, Scale, cache_of, scale_tensor, spec_fields
from splitkv.backends.decode import decode, partial
from splitkv.common.cache import Cache
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.state import PartialState
from splitkv.common.visibility import window_from


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seq_lens: Lengths | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str | Layout | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    window_left: int | None = None,
    window_block: int = 1,
    anchor_tokens: int = 0,
    kv_start: Tensor | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    k_zero: Scale | None = None,
    v_zero: Scale | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    plan: SplitPlan | None = None,
    backend: str | None = None,
    validate: str | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode attention in one call.

    q: [B, H, D] or [B, S, H, D]; packed [T, H, D] with ``cu_seqlens_q`` int [B + 1]. k, v: dense
    with ``layout`` "BSND" [B, T, K, D] or "BNSD" [B, K, T, D]; pages with ``block_table`` int [B,
    max_blocks] (or ``kv_indptr``, ``kv_indices``), ``seq_lens`` and ``layout`` "NHD" [pages, P, K,
    D] or "HND" [pages, K, P, D]; packed [tokens, K, D] with ``cu_seqlens_k`` int [B + 1] and no
    layout. v may have another last dimension Dv. seq_lens: int [B], tokens of each request, the new
    ones included (dense caches only may leave it out: all T). The layout is never guessed.
    k_scale, v_scale: a number, or a tensor whose shape says its ``ScaleKind`` (one that fits two is
    refused); k_zero, v_zero: like the scale they go with. Other arguments: as for
    ``splitkv.decode``; ``sliding_window`` counts the query's own position,
        ``window_left`` is one less (-1: unlimited); with ``window_block`` it begins at a multiple
        of that (``sliding_window`` and ``window_block`` 8192: Llama 4's chunks).

    Returns:
        out like q with Dv, or ``(out, lse)`` with lse float32 [B, (S,) H] if ``return_lse``.

    Raises:
        ValueError: malformed, with argument, value and limit.
        UnsupportedError: well formed, and refused by ``backend`` (or by all), with every reason.
    """
    cache = cache_of(
        k,
        v,
        seq_lens=seq_lens,
        block_table=block_table,
        cu_seqlens_k=cu_seqlens_k,
        layout=layout,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
    )
    spec = _spec(
        q,
        cache,
        cu_seqlens_q,
        k_scale=k_scale,
        v_scale=v_scale,
        k_zero=k_zero is not None,
        v_zero=v_zero is not None,
        sm_scale=sm_scale,
        causal=causal,
        sliding_window=window_from(sliding_window, window_left),
        window_block=window_block,
        anchor_tokens=anchor_tokens,
        kv_start=kv_start is not None,
        logits_soft_cap=logits_soft_cap,
        alibi=alibi_slopes is not None,
        attn_bias=attn_bias is not None,
        attn_mask=attn_mask is not None,
        sinks=sinks is not None,
    )
    result, result_lse = decode(
        q,
        cache,
        spec,
        plan=plan,
        num_splits=num_splits,
        split_size=split_size,
        cu_seqlens_q=cu_seqlens_q,
        kv_start=kv_start,
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        sinks=sinks,
        k_scale=scale_tensor(k_scale, q.device),
        v_scale=scale_tensor(v_scale, q.device),
        k_zero=scale_tensor(k_zero, q.device),
        v_zero=scale_tensor(v_zero, q.device),
        backend=backend,
        validate=validate,
        out=out,
        lse=lse,
    )
    return (result, result_lse) if return_lse or lse is not None else result


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seq_lens: Lengths | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str | Layout | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    window_left: int | None = None,
    window_block: int = 1,
    anchor_tokens: int = 0,
    kv_start: Tensor | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    k_zero: Scale | None = None,
    v_zero: Scale | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    plan: SplitPlan | None = None,
    backend: str | None = None,
    validate: str | None = None,
) -> PartialState:
    """The state of the queries over these keys in one call; arguments as for ``decode_attention``,
    without sinks.

    Returns:
        ``PartialState`` with max, lse [B, (S,) H] and out [B, (S,) H, Dv], float32.
    """
    cache = cache_of(
        k,
        v,
        seq_lens=seq_lens,
        block_table=block_table,
        cu_seqlens_k=cu_seqlens_k,
        layout=layout,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
    )
    spec = _spec(
        q,
        cache,
        cu_seqlens_q,
        k_scale=k_scale,
        v_scale=v_scale,
        k_zero=k_zero is not None,
        v_zero=v_zero is not None,
        sm_scale=sm_scale,
        causal=causal,
        sliding_window=window_from(sliding_window, window_left),
        window_block=window_block,
        anchor_tokens=anchor_tokens,
        kv_start=kv_start is not None,
        logits_soft_cap=logits_soft_cap,
        alibi=alibi_slopes is not None,
        attn_bias=attn_bias is not None,
        attn_mask=attn_mask is not None,
    )
    return partial(
        q,
        cache,
        spec,
        plan=plan,
        num_splits=num_splits,
        split_size=split_size,
        cu_seqlens_q=cu_seqlens_q,
        kv_start=kv_start,
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        k_scale=scale_tensor(k_scale, q.device),
        v_scale=scale_tensor(v_scale, q.device),
        k_zero=scale_tensor(k_zero, q.device),
        v_zero=scale_tensor(v_zero, q.device),
        backend=backend,
        validate=validate,
    )


def _spec(q: Tensor, cache: Cache, cu_seqlens_q: Tensor | None, **semantics: Any) -> DecodeSpec:
    if cu_seqlens_q is not None and not isinstance(cu_seqlens_q, Tensor):
        raise ValueError(f"cu_seqlens_q must be a torch tensor, got {type(cu_seqlens_q).__name__}")
    longest = None if cu_seqlens_q is None else _longest_query(cu_seqlens_q)
    return DecodeSpec(**spec_fields(q, cache, longest, **semantics))


def _longest_query(cu_seqlens_q: Tensor) -> int:
    """Largest S of a packed batch; waits for a device tensor (``decode`` with a spec of fixed
    num_queries does not).
    """
    return int(cu_seqlens_q.diff().max()) if cu_seqlens_q.numel() > 1 else 1
