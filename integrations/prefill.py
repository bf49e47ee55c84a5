"""Queries with nothing to split, through torch's own attention: the same meaning, another way."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from splitkv.integrations.masks import Visible, band


def prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    bias: Tensor | None,
    sm_scale: float,
) -> Tensor:
    """Attention without soft cap and sinks.

    query: [B, H, S, D]; key: [B, K, T, D]; value: [B, K, T, Dv]; bias: [B or 1, H or 1, S, T],
    added to the scaled scores. A row that sees nothing is 0, and a key that no query of its
    request sees changes nothing, whatever it holds.

    Returns:
        [B, S, H, Dv] in the query's dtype.
    """
    seen = slice(visible.start, visible.stop)
    key, value = key[:, :, seen].to(query.dtype), value[:, :, seen].to(query.dtype)
    queries, keys = query.shape[2], key.shape[2]
    if keys == 0:
        return query.new_zeros(query.shape[0], queries, query.shape[1], value.shape[-1])
    causal = visible.causal and bias is None and queries == keys
    mask = None
    if visible.mask is not None:
        mask = visible.mask[:, None]
        never = ~mask.any(dim=2)[..., None]
        key, value = key.masked_fill(never, 0), value.masked_fill(never, 0)
    elif visible.causal and not causal:
        mask = band(queries, keys, None, query.device)
    if bias is not None:
        bias = bias[..., seen].to(query.dtype)
        mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    group = query.shape[1] // key.shape[1]
    if mask is not None and group > 1:  # torch's fused kernels take a mask or grouped heads
        key, value = (kv.repeat_interleave(group, dim=1) for kv in (key, value))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal,
        scale=sm_scale,
        enable_gqa=mask is None and group > 1,
    )
    return out.transpose(1, 2).contiguous()
