"""Operators of torch: decode attention that ``torch.compile`` takes whole.

``torch.compile`` does not look into an operator: it asks a fake kernel for the results' shapes, and
calls the real one when the graph runs. Importing this file registers, under ``torch.ops.splitkv``,

    decode_attention      (out, lse)
    decode_attention_out  nothing; writes into out and lse
    partial_attention     (max, lse, out): a state
    merge_states          (max, lse, out) of states stacked on axis 0
    append_kv             nothing; writes new tokens into the cache

Defined and implemented through ``torch.library.Library``: ``torch.library.custom_op`` wraps each
call in several layers of Python more (pytorch/pytorch issue 139500). One kernel stands for every
device (CompositeExplicitAutograd: below autograd, and left whole by tracing), since the choice
among backends, and the reasons of those who refuse, are ``splitkv.select``'s. No formula for
gradients is registered: a call that would need one is refused, by the real and by the fake kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from splitkv.backends.append import append_kv as append
from splitkv.backends.decode import decode, partial
from splitkv.backends.decode import merge_states as merge
from splitkv.backends.operator_call import (
    Options,
    arguments_of,
    cache_of,
    check_devices,
    check_shapes,
    without_data,
    without_data_each,
)
from splitkv.common.cache import Cache, PackedCache, PagedCache
from splitkv.common.spec import codes_per_item
from splitkv.common.state import PartialState, as_list, stack_states
from splitkv.common.visibility import window_from

_OPTIONS = (
    "*, str? layout=None, Tensor? seq_lens=None, Tensor? block_table=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_q=None, SymInt? num_queries=None, "
    "float? sm_scale=None, bool causal=True, SymInt? sliding_window=None, "
    "SymInt window_block=1, SymInt anchor_tokens=0, Tensor? kv_start=None, "
    "float? logits_soft_cap=None, Tensor? alibi_slopes=None, Tensor? attn_bias=None, "
    "Tensor? attn_mask=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_zero=None, Tensor? v_zero=None, "
    "SymInt? num_splits=None, SymInt? split_size=None, "
    "str? backend=None, str? validate=None"
)
SCHEMAS = (
    f"decode_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}, Tensor? sinks=None) "
    "-> (Tensor, Tensor)",
    # out and lse have no keyword: of one called out, Dynamo demands that it be contiguous
    "decode_attention_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, "
    f"{_OPTIONS}, Tensor? sinks=None) -> ()",
    f"partial_attention(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "merge_states(Tensor max, Tensor lse, Tensor out) -> (Tensor, Tensor, Tensor)",
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, *, str? layout=None, "
    "Tensor? seq_lens=None, Tensor? block_table=None, Tensor? cu_seqlens_k=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
)


def _decode(q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]) -> tuple[Tensor, Tensor]:
    out, lse = _run(q, k, v, options)
    return out.contiguous(), lse.contiguous()  # what the fake kernel says; copies only if needed


def _decode_out(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Unpack[Options]
) -> None:
    _run(q, k, v, options, out, lse)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    cache, spec, settings = arguments_of(q, k, v, options)
    return decode(q, cache, spec, sinks=options.get("sinks"), out=out, lse=lse, **settings)


def _partial(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    cache, spec, settings = arguments_of(q, k, v, options)
    state = partial(q, cache, spec, **settings)
    return state.max.contiguous(), state.lse.contiguous(), state.out.contiguous()


def _merge(max: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    stacked = _stacked(max, lse, out)
    if len(lse) == 1:  # merges into itself, and an operator hands back no view of what it was given
        top, lse, out = (x[0].clone(memory_format=torch.contiguous_format) for x in (max, lse, out))
        return top, lse, out
    state = merge(stacked)
    return state.max.contiguous(), state.lse.contiguous(), state.out.contiguous()


def _append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> None:
    scales = options.get("k_scale"), options.get("v_scale")
    append(cache_of(k_cache, v_cache, options), k, v, k_scale=scales[0], v_scale=scales[1])


def _fake_append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> None:
    tensors = {"v_cache": v_cache, "k": k, "v": v}
    check_devices("k_cache", k_cache, {**tensors, **options})
    described = [without_data(x) for x in (k_cache, *tensors.values())]
    _append(*described, **without_data_each(options))  # the write itself is one of no data


def _fake_decode(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor]:
    check_shapes(q, k, v, options)
    rows = q.shape[:-1]
    dim = v.shape[-1] * codes_per_item(v.dtype)
    return q.new_empty((*rows, dim)), q.new_empty(rows, dtype=_lse_dtype(q))


def _fake_decode_out(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Unpack[Options]
) -> None:
    wanted = _fake_decode(q, k, v, **options)
    for name, got, like in zip(("out", "lse"), (out, lse), wanted, strict=True):
        if got.shape != like.shape or got.dtype != like.dtype or got.device != like.device:
            raise ValueError(
                f"{name} must be {list(like.shape)} {like.dtype} on {like.device}, "
                f"got {list(got.shape)} {got.dtype} on {got.device}"
            )


def _fake_partial(
    q: Tensor, k: Tensor, v: Tensor, **options: Unpack[Options]
) -> tuple[Tensor, Tensor, Tensor]:
    check_shapes(q, k, v, options)
    rows, dtype = q.shape[:-1], _lse_dtype(q)
    top, lse = q.new_empty(rows, dtype=dtype), q.new_empty(rows, dtype=dtype)
    dim = v.shape[-1] * codes_per_item(v.dtype)
    return top, lse, q.new_empty((*rows, dim), dtype=dtype)


def _fake_merge(max: Tensor, lse: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _stacked(max, lse, out)
    rows = lse.shape[1:]
    return max.new_empty(rows), lse.new_empty(rows), out.new_empty((*rows, out.shape[-1]))


def _stacked(max: Tensor, lse: Tensor, out: Tensor) -> PartialState:
    for name, tensor in (("max", max), ("lse", lse), ("out", out)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, the operator is for inference only; use torch.no_grad(), "
                "or splitkv.merge_states outside of a graph"
            )
    return PartialState(max, lse, out)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


LIBRARY = torch.library.Library("splitkv", "FRAGMENT")
"""The operators live as long as it does."""

_KERNELS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (_decode, _fake_decode),
    (_decode_out, _fake_decode_out),
    (_partial, _fake_partial),
    (_merge, _fake_merge),
    (_append, _fake_append),
)
for _schema, (_kernel, _fake) in zip(SCHEMAS, _KERNELS, strict=True):
    _name = LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"splitkv::{_name}", _fake, lib=LIBRARY)

_DECODE = torch.ops.splitkv.decode_attention.default
_DECODE_OUT = torch.ops.splitkv.decode_attention_out.default
_PARTIAL = torch.ops.splitkv.partial_attention.default
_MERGE = torch.ops.splitkv.merge_states.default
_APPEND = torch.ops.splitkv.append_kv.default


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_left: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]:
    """``splitkv.decode_attention`` as an operator: the same bits, and one node of a compiled graph.

    Arguments as there, with these differences: lengths, tables and scales are tensors, a layout is
    a string; ``num_queries``, the most queries of one request, comes with ``cu_seqlens_q``; no
    ``kv_indptr``; no ``plan``: one is made of the lengths, and calls with equal spec and equal
    lengths on the host share it. Lengths that live with q are planned for on the device, and
    nothing waits. out: like q with Dv, lse: [B, (S,) H], any strides; they come together, and are
    written in place.

    Returns:
        ``(out, lse)``: out in q's shape with Dv and q's dtype, lse float32 [B, (S,) H] (float64 for
        a float64 q).

    Raises:
        ValueError: malformed, with argument, value and limit. While a graph is compiled, shapes are
            refused in the same words inside an error of torch's; values when the graph runs.
        UnsupportedError: well formed, and refused by ``backend`` (or by all), with every reason.
    """
    if window_left is not None:
        options["sliding_window"] = window_from(options.get("sliding_window"), window_left)
    if out is None and lse is None:
        made: tuple[Tensor, Tensor] = _DECODE(q, k, v, **options)
        return made
    if out is None or lse is None:
        raise ValueError("out and lse are written together: give both or none")
    _DECODE_OUT(q, k, v, out, lse, **options)
    return out, lse


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_left: int | None = None,
    **options: Unpack[Options],
) -> PartialState:
    """``splitkv.partial_attention`` as an operator; arguments as for ``decode_attention``, without
    sinks.

    Returns:
        ``PartialState`` with max, lse [B, (S,) H] and out [B, (S,) H, Dv], float32.
    """
    if window_left is not None:
        options["sliding_window"] = window_from(options.get("sliding_window"), window_left)
    return PartialState(*_PARTIAL(q, k, v, **options))


def merge_states(states: Sequence[PartialState] | PartialState) -> PartialState:
    """``splitkv.merge_states`` as an operator: a list, or one state whose first axis stacks them.

    Raises:
        ValueError: no state, states that differ in shape, dtype or device, or one that requires
            grad.
    """
    if not isinstance(states, PartialState):
        states = stack_states(as_list(states))
    return PartialState(*_MERGE(states.max, states.lse, states.out))


def append_kv(
    cache: Cache,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """``splitkv.append_kv`` as an operator: writes the newest tokens of each request in place.

    Arguments as there, but for ring caches.
    """
    options: Options = {"k_scale": k_scale, "v_scale": v_scale}
    if isinstance(cache, PackedCache):
        options["cu_seqlens_k"] = cache.cu_seqlens_k
    else:
        options |= {"layout": cache.layout.value, "seq_lens": cache.seq_lens}
    if isinstance(cache, PagedCache):
        options["block_table"] = cache.block_table
    _APPEND(cache.k, cache.v, k, v, **options)
