"""Additive biases: weights on edges between queries and keys, and T5's relative positions."""

import math

import torch
from torch import Tensor


def edge_bias(weights: Tensor, num_queries: int = 1) -> Tensor:
    """``attn_bias`` that multiplies each key's softmax weight by a factor: the bias is log w.

    weights: float [B, n] or, by query head, [B, H, n]; 0 or more, of the last n positions of each
    request (column c is position seq_len - n + c). 0 hides a key. Returns [B, 1 or H, num_queries,
    n], float32 or wider, a view that repeats itself for every query. The factor belongs to the
    weight: exp(s + log w) = w * exp(s), where a multiplied score would rise or fall with its sign.
    Values are read, so a device is waited for.

    Raises:
        ValueError: not of a floating dtype, neither two nor three dimensions, or a weight that is
            negative, infinite or NaN.
    """
    if not weights.is_floating_point() or weights.ndim not in (2, 3):
        raise ValueError(
            f"weights must be of a floating dtype, [B, n] or [B, H, n], got {weights.dtype} "
            f"{list(weights.shape)}"
        )
    _check_count("num_queries", num_queries, 1)
    bad = ~((weights >= 0) & torch.isfinite(weights))
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise ValueError(
            f"weights{place} is {float(weights[tuple(place)])}, allowed are finite numbers from 0 "
            "on (0 hides the key)"
        )
    bias = weights.to(torch.promote_types(weights.dtype, torch.float32)).log()
    bias = bias[:, None, None] if weights.ndim == 2 else bias[:, :, None]
    return bias.expand(-1, -1, num_queries, -1)


def relative_bias(
    table: Tensor,
    num_keys: int,
    num_queries: int = 1,
    *,
    max_distance: int = 128,
    bidirectional: bool = False,
) -> Tensor:
    """``attn_bias`` of T5: one learned number per head and bucket of the distance j - i.

    table: float [buckets, H] (``relative_attention_bias.weight``). num_keys: n, the longest
    seq_len. Returns [1, H, num_queries, n] of the table's dtype, right for all requests alike: the
    queries of each are its last positions, and the columns end where they do. bidirectional: as
    encoders have it; a decoder's later keys count as distance 0. T5 scales no score: give
    ``sm_scale=1.0``.

    Raises:
        ValueError: no such table, or a number out of its range; the text names both.
    """
    if not table.is_floating_point() or table.ndim != 2:
        raise ValueError(
            f"table must be of a floating dtype, [buckets, H], got {table.dtype} "
            f"{list(table.shape)}"
        )
    _check_count("num_queries", num_queries, 1)
    _check_count("num_keys", num_keys, 0)
    keys = torch.arange(num_keys, device=table.device) - num_keys
    queries = torch.arange(num_queries, device=table.device) - num_queries
    distance = keys - queries[:, None]
    buckets = relative_buckets(distance, len(table), max_distance, bidirectional)
    return table[buckets].permute(2, 0, 1)[None]


def relative_buckets(
    distance: Tensor, num_buckets: int, max_distance: int = 128, bidirectional: bool = False
) -> Tensor:
    """T5's bucket of each distance j - i, int64 in the shape of ``distance``.

    Half of the buckets (of each direction, where there are two) hold one distance each, the others
    grow by a constant factor up to ``max_distance``, beyond which all distances share the last.
    Source: C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", section 2.1; rounding as in ``_relative_position_bucket`` of transformers' T5.

    Raises:
        ValueError: fewer than 2 buckets (bidirectional: 4), or a ``max_distance`` that lies among
            those of one bucket each.
    """
    least = 4 if bidirectional else 2
    _check_count("num_buckets", num_buckets, least)
    one_sided = num_buckets // 2 if bidirectional else num_buckets
    exact = one_sided // 2
    _check_count("max_distance", max_distance, exact + 1)
    steps = distance.abs() if bidirectional else (-distance).clamp(min=0)
    growth = torch.log(steps.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (one_sided - exact)).long()).clamp(max=one_sided - 1)
    bucket = torch.where(steps < exact, steps.long(), far)
    return bucket + (distance > 0) * one_sided if bidirectional else bucket


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of {least} or more, got {value!r}")
