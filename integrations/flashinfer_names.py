"""From FlashInfer's decode calls to ours; every argument with its source is in
argument_names.yaml.
"""

import math
from typing import Any

import torch
from torch import Tensor

from splitkv.common.cache import PagedCache
from splitkv.common.spec import QUANTISED_DTYPES, Layout
from splitkv.common.support import UnsupportedError
from splitkv.integrations.argument_names import cache_scales, must_be, same, screened, soft_cap

BATCH = "flashinfer.BatchDecodeWithPagedKVCacheWrapper"
SINGLE = "flashinfer.single_decode_with_kv_cache"


def from_flashinfer(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for a ``BatchDecodeWithPagedKVCacheWrapper``.

    given: the keywords of its constructor, ``plan`` and ``run``, together. q: [B, H, D], with
    ``q_len_per_req`` S > 1 [B * S, H, D]; paged_kv_cache: a pair of [pages, P, K, D] (NHD) or
    [pages, K, P, D] (HND), or one tensor with an axis of 2 after the pages. Copies no page; reads
    the page lists on the host, once.

    Raises:
        ValueError: malformed, as an argument that they do not have or a number that the tensors
            contradict.
        UnsupportedError: an argument without a counterpart here, with the reason.
    """
    ours, theirs = screened(BATCH, given)
    layout = _layout(theirs.get("kv_layout"))
    k, v = _pair(theirs["paged_kv_cache"])
    q = theirs["q"]
    steps = theirs.get("q_len_per_req") or 1
    if q.ndim != 3 or q.shape[0] % steps:
        raise ValueError(
            f"q must be [B * S, H, D] with S = q_len_per_req = {steps}, got {list(q.shape)}"
        )
    token_axis, head_axis = (1, 2) if layout is Layout.NHD else (2, 1)
    must_be("num_qo_heads", theirs.get("num_qo_heads"), q.shape[1])
    must_be("num_kv_heads", theirs.get("num_kv_heads"), k.shape[head_axis])
    must_be("head_dim", theirs.get("head_dim"), q.shape[2])
    must_be("page_size", theirs.get("page_size"), k.shape[token_axis])
    must_be("q_data_type", theirs.get("q_data_type"), q.dtype)
    must_be("kv_data_type", theirs.get("kv_data_type"), k.dtype)
    out_dtype = theirs.get("o_data_type")
    if out_dtype is not None and not same(out_dtype, q.dtype):
        raise UnsupportedError(f"o_data_type {out_dtype}: out has q's dtype here, {q.dtype}")
    if steps > 1:
        q = q.unflatten(0, (-1, steps))
        ours["causal"] = True
    if (out := theirs.get("out")) is not None:
        ours["out"] = out.view(*q.shape[:-1], out.shape[-1])
    return (
        ours
        | {"q": q, "k": k, "v": v, "layout": layout.value}
        | _pages(k, v, layout, ours, theirs)
        | _scores(q, k, ours, theirs)
        | _splits(k.shape[token_axis], theirs)
    )


def from_flashinfer_single(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``single_decode_with_kv_cache``.

    q: [H, D]; k, v: [T, K, D] (NHD) or [K, T, D] (HND). Here it is a batch of one: out is [1, H,
    D], lse [1, H].

    Raises:
        ValueError, UnsupportedError: as ``from_flashinfer``.
    """
    ours, theirs = screened(SINGLE, given)
    layout = _layout(theirs.get("kv_layout"))
    q, k, v = (theirs[name] for name in ("q", "k", "v"))
    for name, tensor, ndim in (("q", q, 2), ("k", k, 3), ("v", v, 3)):
        if tensor.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got {list(tensor.shape)}")
    dense = Layout.BSND if layout is Layout.NHD else Layout.BNSD
    placed = {"q": q[None], "k": k[None], "v": v[None], "layout": dense.value}
    return ours | placed | _scores(q[None], k, ours, theirs)


def alibi_slopes_of(num_heads: int, device: torch.device | None = None) -> Tensor:
    """The slopes of ALiBi, float32 [H]: m_h = 2**(-8 h / n) for the largest power of two n <= H,
    then 2**(-4 (2 h - 1) / n) for the heads left over (Press et al., 2021).
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (h + 1) / whole) for h in range(whole)]
    rest = [2.0 ** (-4.0 * (2 * h + 1) / whole) for h in range(num_heads - whole)]
    return torch.tensor(first + rest, dtype=torch.float32, device=device)


def _layout(kv_layout: str | None) -> Layout:
    if kv_layout not in (None, "NHD", "HND"):
        raise ValueError(f"kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
    return Layout(kv_layout or "NHD")


def _pair(cache: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cache, Tensor):
        if cache.ndim != 5 or cache.shape[1] != 2:
            raise ValueError(
                "paged_kv_cache must be a pair, or [pages, 2, P, K, D] (NHD) or [pages, 2, K, P, "
                f"D] (HND), got {list(cache.shape)}"
            )
        return cache[:, 0], cache[:, 1]
    k, v = cache
    return k, v


def _pages(
    k: Tensor, v: Tensor, layout: Layout, ours: dict[str, Any], theirs: dict[str, Any]
) -> dict[str, Any]:
    if (table := theirs.get("block_tables")) is not None:
        if ours.get("seq_lens") is None:
            raise ValueError("block_tables needs seq_lens")
        return {"block_table": table}
    indptr, indices = theirs.get("paged_kv_indptr"), theirs.get("paged_kv_indices")
    if indptr is None or indices is None:
        raise ValueError("give paged_kv_indptr and paged_kv_indices, or block_tables and seq_lens")
    lengths = ours.get("seq_lens")
    last = None if lengths is not None else theirs.get("paged_kv_last_page_len")
    paged = PagedCache.from_indptr(
        k,
        v,
        indptr,
        indices[: int(indptr[-1])],
        seq_lens=lengths,
        last_page_len=last,
        layout=layout,
    )
    return {"block_table": paged.block_table, "seq_lens": paged.seq_lens}


def _scores(q: Tensor, k: Tensor, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "logits_soft_cap": soft_cap("logits_soft_cap", theirs.get("logits_soft_cap")),
        **cache_scales(k, theirs.get("k_scale"), theirs.get("v_scale")),
        **_positions(q, ours, theirs),
    }
    scale = theirs.get("sm_scale")
    factors = [theirs.get("q_scale")]
    if k.dtype not in QUANTISED_DTYPES:
        factors.append(theirs.get("k_scale"))
        if theirs.get("v_scale") not in (None, 1, 1.0):
            raise UnsupportedError(
                f"v_scale {theirs['v_scale']} of a cache of {k.dtype}: multiply out by it"
            )
    given = [float(factor) for factor in factors if factor is not None]
    if given:
        scale = math.prod(given, start=q.shape[-1] ** -0.5 if scale is None else float(scale))
    return found | {"sm_scale": scale}


def _positions(q: Tensor, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    mode = theirs.get("pos_encoding_mode") or "NONE"
    if mode == "NONE":
        return {}
    if mode == "ROPE_LLAMA":
        raise UnsupportedError("pos_encoding_mode ROPE_LLAMA: rotate q and k before")
    if mode != "ALIBI":
        raise ValueError(f"pos_encoding_mode must be NONE, ALIBI or ROPE_LLAMA, got {mode!r}")
    if soft_cap("logits_soft_cap", theirs.get("logits_soft_cap")) is not None:
        raise UnsupportedError(
            "pos_encoding_mode ALIBI with logits_soft_cap: theirs caps after the bias, ours before"
        )
    if ours.get("return_lse"):
        raise UnsupportedError(
            "pos_encoding_mode ALIBI with return_lse: their bias counts from position 0, so that "
            "their lse is ours plus slope * (query's position)"
        )
    return {"alibi_slopes": alibi_slopes_of(q.shape[-2], q.device)}


def _splits(page_size: int, theirs: dict[str, Any]) -> dict[str, Any]:
    pages = theirs.get("fixed_split_size")
    fixed = None if pages in (None, -1) else int(pages) * page_size
    if theirs.get("disable_split_kv"):
        if fixed is not None:
            raise ValueError(f"disable_split_kv contradicts fixed_split_size {pages}")
        return {"num_splits": 1}
    return {} if fixed is None else {"split_size": fixed}
