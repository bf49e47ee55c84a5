"""The split kernel's tile: a function of the spec alone, so that bits do not depend on batches."""

from dataclasses import dataclass

import torch

from splitkv.common.spec import INT4, QUANTISED_DTYPES, DecodeSpec


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
    quantised = spec.cache_dtype in QUANTISED_DTYPES
    if spec.cache_dtype == INT4:  # products of each group, and values of a tile, take registers
        narrow = spec.dtype == torch.float32 or (widest > 128 and masked)
        tokens = 16 if narrow else 64 if widest <= 64 else 32
        warps = 8 if widest > 128 else warps
        grouped = not spec.head_dim % 32 and not narrow  # groups of 16 would be too many at once
        if rows == 16 and widest <= 128 and not differ and grouped:
            return Tile(16, tokens=64, num_warps=4, num_stages=4, parts=4)
        return Tile(16, tokens, num_warps=warps, num_stages=2 if tokens == 16 else 4)
    if spec.dtype == torch.float32:
        return Tile(16, tokens=16, num_warps=warps, num_stages=1 if differ else 2)
    if rows == 16 and widest <= 128 and not differ:
        if quantised:  # as many bytes on their way
            return Tile(16, tokens=128, num_warps=4, num_stages=3, parts=4)
        return Tile(16, tokens=64, num_warps=4, num_stages=3, parts=4)
    if widest > 128 and masked:
        return Tile(16, tokens=16, num_warps=warps, num_stages=2)
    if rows == 16:
        tokens = 64 if widest <= 128 and not masked else 32
        return Tile(16, tokens, num_warps=warps, num_stages=3)
    if rows >= 64 and widest == 128 and not (differ or masked or quantised):
        # as on a shared prefix; 64 rows of four warps are what Hopper's warpgroup products take
        return Tile(64, tokens=64, num_warps=4, num_stages=3)
    return Tile(
        min(rows, 64 if widest <= 64 and not differ else 32),
        tokens=32 if widest <= 128 else 16,
        num_warps=warps,
        num_stages=2,
    )
