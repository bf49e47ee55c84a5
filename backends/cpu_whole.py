"""Tokens that every query sees, with plain scores: torch's own fused kernel, on pieces of KV.

The kernel reads K and V once for all rows of a head, in one parallel region. Its rows are the query
heads of a group (and the queries), its batch the pieces: both make it fast where
scaled_dot_product_attention, with one row per head and no pieces, is not.
"""

import torch
from torch import Tensor

from splitkv.backends.cpu_sums import Pile, Sums


def attend_whole(
    q: Tensor, key: Tensor, value: Tensor, scale: float, piece: int, pile: Pile
) -> None:
    """Adds the tokens to ``pile``, in pieces of ``piece`` tokens.

    q: [g, K, R, D]; key, value: [g, K, tokens, D], any strides, short if g is above 1.
    """
    tokens = key.shape[2]
    even = tokens - tokens % piece
    if len(q) > 1 or tokens <= piece:
        pile.add(_flash(q, key, value, scale, 0))
        return
    keys, values = (
        x[0, :, :even].unflatten(1, (-1, piece)).transpose(0, 1) for x in (key, value)
    )  # [pieces, K, piece, D]
    pile.add(_flash(q.expand(len(keys), -1, -1, -1), keys, values, scale, 1))
    if even < tokens:
        pile.add(_flash(q, key[:, :, even:], value[:, :, even:], scale, 0))


def _flash(q: Tensor, key: Tensor, value: Tensor, scale: float, axis: int) -> Sums:
    """Sums with an axis of 1 put in; the kernel's lse stands for the largest score, with sum 1."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, key, value, scale=scale
    )
    lse = lse.unsqueeze(axis)
    return Sums(lse, torch.ones_like(lse), out.unsqueeze(axis))
