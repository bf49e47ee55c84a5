"""What the codes of a quantised cache mean: x = (code - zero) * scale.

scale and zero are one number for a part of the cache, and the kind says for which:

    TENSOR        [1]
    HEAD          [K]
    REQUEST_HEAD  [B, K]
    TOKEN         the cache's shape without its head dim: NHD [pages, P, K], HND [pages, K, P],
                  BSND [B, T, K], BNSD [B, K, T], packed [tokens, K]
    CHANNEL       [K, D] for k, [K, Dv] for v

zero (None: 0) has its scale's shape, need not be whole, and goes with int8 codes; 8-bit floats are
symmetric. Scale and zero point of a token that no query sees may hold anything, like its slot.
(Kinds as in Z. Liu et al., "KIVI", 2024: channels for keys, tokens for values; affine quantisation
as in B. Jacob et al., "Quantization and Training of Neural Networks for Efficient
Integer-Arithmetic-Only Inference", 2018, equation 1.)

Scales of blocks along the head dim (MX formats: one power of two to 32 elements) are not taken: no
product of a query and a key has one factor then, so each tile would have to be dequantised.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.spec import Layout, ScaleKind


def scale_shape(kind: ScaleKind, part: Tensor, cache: Cache) -> tuple[int, ...]:
    """Shape of the scales, and of the zero points, of ``part``: k or v of ``cache``."""
    heads = cache.num_kv_heads
    return {
        ScaleKind.TENSOR: (1,),
        ScaleKind.HEAD: (heads,),
        ScaleKind.REQUEST_HEAD: (cache.batch, heads),
        ScaleKind.TOKEN: tuple(part.shape[:-1]),
        ScaleKind.CHANNEL: (heads, part.shape[-1]),
    }[kind]


def kinds_of(shape: tuple[int, ...], part: Tensor, cache: Cache) -> list[ScaleKind]:
    """The kinds whose scales of ``part`` have this shape."""
    return [kind for kind in ScaleKind if scale_shape(kind, part, cache) == shape]


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
