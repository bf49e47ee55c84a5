"""The flat arguments of an operator as cache, spec and plan.

An operator takes tensors, numbers and strings, and one call is one layer of one step: nothing of an
earlier call comes with it. So equal facts find the same spec here, and equal lengths on the host
the same plan.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from splitkv.backends import call_arguments
from splitkv.backends.call_arguments import scale_tensor
from splitkv.backends.registry import select
from splitkv.common.cache import Cache, PackedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.validate import Validate, check_call, check_sinks

RECENT_SPECS = 256
RECENT_PLANS = 16
"""A step needs one plan per kind of layer; the rest is room for several models in turn."""

_HOST = ("seq_lens", "cu_seqlens_k", "cu_seqlens_q", "kv_start")
"""May live on the host whatever the device of q."""


class Options(TypedDict, total=False):
    """Keywords of the operators, as the dispatcher hands them over: without those left at their
    default.
    """

    layout: str | None
    seq_lens: Tensor | None
    block_table: Tensor | None
    cu_seqlens_k: Tensor | None
    cu_seqlens_q: Tensor | None
    num_queries: int | None
    sm_scale: float | None
    causal: bool
    sliding_window: int | None
    window_block: int
    anchor_tokens: int
    kv_start: Tensor | None
    logits_soft_cap: float | None
    alibi_slopes: Tensor | None
    attn_bias: Tensor | None
    attn_mask: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_zero: Tensor | None
    v_zero: Tensor | None
    num_splits: int | None
    split_size: int | None
    backend: str | None
    validate: str | None


def cache_of(k: Tensor, v: Tensor, options: Options) -> Cache:
    """The cache that layout, lengths, table or offsets describe, as ``call_arguments`` reads
    them.
    """
    return call_arguments.cache_of(
        k,
        v,
        seq_lens=options.get("seq_lens"),
        block_table=options.get("block_table"),
        cu_seqlens_k=options.get("cu_seqlens_k"),
        layout=options.get("layout"),
    )


def spec_of(q: Tensor, cache: Cache, options: Options) -> DecodeSpec:
    """What is fixed for the layer. Sizes that it holds are fixed for a compiled graph, too: a
    symbolic one becomes the number it stands for.

    Raises:
        ValueError: a contradiction, as ``DecodeSpec`` says it; ``num_queries`` missing for packed
            queries, or given for others.
    """
    packed, queries = options.get("cu_seqlens_q") is not None, options.get("num_queries")
    if packed != (queries is not None):
        raise ValueError(
            "num_queries, the most queries of one request, goes with cu_seqlens_q and only with "
            "it: an operator waits for no device to find it; "
            f"got num_queries {queries}"
        )
    scale, cap = options.get("sm_scale"), options.get("logits_soft_cap")
    window = options.get("sliding_window")
    fields = call_arguments.spec_fields(
        q,
        cache,
        queries,
        k_scale=options.get("k_scale"),
        v_scale=options.get("v_scale"),
        k_zero=options.get("k_zero") is not None,
        v_zero=options.get("v_zero") is not None,
        causal=options.get("causal", True),
        sm_scale=None if scale is None else float(scale),
        sliding_window=None if window is None else int(window),
        window_block=int(options.get("window_block", 1)),
        anchor_tokens=int(options.get("anchor_tokens", 0)),
        kv_start=options.get("kv_start") is not None,
        logits_soft_cap=None if cap is None else float(cap),
        alibi=options.get("alibi_slopes") is not None,
        attn_bias=options.get("attn_bias") is not None,
        attn_mask=options.get("attn_mask") is not None,
        sinks=options.get("sinks") is not None,
    )
    return _spec(**fields)


_spec = functools.lru_cache(RECENT_SPECS)(DecodeSpec)


def extras_of(options: Options) -> dict[str, Tensor | None]:
    """The tensors of a call besides q and the cache."""
    return {
        "cu_seqlens_q": options.get("cu_seqlens_q"),
        "kv_start": options.get("kv_start"),
        "alibi_slopes": options.get("alibi_slopes"),
        "attn_bias": options.get("attn_bias"),
        "attn_mask": options.get("attn_mask"),
        "k_scale": _scale(options.get("k_scale")),
        "v_scale": _scale(options.get("v_scale")),
        "k_zero": _scale(options.get("k_zero")),
        "v_zero": _scale(options.get("v_zero")),
    }


def _scale(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale_tensor(scale, scale.device)


def arguments_of(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Cache, DecodeSpec, dict[str, Any]]:
    """Cache, spec and keywords of ``decode`` and ``partial``.

    Who cuts: a plan that calls share where lengths and offsets are on the host. Of tensors on a
    device a backend may remember in its plan what it read; each call then has a plan of its own.
    A shared plan has seen other calls' tensors, so that none of them vouches for this one's values.
    """
    cache = cache_of(k, v, options)
    spec = spec_of(q, cache, options)
    backend = options.get("backend")
    settings: dict[str, Any] = {
        **extras_of(options),
        "backend": backend,
        "validate": options.get("validate") or ("full" if q.is_cpu else None),
    }
    packed = isinstance(cache, PackedCache)
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    splits = options.get("num_splits"), options.get("split_size")
    offsets = options.get("cu_seqlens_q")
    if lengths.is_cpu and (offsets is None or offsets.is_cpu):
        host = lengths.numpy()
        facts = host.tobytes(), host.dtype.str, packed
        settings["plan"] = _plan(spec, q.device, backend, *facts, *splits)
    else:
        settings["num_splits"], settings["split_size"] = splits
    return cache, spec, settings


@functools.lru_cache(RECENT_PLANS)
def _plan(
    spec: DecodeSpec,
    device: torch.device,
    backend: str | None,
    lengths: bytes,
    dtype: str,
    offsets: bool,
    num_splits: int | None,
    split_size: int | None,
) -> SplitPlan:
    values = np.frombuffer(lengths, dtype)
    values = np.diff(values) if offsets else values
    chosen = select(spec, device, backend)
    return chosen.plan(spec, values.tolist(), num_splits=num_splits, split_size=split_size)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """Refuse, without a value being read, the shapes, dtypes and devices that a call would refuse.

    Raises:
        ValueError: as a call does, or a tensor lives on another device than q.
    """
    check_devices("q", q, {"k": k, "v": v, **options})
    q, k, v = without_data(q), without_data(k), without_data(v)
    options = without_data_each(options)
    cache = cache_of(k, v, options)
    spec = spec_of(q, cache, options)
    if not spec.packed_queries and q.ndim == 3:
        q = q[:, None]
    check_call(DecodeCall(q, cache, spec, **extras_of(options)), None, Validate.SHAPES)
    check_sinks(options.get("sinks"), spec, q.device)


def check_devices(name: str, like: Tensor, given: Mapping[str, object]) -> None:
    """Raise ValueError unless the tensors of ``given`` live with ``like``; lengths and offsets may
    live on the host.
    """
    for other, value in given.items():
        if not isinstance(value, Tensor) or value.device == like.device:
            continue
        if not (other in _HOST and value.device.type == "cpu"):
            raise ValueError(f"{other} must be on {like.device} like {name}, got {value.device}")


def without_data(tensor: Tensor) -> Tensor:
    """Shape and dtype of ``tensor`` on device "meta", where nothing can be read: lengths on the
    host would be, and have no values while a graph is compiled.
    """
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def without_data_each(options: Options) -> Options:
    """``options`` with their tensors' shapes and dtypes alone."""
    described: Any = {
        name: without_data(value) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    return cast("Options", described)
