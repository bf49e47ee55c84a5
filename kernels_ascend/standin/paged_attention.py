"""_npu_paged_attention (ATB): one token per request over pages [blocks, P, K, D], into a given
output, without an LSE.
"""

from collections.abc import Mapping
from typing import Any

import torch

from splitkv.kernels_ascend.standin.refusal import StandinGapError, refuse

_NAME = "_npu_paged_attention"
MAX_HEAD_DIM, WIDE_HEAD_DIM, WIDE_PAGE = 576, 256, 128


def paged_attention(given: Mapping[str, Any]) -> None:
    """Writes out [B, N, Dv] for every request that has keys."""
    _check(given)
    query, table, out = given["query"], given["block_table"], given["out"]
    pools = given["key_cache"], given["value_cache"]
    group = given["num_heads"] // given["num_kv_heads"]
    page = pools[0].shape[1]
    for row, length in enumerate(given["context_lens"].tolist()):
        if not length:  # quirk: atb-unwritten-row
            continue
        blocks = table[row, : -(-length // page)].long()
        key, value = (
            pool[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for pool in pools
        )
        scores = torch.einsum("nd,tnd->nt", query[row].float(), key) * given["scale_value"]
        out[row] = torch.einsum("nt,tnd->nd", scores.softmax(-1), value).to(out.dtype)


def _check(given: Mapping[str, Any]) -> None:
    if given["workspace"] is not None:
        raise StandinGapError(f"{_NAME}: the stand-in does not model workspace")
    query, lengths, out = given["query"], given["context_lens"], given["out"]
    key, value = given["key_cache"], given["value_cache"]
    for tensor in (key, value):
        if tensor.dtype not in (torch.float16, torch.bfloat16) or tensor.dtype != query.dtype:
            refuse(_NAME, f"cache {tensor.dtype} and query {query.dtype} must share 16 bits")
        if tensor.dim() != 4 or tensor.shape[2] != given["num_kv_heads"]:
            refuse(
                _NAME, f"cache {list(tensor.shape)} is not (blocks, P, {given['num_kv_heads']}, D)"
            )
        if tensor.shape[-1] > MAX_HEAD_DIM or (
            tensor.shape[-1] > WIDE_HEAD_DIM and tensor.shape[1] > WIDE_PAGE
        ):
            refuse(_NAME, "PagedAttentionOperation setup failed!")
    if query.dim() != 3 or query.shape[1:] != (given["num_heads"], key.shape[-1]):
        refuse(_NAME, f"query {list(query.shape)} does not fit the cache {list(key.shape)}")
    if lengths.dtype != torch.int32 or tuple(lengths.shape) != query.shape[:1]:
        refuse(_NAME, f"context_lens must be int32 [{query.shape[0]}], got {lengths.dtype}")
    if given["block_table"].dtype != torch.int32:
        refuse(_NAME, f"block_table must be int32, got {given['block_table'].dtype}")
    if tuple(out.shape) != (*query.shape[:-1], value.shape[-1]) or out.dtype != query.dtype:
        refuse(_NAME, f"out {list(out.shape)} {out.dtype} does not fit")
