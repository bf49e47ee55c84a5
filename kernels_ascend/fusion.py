"""Calls of npu_fusion_attention, the training operator: the only file that spells its keywords.

It reads no pages, and reports max and sum in place of an LSE, each eight times over. In layout TND
these lie by head unless ``softmax_layout`` says otherwise. Every call passes the scale, whose
default is 1.0.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from splitkv.kernels_ascend.fused_infer import Heads, compressed_mask
from splitkv.kernels_ascend.runtime import operators


def packed_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: Heads,
    counts: Sequence[int],
    kv_lens: Sequence[int],
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Row r has counts[r] queries of q [sum of counts, H, D] and the next kv_lens[r] keys of k
    [sum of kv_lens, K, D] and v; no row is empty. causal: bottom-right aligned in each row.

    Returns:
        Out [sum of counts, H, Dv] in q's dtype, lse float32 [sum of counts, H].
    """
    masking: dict[str, Any] = {}
    if causal:
        masking = {"sparse_mode": 3, "atten_mask": compressed_mask(q.device)}
    out, top, total, *_ = operators().npu_fusion_attention(
        q,
        k,
        v,
        heads.num_q_heads,
        "TND",
        scale=heads.scale,
        actual_seq_qlen=list(accumulate(counts)),
        actual_seq_kvlen=list(accumulate(kv_lens)),
        softmax_layout="TND",
        **masking,
    )
    return out, top[..., 0] + total[..., 0].log()
