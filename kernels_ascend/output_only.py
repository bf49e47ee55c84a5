"""Calls of the operators that report no LSE: the only file that spells their keywords.

What they return is the output of a whole history and never a state. Every call passes scale and
head counts. A row of length 0 is not written by some of them and differs between the others, so
that callers fill it in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.fused_infer import Heads, Pages, compressed_mask
from splitkv.kernels_ascend.runtime import operators


def incremental(
    q: Tensor,
    heads: Heads,
    kv_lens: Sequence[int],
    *,
    layout: str,
    pages: Pages | None = None,
    kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """npu_incre_flash_attention: q [B, H, D], keys in ``pages`` or in ``kv`` [B, T, K, D] ([B, K,
    T, D] for BNSD). Its ``actual_seq_lengths`` are those of the keys.
    """
    k, v = (pages.k, pages.v) if pages is not None else kv or (None, None)
    out: Tensor = operators().npu_incre_flash_attention(
        q[:, None] if layout == "BSND" else q[:, :, None],
        k,
        v,
        actual_seq_lengths=list(kv_lens),
        num_heads=heads.num_q_heads,
        num_key_value_heads=heads.num_kv_heads,
        scale_value=heads.scale,
        input_layout=layout,
        inner_precise=0,
        **({} if pages is None else pages.keywords()),
    )
    return out.flatten(1, 2)


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, heads: Heads, kv_lens: Sequence[int]
) -> Tensor:
    """_npu_paged_attention: q [B, H, D], pages k [blocks, P, K, D] and v [blocks, P, K, Dv], table
    int32 [B, blocks]. The lengths are a host tensor; a row of length 0 is left as it was, so that
    it is zeroed first.
    """
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    operators()._npu_paged_attention(
        q,
        k,
        v,
        heads.num_kv_heads,
        heads.num_q_heads,
        heads.scale,
        table,
        torch.tensor(kv_lens, dtype=torch.int32),
        out,
    )
    return out


def prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    kv_lens: Sequence[int] | None,
    *,
    layout: str,
    causal: bool,
) -> Tensor:
    """npu_prompt_flash_attention: q [B, S, H, D] and k, v [B, T, K, D] for BSND ([B, H, S, D] and
    [B, K, T, D] for BNSD); out like q. Its next_tokens is 0 unless given. kv_lens: None where every
    request fills its cache; then what 310P has no argument for is left out: length lists and, as
    heads are as many, num_key_value_heads.
    """
    batch, queries = q.shape[0], q.shape[1 if layout == "BSND" else 2]
    sizes: dict[str, Any] = {}
    if kv_lens is not None:
        sizes = {
            "actual_seq_lengths": [queries] * batch,
            "actual_seq_lengths_kv": list(kv_lens),
            "num_key_value_heads": heads.num_kv_heads,
        }
    masking: dict[str, Any] = {"sparse_mode": 0, "next_tokens": 2147483647}
    if causal:
        masking = {"sparse_mode": 3, "atten_mask": compressed_mask(q.device)}
    out: Tensor = operators().npu_prompt_flash_attention(
        q,
        k,
        v,
        num_heads=heads.num_q_heads,
        scale_value=heads.scale,
        input_layout=layout,
        **sizes,
        **masking,
    )
    return out
