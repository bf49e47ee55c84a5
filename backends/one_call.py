"""The one-call form: tensors in, spec and cache built from them, then ``decode``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv.backends.decode import decode, partial
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import QUANTISED_DTYPES, DecodeSpec, Layout, ScaleKind
from splitkv.common.state import PartialState
from splitkv.common.validate import layout_of
from splitkv.common.visibility import as_lengths, window_from

Lengths = Tensor | Sequence[int]
Scale = Tensor | float


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
    anchor_tokens: int = 0,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
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
    ones included (dense caches only may leave it out: all T). The layout is never guessed. Other
    arguments: as for ``splitkv.decode``; ``sliding_window`` counts the query's own position,
        ``window_left`` is one less (-1: unlimited).

    Returns:
        out like q with Dv, or ``(out, lse)`` with lse float32 [B, (S,) H] if ``return_lse``.

    Raises:
        ValueError: malformed, with argument, value and limit.
        UnsupportedError: well formed, and refused by ``backend`` (or by all), with every reason.
    """
    cache = _cache(k, v, seq_lens, block_table, cu_seqlens_k, layout, kv_indptr, kv_indices)
    spec = _spec(
        q,
        cache,
        cu_seqlens_q,
        k_scale,
        v_scale,
        sm_scale=sm_scale,
        causal=causal,
        sliding_window=window_from(sliding_window, window_left),
        anchor_tokens=anchor_tokens,
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
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        sinks=sinks,
        k_scale=_scale_tensor(k_scale, q.device),
        v_scale=_scale_tensor(v_scale, q.device),
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
    anchor_tokens: int = 0,
    logits_soft_cap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
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
    cache = _cache(k, v, seq_lens, block_table, cu_seqlens_k, layout, kv_indptr, kv_indices)
    spec = _spec(
        q,
        cache,
        cu_seqlens_q,
        k_scale,
        v_scale,
        sm_scale=sm_scale,
        causal=causal,
        sliding_window=window_from(sliding_window, window_left),
        anchor_tokens=anchor_tokens,
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
        alibi_slopes=alibi_slopes,
        attn_bias=attn_bias,
        attn_mask=attn_mask,
        k_scale=_scale_tensor(k_scale, q.device),
        v_scale=_scale_tensor(v_scale, q.device),
        backend=backend,
        validate=validate,
    )


def _cache(
    k: Tensor,
    v: Tensor,
    seq_lens: Lengths | None,
    block_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    layout: str | Layout | None,
    kv_indptr: Tensor | None,
    kv_indices: Tensor | None,
) -> Cache:
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    kind = layout_of(layout)
    if (kv_indptr is None) != (kv_indices is None):
        raise ValueError("kv_indptr and kv_indices come together, got one of them")
    given = {
        "block_table": block_table is not None,
        "cu_seqlens_k": cu_seqlens_k is not None,
        "kv_indptr": kv_indptr is not None,
    }
    if sum(given.values()) > 1:
        names = [name for name, present in given.items() if present]
        raise ValueError(f"a cache is found one way, got {' and '.join(names)}")
    lengths = None if seq_lens is None else _length_tensor(seq_lens)
    if cu_seqlens_k is not None:
        if kind not in (None, Layout.PACKED) or lengths is not None:
            raise ValueError(
                f"cu_seqlens_k goes with no layout and no seq_lens, got layout {layout!r}"
            )
        return PackedCache(k, v, cu_seqlens_k)
    if block_table is None and kv_indptr is None:
        return _dense(k, v, lengths, kind)
    if kind is None or not kind.paged:
        raise ValueError(
            f"a paged cache needs layout 'NHD' or 'HND' (it is never guessed), got {layout!r}"
        )
    if lengths is None:
        raise ValueError("a paged cache needs seq_lens [B]")
    if kv_indptr is not None:
        assert kv_indices is not None
        return PagedCache.from_indptr(k, v, kv_indptr, kv_indices, seq_lens=lengths, layout=kind)
    assert block_table is not None
    return PagedCache(k, v, block_table, lengths, kind)


def _dense(k: Tensor, v: Tensor, lengths: Tensor | None, kind: Layout | None) -> DenseCache:
    if kind not in (Layout.BSND, Layout.BNSD):
        got = None if kind is None else kind.value
        raise ValueError(
            "a dense cache needs layout 'BSND' or 'BNSD', a paged one block_table, a packed one "
            "cu_seqlens_k; "
            f"got layout {got!r} and no table"
        )
    if lengths is None:
        if k.ndim != 4:
            raise ValueError(
                f"k must be [B, T, K, D] (BSND) or [B, K, T, D] (BNSD), got shape {list(k.shape)}"
            )
        tokens = k.shape[1 if kind is Layout.BSND else 2]
        lengths = torch.full((k.shape[0],), tokens, dtype=torch.int32)
    return DenseCache(k, v, lengths, kind)


def _length_tensor(seq_lens: Lengths) -> Tensor:
    if isinstance(seq_lens, Tensor):
        return seq_lens
    return torch.from_numpy(as_lengths("seq_lens", seq_lens).astype("int32"))


def _spec(
    q: Tensor,
    cache: Cache,
    cu_seqlens_q: Tensor | None,
    k_scale: Scale | None,
    v_scale: Scale | None,
    **semantics: Any,
) -> DecodeSpec:
    packed = cu_seqlens_q is not None
    for name, tensor in (("q", q), ("cu_seqlens_q", cu_seqlens_q)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "q"):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if q.ndim not in ((3,) if packed else (3, 4)):
        shape = "[T, H, D] with cu_seqlens_q" if packed else "[B, H, D] or [B, S, H, D]"
        raise ValueError(f"q must be {shape}, got shape {list(q.shape)}")
    queries = (
        _longest_query(cu_seqlens_q)
        if cu_seqlens_q is not None
        else (q.shape[1] if q.ndim == 4 else 1)
    )
    return DecodeSpec(
        num_q_heads=q.shape[-2],
        num_kv_heads=cache.num_kv_heads,
        head_dim=q.shape[-1],
        head_dim_v=cache.v.shape[-1],
        layout=cache.layout,
        dtype=q.dtype,
        kv_dtype=cache.k.dtype,
        page_size=cache.page_size,
        num_queries=max(queries, 1),
        packed_queries=packed,
        k_scale=_scale_kind("k_scale", k_scale, cache),
        v_scale=_scale_kind("v_scale", v_scale, cache),
        **semantics,
    )


def _longest_query(cu_seqlens_q: Tensor) -> int:
    """Largest S of a packed batch; waits for a device tensor (``decode`` with a spec of fixed
    num_queries does not).
    """
    return int(cu_seqlens_q.diff().max()) if cu_seqlens_q.numel() > 1 else 1


def _scale_kind(name: str, scale: Scale | None, cache: Cache) -> ScaleKind | None:
    if scale is None:
        return None
    if cache.k.dtype not in QUANTISED_DTYPES:
        raise ValueError(
            f"{name} needs a quantised cache {QUANTISED_DTYPES}, the cache is {cache.k.dtype}"
        )
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return ScaleKind.TENSOR
    if tuple(scale.shape) == (cache.num_kv_heads,):
        return ScaleKind.HEAD
    if tuple(scale.shape) == (cache.batch, cache.num_kv_heads):
        return ScaleKind.REQUEST_HEAD
    raise ValueError(
        f"{name} must be a number, [K] = [{cache.num_kv_heads}] or [B, K] = [{cache.batch}, "
        f"{cache.num_kv_heads}], "
        f"got {list(scale.shape)}"
    )


def _scale_tensor(scale: Scale | None, device: torch.device) -> Tensor | None:
    if scale is None:
        return None
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=device)
    return tensor.reshape(1) if tensor.numel() == 1 else tensor
