"""From torch_npu's fused-infer calls to ours; every argument with its source is in
argument_names.yaml.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splitkv.common.support import UnsupportedError
from splitkv.integrations.argument_names import must_be, screened

V1 = "torch_npu.npu_fused_infer_attention_score"
V2 = "torch_npu.npu_fused_infer_attention_score_v2"

_AS_V1 = {
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
}
_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")


def from_fused_infer(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``npu_fused_infer_attention_score``.

    query: [B, S, H * D] (BSH), [B, S, H, D] (BSND), [B, H, S, D] (BNSD, BNSD_BSND) or [T, H, D]
    (TND); key, value: the same forms, or with block_table [blocks, P, K * D] or [blocks, K, P, D].
    Lengths are host integers. Views of all tensors but ``atten_mask``.

    Raises:
        ValueError: malformed, as an argument that it does not have.
        UnsupportedError: an argument without a counterpart here, with the reason.
    """
    return _converted(*screened(V1, given))


def from_fused_infer_v2(**given: Any) -> dict[str, Any]:
    """Keywords of ``decode_attention`` for ``npu_fused_infer_attention_score_v2``; tensors as for
    the first version.

    Raises:
        ValueError, UnsupportedError: as ``from_fused_infer``.
    """
    ours, theirs = screened(V2, given)
    return _converted(ours, {_AS_V1.get(name, name): value for name, value in theirs.items()})


def _converted(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    layout = theirs.get("input_layout") or "BSH"
    if layout not in _LAYOUTS:
        raise UnsupportedError(f"input_layout {layout!r}: known here are {', '.join(_LAYOUTS)}")
    heads = theirs.get("num_heads", 1)
    kv_heads = theirs.get("num_key_value_heads", 0) or heads
    q = _queries(theirs["query"], layout, heads)
    found = ours | {"q": q, "sm_scale": float(theirs.get("scale", 1.0))}
    counts = _list(theirs.get("actual_seq_lengths"))
    if layout == "TND":
        if counts is None:
            raise ValueError("input_layout TND needs the running sums of the query counts")
        found["cu_seqlens_q"] = _offsets("actual_seq_lengths", counts, q.shape[0])
        steps = max((high - low for low, high in pairwise([0, *counts])), default=1)
    else:
        steps = q.shape[1]
        if steps > 1 and counts is not None and set(counts) - {steps}:
            raise UnsupportedError(
                f"queries of {sorted(set(counts))} in rows of {steps}: every row of q is a query "
                "here; pack them (TND)"
            )
    found |= _keys(theirs, ours.get("block_table"), layout, q, kv_heads)
    return found | _masking(theirs, found, layout, steps)


def _queries(query: Tensor, layout: str, heads: int) -> Tensor:
    if layout == "BSH":
        if query.shape[-1] % heads:
            raise ValueError(f"query {list(query.shape)} does not hold num_heads = {heads} heads")
        q: Tensor = query.unflatten(2, (heads, -1))
        return q
    q = query.transpose(1, 2) if layout.startswith("BNSD") else query
    must_be("num_heads", heads, q.shape[-2])
    return q


def _keys(
    theirs: dict[str, Any], table: Tensor | None, layout: str, q: Tensor, kv_heads: int
) -> dict[str, Any]:
    key, value = theirs["key"], theirs["value"]
    lengths = _list(theirs.get("actual_seq_lengths_kv"))
    if table is not None:
        if lengths is None:
            raise ValueError("block_table needs the key lengths")
        if key.ndim == 5:
            raise UnsupportedError(
                "a cache of five dimensions (NZ): its rows are cut into groups of 16; keep it as "
                "[blocks, P, K * D] or [blocks, K, P, D]"
            )
        kind = "NHD" if key.ndim == 3 else "HND"
        if kind == "NHD":
            key, value = (x.unflatten(2, (kv_heads, -1)) for x in (key, value))
        must_be("num_key_value_heads", kv_heads, key.shape[2 if kind == "NHD" else 1])
        must_be("block_size", theirs.get("block_size"), key.shape[1 if kind == "NHD" else 2])
        placed = {"layout": kind, "seq_lens": _lengths(lengths, len(table))}
        return {"k": key, "v": value, **placed}
    if layout == "TND":
        if lengths is None:
            raise ValueError("input_layout TND needs the running sums of the key lengths")
        offsets = _offsets("actual_seq_lengths_kv", lengths, key.shape[0])
        return {"k": key, "v": value, "cu_seqlens_k": offsets}
    kind = "BNSD" if layout.startswith("BNSD") else "BSND"
    if layout == "BSH":
        key, value = (x.unflatten(2, (kv_heads, -1)) for x in (key, value))
    must_be("num_key_value_heads", kv_heads, key.shape[1 if kind == "BNSD" else 2])
    capacity = key.shape[2 if kind == "BNSD" else 1]
    lens = _lengths([capacity] if lengths is None else lengths, q.shape[0])
    return {"k": key, "v": value, "layout": kind, "seq_lens": lens}


def _masking(
    theirs: dict[str, Any], found: dict[str, Any], layout: str, steps: int
) -> dict[str, Any]:
    mode, mask = theirs.get("sparse_mode", 0), theirs.get("atten_mask")
    if mode in (0, 1):
        if mode == 1 and mask is None:
            raise ValueError("sparse_mode 1 needs atten_mask")
        hidden = {} if mask is None else {"attn_mask": _visible(mask, found, layout, steps)}
        return {"causal": False, **hidden}
    if mode == 3:
        return {"causal": True}
    if mode == 4:
        return {"causal": True, "sliding_window": _window(theirs, layout, steps)}
    if mode == 2:
        lens = found.get("seq_lens")
        if lens is not None and "cu_seqlens_q" not in found and bool((lens == steps).all()):
            return {"causal": True}
        raise UnsupportedError(
            "sparse_mode 2: its causal mask is aligned to the top left, ours to the bottom right "
            "(mode 3)"
        )
    raise UnsupportedError(f"sparse_mode {mode}: known here are 0, 1, 2, 3 and 4")


def _window(theirs: dict[str, Any], layout: str, steps: int) -> int | None:
    before, after = (theirs.get(name, 2**31 - 1) for name in ("pre_tokens", "next_tokens"))
    if layout != "TND" and steps == 1:
        raise UnsupportedError(
            f"sparse_mode 4 in layout {layout} with one query: the operator ignores the window "
            "there on 910B and heeds it on others; say sliding_window, or use TND"
        )
    if after != 0:
        raise UnsupportedError(f"next_tokens {after}: queries see no later key here (0)")
    if before < 0:
        raise UnsupportedError(f"pre_tokens {before}: a window ends at the query's own position")
    return None if before >= 2**31 - 1 else before + 1


def _visible(mask: Tensor, found: dict[str, Any], layout: str, steps: int) -> Tensor:
    """bool [B, S, n], True shows, over the last n positions, from ``atten_mask``, True hides, over
    the first ones: [S, T], [1 or B, S, T], [1 or B, 1, S, T], or [B, T] where S is 1.
    """
    lens = found.get("seq_lens")
    if layout == "TND" or lens is None:
        raise UnsupportedError("atten_mask in layout TND: no such mask is documented for it")
    batch, longest = len(lens), int(lens.max()) if len(lens) else 0
    if steps == 1 and mask.ndim == 2 and mask.shape[0] == batch:
        rows = mask[:, None]
    else:
        rows = mask.reshape(-1, *mask.shape[-2:])
    if rows.shape[0] not in (1, batch) or rows.shape[1] != steps or rows.shape[2] < longest:
        raise ValueError(
            f"atten_mask {list(mask.shape)} does not cover {batch} requests, {steps} queries and "
            f"{longest} keys"
        )
    column = torch.arange(longest, device=mask.device)
    last = (lens.to(mask.device, torch.int64)[:, None] - longest + column).clamp(min=0)
    last = last[:, None].expand(batch, steps, longest)
    return rows.to(torch.bool).expand(batch, -1, -1).gather(2, last).logical_not()


def _list(lengths: Any) -> list[int] | None:
    if lengths is None:
        return None
    return [
        int(length) for length in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)
    ]


def _offsets(name: str, sums: Sequence[int], total: int) -> Tensor:
    if any(high < low for low, high in pairwise([0, *sums])) or (sums[-1] if sums else 0) != total:
        raise ValueError(
            f"{name} in layout TND are running sums without a leading 0, up to {total}; got "
            f"{list(sums)}"
        )
    return torch.tensor([0, *sums], dtype=torch.int32)


def _lengths(lengths: Sequence[int], batch: int) -> Tensor:
    if len(lengths) == 1:
        lengths = [*lengths] * batch
    if len(lengths) < batch:
        raise ValueError(f"key lengths for {batch} requests needed, got {len(lengths)}")
    return torch.tensor(lengths[:batch], dtype=torch.int32)
