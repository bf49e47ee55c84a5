"""From flash-attention's decode calls, and torch's that follow them, to ours; every argument with
its source is in argument_names.yaml.
"""

from typing import Any

import torch
from torch import Tensor

from splitkv.common.support import UnsupportedError
from splitkv.integrations.argument_names import screened, soft_cap

KVCACHE = "flash_attn.flash_attn_with_kvcache"
VARLEN = "flash_attn.flash_attn_varlen_func"
TORCH = "torch.nn.attention.varlen.varlen_attn"


def from_flash_attn_with_kvcache(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``flash_attn_with_kvcache`` (versions 2 and 3).

    q: [B, S, H, D], or [T, H, D] with cu_seqlens_q. k_cache, v_cache: [rows, T, K, D], or with
    block_table (page_table) [pages, P, K, D]. Copies nothing of the cache.

    Raises:
        ValueError: malformed, as an argument that they do not have.
        UnsupportedError: an argument without a counterpart here, with the reason.
    """
    ours, theirs = screened(KVCACHE, given)
    q, k = ours["q"], theirs["k_cache"]
    packed = ours.get("cu_seqlens_q") is not None
    if q.ndim != (3 if packed else 4) or k.ndim != 4:
        raise ValueError(
            "q must be [B, S, H, D] ([T, H, D] with cu_seqlens_q) and k_cache have 4 dimensions, "
            f"got {list(q.shape)} and {list(k.shape)}"
        )
    batch = len(ours["cu_seqlens_q"]) - 1 if packed else q.shape[0]
    found = ours | {"k": k, "v": theirs["v_cache"]} | _rows(k, batch, theirs)
    found |= _masking(theirs, None if packed else q.shape[1], found)
    splits = theirs.get("num_splits")
    return found | {"num_splits": splits or None}


def from_flash_attn_varlen(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``flash_attn_varlen_func`` (versions 2 and 3).

    q: [T, H, D]; k, v: [tokens, K, D], or with block_table [pages, P, K, D].

    Raises:
        ValueError, UnsupportedError: as ``from_flash_attn_with_kvcache``.
    """
    ours, theirs = screened(VARLEN, given)
    found = ours | _packed_keys(theirs, "cu_seqlens_k")
    found |= _masking(theirs, None, found)
    splits = theirs.get("num_splits")
    return found | {"num_splits": splits or None}


def from_torch_varlen(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``torch.nn.attention.varlen.varlen_attn``.

    query: [T, H, D]; key, value: [tokens, K, D], or with block_table [pages, P, K, D].

    Raises:
        ValueError, UnsupportedError: as ``from_flash_attn_with_kvcache``.
    """
    ours, theirs = screened(TORCH, given)
    heads, kv_heads = ours["q"].shape[1], ours["k"].shape[-2]
    if heads != kv_heads and not theirs.get("enable_gqa"):
        raise ValueError(f"{heads} query and {kv_heads} kv heads need enable_gqa=True")
    found = ours | _packed_keys(theirs, "cu_seq_k")
    found |= _masking(theirs, None, found)
    aux = theirs.get("return_aux")
    return found | {"return_lse": aux is not None and bool(aux.lse)}


def _rows(k: Tensor, batch: int, theirs: dict[str, Any]) -> dict[str, Any]:
    table, rows = theirs.get("block_table"), theirs.get("cache_batch_idx")
    if table is not None and rows is not None:
        raise ValueError("cache_batch_idx says rows of a cache without block_table, got both")
    if rows is not None:
        table = rows[:, None]  # a row of T tokens is a page of T tokens
    lengths = theirs.get("cache_seqlens")
    if lengths is None or isinstance(lengths, int):
        capacity = k.shape[1] * (1 if table is None else table.shape[1])
        known = capacity if lengths is None else lengths
        lengths = torch.full((batch,), known, dtype=torch.int32)
    if table is not None:
        return {"layout": "NHD", "block_table": table, "seq_lens": lengths}
    return {"layout": "BSND", "seq_lens": lengths}


def _packed_keys(theirs: dict[str, Any], offsets_name: str) -> dict[str, Any]:
    offsets, used, table = (theirs.get(name) for name in (offsets_name, "seqused_k", "block_table"))
    if table is None:
        if offsets is None:
            raise ValueError(f"keys without block_table need {offsets_name}")
        if used is not None:
            raise UnsupportedError(
                "seqused_k without block_table: every packed row belongs to its request's history "
                "here; pack the used rows, or use pages"
            )
        return {"cu_seqlens_k": offsets}
    if used is None:
        if offsets is None:
            raise ValueError(f"block_table needs seqused_k or {offsets_name}")
        used = offsets.diff()
    return {"layout": "NHD", "block_table": table, "seq_lens": used}


def _masking(theirs: dict[str, Any], steps: int | None, found: dict[str, Any]) -> dict[str, Any]:
    """``steps``: S where all requests have as many queries, None where it is not known."""
    left, right = theirs.get("window_size") or (-1, -1)
    if left < -1 or right < -1:
        raise ValueError(f"window_size must be -1 (unlimited) or more, got {(left, right)}")
    causal = bool(theirs.get("causal", False)) or right == 0
    if right > 0 and not causal and steps != 1:
        raise UnsupportedError(
            f"window_size right {right}: queries see no later key here, or all of them (-1)"
        )
    slopes = theirs.get("alibi_slopes")
    if slopes is not None and not causal and steps != 1:
        raise UnsupportedError(
            "alibi_slopes where later keys are visible: theirs falls off to both sides, ours is "
            "slope * (j - i); attn_bias says theirs"
        )
    if slopes is not None and found.get("return_lse"):
        raise UnsupportedError(
            "alibi_slopes with the lse: their kernel leaves slope * (query's position) out where "
            "causal, so that their lse is not ours"
        )
    return {
        "causal": causal,
        "window_left": left,
        "logits_soft_cap": soft_cap("softcap", theirs.get("softcap")),
        "alibi_slopes": slopes,
    }
