"""The way of one call: check, select, plan, compute. Nothing here looks back at what a later stage
did.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.binding import Checked
from splitkv.backends.registry import BACKENDS, select
from splitkv.backends.repeated import Repeated, Repeats, request
from splitkv.common.cache import Cache, RingCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, merge_states_torch
from splitkv.common.validate import Validate, check_call, check_ring, check_sinks, check_types


def decode(
    q: Tensor,
    cache: Cache | RingCache,
    spec: DecodeSpec,
    *,
    plan: SplitPlan | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_start: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    backend: str | None = None,
    validate: str | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries over a long cached history.

    q: [B, H, D] (S = 1), [B, S, H, D], or [T, H, D] with ``cu_seqlens_q`` int [B + 1]. kv_start:
    int [B], the first visible position of each request (0 to seq_len, which counts from 0 still).
    alibi_slopes: [H] or [B, H]. attn_bias: [B or 1, H or 1, S, n] and attn_mask: bool [B, S, n],
    for the last n positions of each request. sinks: [H], one unscaled logit per query head.
    k_scale, v_scale, k_zero, v_zero: as ``splitkv.common.quantised`` says for the spec's kinds.
    out: like q with Dv; lse: float32 [B, (S,) H]; both are
        written in place where given. plan: from ``Backend.plan``, shared by all layers of a step
        (neither split argument goes with it).
    validate: "full" (default on CPU), "shapes" (default elsewhere) or "none". With a plan that has
        served a call like this one, the default compares shapes, and lengths and tables on the
        host, with that call's.

    Returns:
        ``(out, lse)``: out in q's shape with Dv and q's dtype, lse float32 [B, (S,) H], natural
        log, the one ``out`` is normalised by (sinks included). A row that sees nothing is (0,
        -inf).

    Raises:
        ValueError: malformed, with argument, value and limit.
        UnsupportedError: well formed, and refused by ``backend`` (or by all), with every reason.
    """
    asked = None
    if plan is not None and kv_start is None and num_splits is split_size is None:
        # a call that repeats, in all but places, one that its plan has served on a GPU
        masks = (cu_seqlens_q, alibi_slopes, attn_bias, attn_mask)
        others = (*masks, k_scale, v_scale, k_zero, v_zero, sinks, out, lse)
        asked = request(plan, q, cache, spec, others, backend, validate)
        if asked is not None and (again := cast("Repeated | None", plan.bound.get(asked[0]))):
            answer = again(asked[1], out, lse)
            if answer is not None:
                return answer
    extras = {
        "cu_seqlens_q": cu_seqlens_q,
        "kv_start": kv_start,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_zero": k_zero,
        "v_zero": v_zero,
    }
    check_types(spec, cache, {"q": q, **extras, "sinks": sinks, "out": out, "lse": lse})
    call, level = _call(q, cache, spec, extras, validate)
    chosen, plan = _prepare(
        call, plan, num_splits, split_size, backend, level, checks_again=validate == "full"
    )
    check_sinks(sinks, spec, q.device)
    squeezed = call.q is not q
    _check_destination("out", out, (*q.shape[:-1], spec.head_dim_v), q.dtype, q.device)
    _check_destination("lse", lse, tuple(q.shape[:-1]), _lse_dtype(q), q.device)
    if out is not None and lse is not None and _meet(out, lse):
        raise ValueError(
            f"out and lse must not share memory, lse would overwrite part of out; got out at "
            f"{out.data_ptr():#x} with strides {list(out.stride())}, lse at {lse.data_ptr():#x} "
            f"with strides {list(lse.stride())}: give lse memory of its own"
        )
    result, result_lse = chosen.decode(
        call,
        plan,
        sinks=sinks,
        out=out[:, None] if squeezed and out is not None else out,
        lse=lse[:, None] if squeezed and lse is not None else lse,
    )
    if squeezed:
        result, result_lse = result[:, 0], result_lse[:, 0]
    result, result_lse = (result if out is None else out), (result_lse if lse is None else lse)
    if asked is not None and plan is not None and isinstance(chosen, Repeats):
        kept = chosen.repeated(call, plan, sinks, result, result_lse)
        if kept is not None:
            plan.bound[asked[0]] = kept
    return result, result_lse


def partial(
    q: Tensor,
    cache: Cache | RingCache,
    spec: DecodeSpec,
    *,
    plan: SplitPlan | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    kv_start: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
    backend: str | None = None,
    validate: str | None = None,
) -> PartialState:
    """The state of the queries over this cache, to be merged with others; arguments as for
    ``decode``. Never holds a sink.

    Returns:
        ``PartialState`` with max, lse [B, (S,) H] and out [B, (S,) H, Dv], float32.
    """
    if getattr(spec, "sinks", False):
        raise ValueError(
            "a partial state never holds a sink: use a spec with sinks=False and give the sinks to "
            "finish()"
        )
    extras = {
        "cu_seqlens_q": cu_seqlens_q,
        "kv_start": kv_start,
        "alibi_slopes": alibi_slopes,
        "attn_bias": attn_bias,
        "attn_mask": attn_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "k_zero": k_zero,
        "v_zero": v_zero,
    }
    check_types(spec, cache, {"q": q, **extras})
    call, level = _call(q, cache, spec, extras, validate)
    chosen, plan = _prepare(
        call, plan, num_splits, split_size, backend, level, checks_again=validate == "full"
    )
    state = chosen.partial(call, plan)
    if call.q is not q:
        state = PartialState(state.max[:, 0], state.lse[:, 0], state.out[:, 0])
    return state


def merge_states(states: Sequence[PartialState] | PartialState) -> PartialState:
    """Merge states of the same queries over disjoint keys, on the device where they are.

    states: a list, or one state whose first axis stacks them.

    Raises:
        ValueError: no state, or states that differ in shape, dtype or device.
    """
    first = states if isinstance(states, PartialState) else (states[0] if states else None)
    if first is not None:
        for backend in BACKENDS:
            if backend.device_type == first.lse.device.type and backend.missing() is None:
                return backend.merge(states)
    return merge_states_torch(states)


def _paged(
    cache: Cache | RingCache, spec: DecodeSpec, level: Validate, cu_seqlens_q: Tensor | None
) -> Cache:
    if not isinstance(cache, RingCache):
        return cache
    if level is Validate.FULL:
        check_ring(cache, spec, cu_seqlens_q)
    return cache.as_paged()


def _call(
    q: Tensor,
    cache: Cache | RingCache,
    spec: DecodeSpec,
    extras: Mapping[str, Tensor | None],
    validate: str | None,
) -> tuple[DecodeCall, Validate]:
    """The call as a backend is handed it, and how much of it is to be checked."""
    level = validate_level(validate, q.device)
    cache = _paged(cache, spec, level, extras["cu_seqlens_q"])
    if not spec.packed_queries and q.ndim == 3:
        q = q[:, None]
    return DecodeCall(q, cache, spec, **extras), level


def _prepare(
    call: DecodeCall,
    plan: SplitPlan | None,
    num_splits: int | None,
    split_size: int | None,
    backend: str | None,
    level: Validate,
    *,
    checks_again: bool,
) -> tuple[Backend, SplitPlan | None]:
    if plan is not None and (num_splits is not None or split_size is not None):
        raise ValueError(
            "plan fixes the splits already: give plan, num_splits or split_size, only one of them"
        )
    if plan is None:
        check_call(call, None, level)
        chosen = select(call.spec, call.q.device, backend)
        plan = chosen.plan_for(call, num_splits=num_splits, split_size=split_size)
        return chosen, plan
    if not isinstance(plan, SplitPlan):
        raise ValueError(f"plan must be a SplitPlan, got {type(plan).__name__}")
    # a call vouches for later ones at its own level: one that asks for more was not checked as far
    key = ("checked", level, call.spec, call.cache.layout, backend)
    known = plan.bound.get(key)
    if isinstance(known, Checked) and not checks_again and known.vouches_for(call, level):
        return known.backend, plan
    check_call(call, plan, level)
    chosen = select(call.spec, call.q.device, backend)
    plan.bound[key] = Checked.of(chosen, call)
    return chosen, plan


def validate_level(validate: str | None, device: torch.device) -> Validate:
    if validate is None:
        return Validate.FULL if device.type == "cpu" else Validate.SHAPES
    known = [level.value for level in Validate]
    if validate not in known:
        raise ValueError(f"unknown validate {validate!r}, known: {known}")
    return Validate(validate)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check_destination(
    name: str,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor is None:
        return
    if tensor.requires_grad or not _elements_apart(tensor):
        raise ValueError(
            f"{name} must not require grad nor be expanded, each element needs memory of its own; "
            f"got requires_grad {tensor.requires_grad}, strides {list(tensor.stride())}"
        )
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} must be {list(shape)} {dtype} on {device}, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )


def _elements_apart(tensor: Tensor) -> bool:
    """Whether each stride is beyond all that smaller ones reach, so that no two elements meet."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _meet(left: Tensor, right: Tensor) -> bool:
    """Whether some byte belongs to both. Views that only interleave do not meet."""
    if left.device != right.device or left.numel() == 0 or right.numel() == 0 or left.is_meta:
        return False
    low = max(left.data_ptr(), right.data_ptr())
    if low >= min(_end(left), _end(right)):
        return False
    return bool(np.intersect1d(_bytes(left), _bytes(right)).size)


def _end(tensor: Tensor) -> int:
    """The address after the last byte."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + (reach + 1) * tensor.itemsize


def _bytes(tensor: Tensor) -> npt.NDArray[np.int64]:
    """The address of every byte, int64."""
    address = np.array([tensor.data_ptr()], dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        address = (address[:, None] + np.arange(size) * stride * tensor.itemsize).reshape(-1)
    return (address[:, None] + np.arange(tensor.itemsize)).reshape(-1)
