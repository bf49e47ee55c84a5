"""The fused-infer operators' arithmetic, densely and in float32, row by row of the batch, with
their ways of saying "nothing".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.standin.checks import batch_size, check, head_dims
from splitkv.kernels_ascend.standin.fused_call import (
    PADDED_LAYOUTS,
    FusedCall,
    from_incre,
    from_prompt,
    from_v1,
    from_v2,
)

NOTHING = math.inf
"""LSE of a row that attended to nothing: the kernels' literal 3e+99 becomes +inf in float32."""
NOTHING_LEGACY = -3.4e38
HIDDEN_SCORE = -1e12
"""What an explicit mask puts in place of a score."""
UNDER_RANKED_MASK_REACH = 512


@dataclass(frozen=True, slots=True)
class _Row:
    """One request: queries [S, N, D], keys [L, K, D], values [L, K, Dv]."""

    query: Tensor
    key: Tensor
    value: Tensor


def fused_infer_v1(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score."""
    return _fused_infer(from_v1(given))


def fused_infer_v2(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """npu_fused_infer_attention_score_v2."""
    return _fused_infer(from_v2(given))


def incre(given: Mapping[str, Any]) -> Tensor:
    """npu_incre_flash_attention: one query per request, no LSE."""
    call = from_incre(given)
    if call.layout not in ("BSH", "BSND", "BNSD"):
        call.refuse(f"input_layout {call.layout!r} is not BSH, BSND or BNSD")
    if call.padded_query().shape[1] != 1:
        call.refuse(f"takes one query per request, got {call.padded_query().shape[1]}")
    return _fused_infer(call)[0]


def prompt(given: Mapping[str, Any]) -> Tensor:
    """npu_prompt_flash_attention: many queries over dense keys, no LSE."""
    call = from_prompt(given)
    if call.layout not in PADDED_LAYOUTS:
        call.refuse(f"input_layout {call.layout!r} is not one of {tuple(PADDED_LAYOUTS)}")
    return _fused_infer(call)[0]


def _fused_infer(call: FusedCall) -> tuple[Tensor, Tensor]:
    check(call)
    call = _with_rope(call)
    query = call.packed_query() if call.packed else call.padded_query()
    v_dim = head_dims(call)[2] if call.key.numel() else query.shape[-1]
    out = query.new_zeros((*query.shape[:-1], v_dim))
    lse = torch.full(query.shape[:-1], NOTHING, dtype=torch.float32)
    if call.key.numel():  # quirk: empty-kv
        for index in range(batch_size(call)):
            row = _row(call, query, index)
            where = _where(call, index, row.query.shape[0])
            out_row, lse[where] = _attend(call, row, index)
            out[where] = out_row.to(query.dtype)  # quirk: output-is-rounded
    return _shape_out(call, out), _shape_lse(call, lse)


def _with_rope(call: FusedCall) -> FusedCall:
    """The rope parts behind q and k: the scores are the sum of both products."""
    if call.query_rope is None or call.key_rope is None:
        return call
    query = torch.cat([call.query, call.query_rope], -1)
    key = call.key
    if call.paged and key.dim() == 3:
        key = key.unflatten(-1, (call.num_kv_heads, -1))
        rope = call.key_rope.unflatten(-1, (call.num_kv_heads, -1))
        key = torch.cat([key, rope], -1).flatten(2)
    else:
        key = torch.cat([key, call.key_rope], -1)
    return replace(call, query=query, key=key)


def _where(call: FusedCall, index: int, queries: int) -> tuple[Any, ...]:
    if not call.packed:
        return (index, slice(0, queries))
    assert call.query_lens is not None
    end = call.query_lens[index]
    return (slice(end - queries, end),)


def _shape_out(call: FusedCall, out: Tensor) -> Tensor:
    match call.output_layout:
        case "BSH":
            return out.flatten(2).contiguous()
        case "BNSD":
            return out.transpose(1, 2).contiguous()
        case "NTD":
            return out.transpose(0, 1).contiguous()
    return out.contiguous()


def _shape_lse(call: FusedCall, lse: Tensor) -> Tensor:
    if not call.returns_lse:
        return lse.new_empty(0)  # quirk: lse-flag-off
    # quirk: lse-shape
    return (lse if call.packed else lse.transpose(1, 2)).contiguous()[..., None]


def _row(call: FusedCall, query: Tensor, index: int) -> _Row:
    if call.packed:
        assert call.query_lens is not None
        start = call.query_lens[index - 1] if index else 0
        queries = query[start : call.query_lens[index]]
    else:
        queries = query[index, : _padded_queries(call, index, query.shape[1])]
    if call.paged:
        return _Row(
            queries, _from_pages(call, call.key, index), _from_pages(call, call.value, index)
        )
    return _Row(queries, _from_dense(call, call.key, index), _from_dense(call, call.value, index))


def _one_for_all(lengths: list[int], index: int) -> int:
    return lengths[0] if len(lengths) == 1 else lengths[index]


def _padded_queries(call: FusedCall, index: int, queries: int) -> int:
    if queries == 1 or call.query_lens is None:  # quirk: legacy-drops-query-lengths
        return queries
    return _one_for_all(call.query_lens, index)


def _from_pages(call: FusedCall, cache: Tensor, index: int) -> Tensor:
    assert call.block_table is not None
    assert call.kv_lens is not None
    length = _one_for_all(call.kv_lens, index)
    pages = -(-length // call.block_size)
    # quirk: block-table-unchecked (an id outside the pool raises here, a device reads astray)
    blocks = cache[call.block_table[index, :pages].long()]
    if cache.dim() == 4:
        blocks = blocks.transpose(1, 2)
    else:
        blocks = blocks.view(
            *blocks.shape[:2], call.num_kv_heads, cache.shape[-1] // call.num_kv_heads
        )
    return blocks.flatten(0, 1)[:length]


def _from_dense(call: FusedCall, tensor: Tensor, index: int) -> Tensor:
    if call.packed:
        assert call.kv_lens is not None
        tokens = tensor if call.layout == "TND" else tensor.transpose(0, 1)
        start = call.kv_lens[index - 1] if index else 0
        return tokens[start : call.kv_lens[index]]
    row = tensor[index]
    if call.layout == "BSH":
        row = row.view(row.shape[0], call.num_kv_heads, -1)
    elif call.layout != "BSND":
        row = row.transpose(0, 1)
    return row if call.kv_lens is None else row[: _one_for_all(call.kv_lens, index)]


def _attend(call: FusedCall, row: _Row, index: int) -> tuple[Tensor, Tensor]:
    """Out float32 [S, N, Dv] and LSE float32 [S, N] of one request."""
    queries, heads, _ = row.query.shape
    keys, kv_heads, v_dim = row.value.shape
    nothing = NOTHING_LEGACY if call.legacy else NOTHING  # quirk: empty-row, empty-row-legacy
    if not keys:
        return torch.zeros(queries, heads, v_dim), torch.full((queries, heads), nothing)
    group = heads // kv_heads
    grouped = row.query.float().view(queries, kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    scores = grouped @ row.key.float().permute(1, 2, 0) * call.scale  # quirk: scale-default
    scores = scores.view(heads, queries, keys)
    scores = _hide(call, scores, index)
    top = scores.amax(-1)
    unseen = top == -math.inf
    weights = torch.exp(scores - torch.where(unseen, 0.0, top)[..., None])
    total = torch.where(unseen, 1.0, weights.sum(-1))
    lse = top + torch.log(total)
    weights = weights / total[..., None]
    # quirk: hidden-nan-leaks (weight 0 times NaN)
    out = weights.view(kv_heads, group * queries, keys) @ row.value.float().transpose(0, 1)
    out = out.view(heads, queries, v_dim).transpose(0, 1)
    lse, unseen = lse.T, unseen.T
    if call.sink is not None:
        out, lse = _add_sink(call.sink, out, lse)
    out = torch.where(unseen[..., None], 0.0, out)
    return out, torch.where(unseen, NOTHING, lse)  # quirk: invalid-row


def _add_sink(sink: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    with_sink = torch.logaddexp(lse, sink.float())  # quirk: sink-in-lse
    return out * torch.exp(lse - with_sink)[..., None], with_sink


def _hide(call: FusedCall, scores: Tensor, index: int) -> Tensor:
    """Scores [N, S, L] with the mask applied."""
    if call.legacy_window_dropped:  # quirk: legacy-drops-window
        return scores
    if call.sparse_mode in (2, 3, 4):
        return scores.masked_fill(_outside_band(call, *scores.shape[1:]), -math.inf)
    if call.mask is None:
        return scores
    hidden = _full_mask(call, index)[: scores.shape[1], : scores.shape[2]]
    if not call.corrects_full_mask:
        return scores.masked_fill(hidden, HIDDEN_SCORE)  # quirk: full-mask-row
    return scores.masked_fill(hidden, -math.inf)


def _outside_band(call: FusedCall, queries: int, keys: int) -> Tensor:
    offset = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    if call.sparse_mode == 2:
        return offset > 0
    offset = offset - (keys - queries)
    if call.sparse_mode == 3:
        return offset > 0
    return (offset < -call.pre_tokens) | (offset > call.next_tokens)  # quirk: band-inclusive


def _full_mask(call: FusedCall, index: int) -> Tensor:
    """[S, columns], True hides."""
    assert call.mask is not None
    hidden = call.mask.bool()  # quirk: softmax-mask-true-hides
    if hidden.dim() == 2:
        single = call.padded_query().shape[1] == 1
        return hidden[index][None] if single else hidden
    if call.paged and hidden.shape[:3] == (1, 1, 1):  # quirk: mask-under-ranked
        hidden = hidden.clone()
        hidden[..., UNDER_RANKED_MASK_REACH:] = False
    hidden = hidden.reshape(-1, *hidden.shape[-2:])
    return hidden[index if hidden.shape[0] > 1 else 0]
