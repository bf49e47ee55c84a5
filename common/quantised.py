"""What the codes of a quantised cache mean: x = (code - zero) * scale.

scale and zero are one number for a part of the cache, and the kind says for which:

    TENSOR        [1]
    HEAD          [K]
    REQUEST_HEAD  [B, K]
    TOKEN         the cache's shape without its head dim: NHD [pages, P, K], HND [pages, K, P],
                  BSND [B, T, K], BNSD [B, K, T], packed [tokens, K]
    CHANNEL       [K, D] for k, [K, Dv] for v
    GROUP         TOKEN's shape and groups of g elements of the head dim after it, [.., D / g];
                  g is a power of two from 16 on that divides D, for k and v each their own

zero (None: 0) has its scale's shape, need not be whole, and goes with int8 codes; 8-bit floats are
symmetric. Scale and zero point of a token that no query sees may hold anything, like its slot.
(Kinds as in Z. Liu et al., "KIVI", 2024: channels for keys, tokens for values; affine quantisation
as in B. Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, equation 1.)

int4 codes go with scales of kind GROUP, and these with nothing else. Codes are 0 to 15, two in a
byte of uint8: element 2i of the head dim in the lower half of byte i, element 2i + 1 in the upper;
k is [.., D / 2]. Their zero (None: 8, the middle) is as KIVI's: its offset is -zero * scale. MX
formats, whose elements are floats of 4 to 8 bits with a power of two to 32 of them, are not taken.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.spec import INT4, SMALLEST_GROUP, Layout, ScaleKind

INT4_MIDDLE = 8
"""The zero point of int4 codes that have none of their own."""


def scale_shapes(kind: ScaleKind, part: Tensor, cache: Cache) -> tuple[tuple[int, ...], ...]:
    """Shapes that scales of ``part``, k or v of ``cache``, may have: one, or one for each size of
    a group. Zero points have that of their scale.
    """
    heads, by_token = cache.num_kv_heads, tuple(part.shape[:-1])
    if kind is ScaleKind.GROUP:
        dim = 2 * part.shape[-1]
        return tuple((*by_token, dim // group) for group in group_sizes(dim))
    shape = {
        ScaleKind.TENSOR: (1,),
        ScaleKind.HEAD: (heads,),
        ScaleKind.REQUEST_HEAD: (cache.batch, heads),
        ScaleKind.TOKEN: by_token,
        ScaleKind.CHANNEL: (heads, part.shape[-1]),
    }[kind]
    return (shape,)


def group_sizes(dim: int) -> list[int]:
    """Elements of a head dim that may share a scale: powers of two from 16 on that divide it."""
    largest = dim & -dim
    return [1 << n for n in range(largest.bit_length()) if 1 << n >= SMALLEST_GROUP]


def kinds_of(shape: tuple[int, ...], part: Tensor, cache: Cache) -> list[ScaleKind]:
    """The kinds whose scales of ``part`` have this shape."""
    groups = part.dtype == INT4
    kinds = [kind for kind in ScaleKind if (kind is ScaleKind.GROUP) == groups]
    return [kind for kind in kinds if shape in scale_shapes(kind, part, cache)]


def pack_int4(codes: Tensor) -> Tensor:
    """Codes of 0 to 15, any integers [.., D], as the cache holds them: uint8 [.., D / 2].

    Raises:
        ValueError: D is odd, or a code is no integer of 0 to 15.
    """
    whole = not (codes.dtype.is_floating_point or codes.dtype.is_complex)
    if not whole or codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"int4 codes must be integers with an even last dimension, got {codes.dtype} "
            f"{list(codes.shape)}"
        )
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) <= 15:
        raise ValueError(
            f"int4 codes must be 0 to 15, got {int(codes.min())} to {int(codes.max())}"
        )
    pairs = codes.to(INT4)
    return pairs[..., 0::2] | (pairs[..., 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The codes, uint8 [.., D] of 0 to 15, of ``packed`` [.., D / 2]."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def quantise_int4(
    values: Tensor, group: int, *, zeros: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(packed, scale, zero)`` of ``values`` [.., D], groups of ``group`` elements each by itself.

    zeros: the least value becomes code 0 and the largest 15, else (zero None) zero stays code 8
    and codes are 1 to 15. scale, zero: ``dtype`` [.., D / group]; codes are those of the scales as
    rounded to it. With zeros no value is off by more than half a scale, and what the rounding of
    scale and zero shifts it by; without, by half a scale. A scale is 0 where all values are, else
    no less than ``dtype`` resolves of the group's largest value: a zero point finds room in it.

    Raises:
        ValueError: a group that is no power of two from 16 on which divides D; values that are not
        finite, or so large that their scale is not; a ``dtype`` that is no float.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a float's, got {dtype}")
    if not torch.isfinite(values).all():
        raise ValueError("values must be finite, got NaN or infinity")
    if group not in group_sizes(values.shape[-1]):
        raise ValueError(
            f"group must be one of {group_sizes(values.shape[-1])} for a head dim of "
            f"{values.shape[-1]}, got {group}"
        )
    parts = values.float().unflatten(-1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    largest = torch.maximum(high, -low)
    span = high / 15 - low / 15 if zeros else largest / 7
    limits = torch.finfo(dtype)
    least = (largest * limits.eps).clamp(min=limits.tiny)
    scale = torch.where(largest > 0, torch.maximum(span, least), 0.0).to(dtype)
    if not torch.isfinite(scale).all():
        raise ValueError(
            f"a scale of {float(span.max())} is beyond {dtype}, whose largest is {limits.max}; "
            "use another dtype"
        )
    wide = torch.where(largest > 0, scale.float(), 1.0)
    zero = (-low / wide).to(dtype) if zeros else None
    offset = torch.full_like(wide, INT4_MIDDLE) if zero is None else zero.float()
    codes = (parts / wide[..., None] + offset[..., None]).round().clamp(0, 15)
    return pack_int4(codes.to(INT4).flatten(-2)), scale, zero


def token_major(values: Tensor, cache: Cache) -> Tensor:
    """Values per token and head as a view [outer, inner, K]: outer is a request, a page, or the one
    row of a packed cache.
    """
    if isinstance(cache, PackedCache):
        return values[None]
    return values.transpose(1, 2) if cache.layout in (Layout.HND, Layout.BNSD) else values


def of_tokens(values: Tensor, cache: Cache, seen: npt.NDArray[np.bool_]) -> Tensor:
    """Those [n, K] of ``values`` that belong to the positions ``seen``, bool [B, T]; on their
    device. Reads the block table.
    """
    request, position = np.nonzero(seen)
    if isinstance(cache, PagedCache):
        blocks, inner = position // cache.page_size, position % cache.page_size
        outer = cache.block_table.cpu().numpy()[request, blocks]
    elif isinstance(cache, DenseCache):
        outer, inner = request, position
    else:
        outer = np.zeros_like(request)
        inner = cache.cu_seqlens_k.cpu().numpy()[request] + position
    index = (torch.from_numpy(part.astype(np.int64)).to(values.device) for part in (outer, inner))
    return token_major(values, cache)[tuple(index)]
