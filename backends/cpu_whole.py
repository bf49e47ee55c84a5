"""Tokens that every query sees, with plain scores: torch's own fused kernel, on pieces of KV.

The kernel reads K and V once for all rows of a head, in one parallel region. Its rows are the query
heads of a group (and the queries), its batch the pieces: both make it fast where
scaled_dot_product_attention, with one row per head and no pieces, is not.
"""

import torch
from torch import Tensor

from splitkv.backends.cpu_sums import Sums


def attend_whole(q: Tensor, key: Tensor, value: Tensor, scale: float) -> Sums:
    """The sums of pieces [pieces, 1, K, R] of one strand, or [1, g, K, R] of several strands.

    q: [g, K, R, D]; key, value: [pieces, K, tokens, D] if g is 1, else [g, K, tokens, D].
    """
    axis = 1 if len(q) == 1 else 0
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.expand(len(key), -1, -1, -1), key, value, scale=scale
    )
    lse = lse.unsqueeze(axis)
    # the kernel's lse stands for the largest score, with sum 1
    return Sums(lse, torch.ones_like(lse), out.unsqueeze(axis))
