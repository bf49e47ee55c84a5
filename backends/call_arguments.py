"""The arguments of one call as cache and spec: for the one-call form, and for torch's operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.quantised import kinds_of, scale_shapes
from splitkv.common.spec import INT4, QUANTISED_DTYPES, Layout, ScaleKind, codes_per_item
from splitkv.common.validate import layout_of
from splitkv.common.visibility import as_lengths

Lengths = Tensor | Sequence[int]
Scale = Tensor | float


def cache_of(
    k: Tensor,
    v: Tensor,
    *,
    seq_lens: Lengths | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    layout: str | Layout | None = None,
    kv_indptr: Tensor | None = None,
    kv_indices: Tensor | None = None,
) -> Cache:
    """The cache that lengths, tables or offsets describe; shapes as for ``decode_attention``.

    Raises:
        ValueError: they describe none, or several; or k, v and they do not fit together.
    """
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    kind = layout_of(layout)
    if (kv_indptr is None) != (kv_indices is None):
        raise ValueError("kv_indptr and kv_indices come together, got one of them")
    given = {
        "block_table": block_table is not None,
        "cu_seqlens_k": cu_seqlens_k is not None,
        "kv_indptr": kv_indptr is not None,
    }
    if sum(given.values()) > 1:
        names = [name for name, present in given.items() if present]
        raise ValueError(f"a cache is found one way, got {' and '.join(names)}")
    lengths = None if seq_lens is None else _length_tensor(seq_lens)
    if cu_seqlens_k is not None:
        if kind not in (None, Layout.PACKED) or lengths is not None:
            raise ValueError(
                f"cu_seqlens_k goes with no layout and no seq_lens, got layout {layout!r}"
            )
        return PackedCache(k, v, cu_seqlens_k)
    if block_table is None and kv_indptr is None:
        return _dense(k, v, lengths, kind)
    if kind is None or not kind.paged:
        raise ValueError(
            f"a paged cache needs layout 'NHD' or 'HND' (it is never guessed), got {layout!r}"
        )
    if lengths is None:
        raise ValueError("a paged cache needs seq_lens [B]")
    if kv_indptr is not None:
        assert kv_indices is not None
        return PagedCache.from_indptr(k, v, kv_indptr, kv_indices, seq_lens=lengths, layout=kind)
    assert block_table is not None
    return PagedCache(k, v, block_table, lengths, kind)


def _dense(k: Tensor, v: Tensor, lengths: Tensor | None, kind: Layout | None) -> DenseCache:
    if kind not in (Layout.BSND, Layout.BNSD):
        got = None if kind is None else kind.value
        raise ValueError(
            "a dense cache needs layout 'BSND' or 'BNSD', a paged one block_table, a packed one "
            "cu_seqlens_k; "
            f"got layout {got!r} and no table"
        )
    if lengths is None:
        if k.ndim != 4:
            raise ValueError(
                f"k must be [B, T, K, D] (BSND) or [B, K, T, D] (BNSD), got shape {list(k.shape)}"
            )
        tokens = k.shape[1 if kind is Layout.BSND else 2]
        where = "meta" if k.is_meta else "cpu"
        lengths = torch.full((k.shape[0],), tokens, dtype=torch.int32, device=where)
    return DenseCache(k, v, lengths, kind)


def _length_tensor(seq_lens: Lengths) -> Tensor:
    if isinstance(seq_lens, Tensor):
        return seq_lens
    return torch.from_numpy(as_lengths("seq_lens", seq_lens).astype("int32"))


def spec_fields(
    q: Tensor,
    cache: Cache,
    longest_query: int | None = None,
    *,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    **semantics: Any,
) -> dict[str, Any]:
    """What ``DecodeSpec`` is made of. longest_query: the most queries of one request if q is packed
    [T, H, D], None if it is [B, H, D] or [B, S, H, D].

    Sizes are plain integers: of a symbolic one, the number that it stands for.

    Raises:
        ValueError: the shape of q, or a scale that fits neither cache nor batch.
    """
    packed = longest_query is not None
    if not isinstance(q, Tensor):
        raise ValueError(f"q must be a torch tensor, got {type(q).__name__}")
    if q.ndim not in ((3,) if packed else (3, 4)):
        shape = "[T, H, D] with cu_seqlens_q" if packed else "[B, H, D] or [B, S, H, D]"
        raise ValueError(f"q must be {shape}, got shape {list(q.shape)}")
    if longest_query is None:
        longest_query = q.shape[1] if q.ndim == 4 else 1
    return {
        "num_q_heads": int(q.shape[-2]),
        "num_kv_heads": int(cache.num_kv_heads),
        "head_dim": int(q.shape[-1]),
        "head_dim_v": int(cache.v.shape[-1]) * codes_per_item(cache.v.dtype),
        "layout": cache.layout,
        "dtype": q.dtype,
        "kv_dtype": cache.k.dtype,
        "page_size": None if cache.page_size is None else int(cache.page_size),
        "num_queries": max(int(longest_query), 1),
        "packed_queries": packed,
        "k_scale": _scale_kind("k_scale", k_scale, cache),
        "v_scale": _scale_kind("v_scale", v_scale, cache),
        **semantics,
    }


def _scale_kind(name: str, scale: Scale | None, cache: Cache) -> ScaleKind | None:
    if scale is None:
        return None
    if cache.k.dtype not in QUANTISED_DTYPES:
        raise ValueError(
            f"{name} needs a quantised cache {QUANTISED_DTYPES}, the cache is {cache.k.dtype}"
        )
    part = cache.k if name.startswith("k") else cache.v
    if part.dtype == INT4:
        _check_groups(name, scale, part, cache)
        return ScaleKind.GROUP
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return ScaleKind.TENSOR
    kinds = kinds_of(tuple(scale.shape), part, cache)
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise ValueError(
            f"{name} {list(scale.shape)} fits {' and '.join(kind.name for kind in kinds)}; say "
            "which in a DecodeSpec and call decode"
        )
    heads, rows, width = cache.num_kv_heads, list(part.shape[:-1]), part.shape[-1]
    raise ValueError(
        f"{name} must be a number, [K] = [{heads}] or [B, K] = [{cache.batch}, {heads}], or per "
        f"token {rows} or per channel [{heads}, {width}], got {list(scale.shape)}"
    )


def _check_groups(name: str, scale: Scale, part: Tensor, cache: Cache) -> None:
    allowed = scale_shapes(ScaleKind.GROUP, part, cache)
    if not isinstance(scale, Tensor) or tuple(scale.shape) not in allowed:
        got = list(scale.shape) if isinstance(scale, Tensor) else scale
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(
            f"{name} of int4 codes has one for each group of 16, 32, .. elements of the head dim: "
            f"it must be {wanted or 'of a head dim that 16 divides'}, got {got}"
        )


def scale_tensor(scale: Scale | None, device: torch.device) -> Tensor | None:
    """As ``decode`` takes it: on ``device``, a number as [1]; scales for tokens, which are many, in
    the float dtype that they have, all else in float32.
    """
    if scale is None:
        return None
    if isinstance(scale, Tensor) and scale.ndim > 2 and scale.is_floating_point():
        return scale.to(device)
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=device)
    return tensor.reshape(1) if tensor.numel() == 1 and tensor.ndim < 3 else tensor
