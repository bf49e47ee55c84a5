"""The split kernel's tile: a function of the spec alone, so that bits do not depend on batches."""

from dataclasses import dataclass

import torch

from splitkv.common.spec import QUANTISED_DTYPES, DecodeSpec


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of S * G query rows, 16 or more, as ``tl.dot`` needs; tokens: keys of one step; parts:
    of those tokens, with a softmax each.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    parts: int = 1


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


def padded(head_dim: int) -> int:
    """What a head dim is padded to in registers; memory past ``head_dim`` is never touched."""
    return max(power_of_two(head_dim), 16)


def rows_differ(spec: DecodeSpec, rows: int) -> bool:
    """Whether a token may be seen by one row of a tile and not by another: by heads of one query,
    where a bias says so; else by different queries, of which a tile of few rows may hold one.
    """
    masked = spec.causal or spec.sliding_window is not None or spec.attn_mask
    return spec.attn_bias or (spec.num_queries > 1 and masked and spec.group % rows > 0)


def tile_for(spec: DecodeSpec) -> Tile:
    """The tile of ``spec``, one that ``benchmarks.aot`` saw compile without spilled registers."""
    rows = max(power_of_two(spec.num_queries * spec.group), 16)
    widest = max(padded(spec.head_dim), padded(spec.head_dim_v))
    masked = spec.attn_mask or spec.attn_bias
    differ = rows_differ(spec, rows)
    warps = 8 if differ or masked else 4  # masks of every pair take registers
    if spec.dtype == torch.float32:
        return Tile(16, tokens=16, num_warps=warps, num_stages=1 if differ else 2)
    if rows == 16 and widest <= 128 and not differ:
        if spec.cache_dtype in QUANTISED_DTYPES:  # as many bytes on their way
            return Tile(16, tokens=128, num_warps=4, num_stages=3, parts=4)
        return Tile(16, tokens=64, num_warps=4, num_stages=4, parts=4)
    if widest > 128 and masked:
        return Tile(16, tokens=16, num_warps=warps, num_stages=2)
    if rows == 16:
        tokens = 64 if widest <= 128 and not masked else 32
        return Tile(16, tokens, num_warps=warps, num_stages=3 if widest <= 128 else 2)
    return Tile(
        min(rows, 64 if widest <= 64 and not differ else 32),
        tokens=32 if widest <= 128 else 16,
        num_warps=warps,
        num_stages=2,
    )
