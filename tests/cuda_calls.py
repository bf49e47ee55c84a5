"""Calls of the CUDA kernels: on a GPU where there is one, else in Triton's interpreter on the CPU.

The backend is called as ``splitkv.decode`` would call it; answers come back on the CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from histories import Arguments, History
from splitkv.backends.cuda import CudaBackend, InterpretedCudaBackend
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.state import PartialState
from splitkv.common.validate import Validate, check_call
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.reference import reference

ON_GPU = torch.cuda.is_available()
BACKEND = CudaBackend() if ON_GPU else InterpretedCudaBackend()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")

_EXTRAS = ("cu_seqlens_q", "kv_start", "alibi_slopes", "attn_bias", "attn_mask")


def cache_of(arguments: Arguments) -> Cache:
    """The cache that ``History.dense``, ``.packed`` and ``.paged`` describe."""
    k, v = arguments["k"].to(DEVICE), arguments["v"].to(DEVICE)
    if "cu_seqlens_k" in arguments:
        return PackedCache(k, v, arguments["cu_seqlens_k"].to(DEVICE))
    layout, seq_lens = Layout(arguments["layout"]), arguments["seq_lens"].to(DEVICE)
    if layout.paged:
        return PagedCache(k, v, arguments["block_table"].to(DEVICE), seq_lens, layout)
    return DenseCache(k, v, seq_lens, layout)


def call_of(q: Tensor, cache: Cache | Arguments, **settings: Any) -> DecodeCall:
    """q: [B, S, H, D], or [tokens, H, D] with ``cu_seqlens_q``.

    settings: fields of the spec, and the call's other tensors.
    """
    cache = cache_of(cache) if isinstance(cache, dict) else cache
    extras = {name: settings.pop(name).to(DEVICE) for name in _EXTRAS if name in settings}
    packed = "cu_seqlens_q" in extras
    queries = int(extras["cu_seqlens_q"].diff().max()) if packed else q.shape[1]
    spec = DecodeSpec(
        num_q_heads=q.shape[-2],
        num_kv_heads=cache.num_kv_heads,
        head_dim=q.shape[-1],
        head_dim_v=cache.v.shape[-1],
        layout=cache.layout,
        dtype=q.dtype,
        page_size=cache.page_size,
        num_queries=queries,
        packed_queries=packed,
        kv_start="kv_start" in extras,
        alibi="alibi_slopes" in extras,
        attn_bias="attn_bias" in extras,
        attn_mask="attn_mask" in extras,
        **settings,
    )
    return DecodeCall(q.to(DEVICE), cache, spec, **extras)


def decode(
    call: DecodeCall,
    plan: SplitPlan | None = None,
    sinks: Tensor | None = None,
    **splits: int | None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` on the CPU; without a plan the device makes one."""
    if plan is None:
        plan = BACKEND.plan_for(call, **splits)
    check_call(call, plan, Validate.FULL)
    out, lse = BACKEND.decode(call, plan, sinks=None if sinks is None else sinks.to(DEVICE))
    return out.cpu(), lse.cpu()


def partial(call: DecodeCall, plan: SplitPlan | None = None, **splits: int | None) -> PartialState:
    """The state on the CPU."""
    state = BACKEND.partial(call, BACKEND.plan_for(call, **splits) if plan is None else plan)
    return PartialState(state.max.cpu(), state.lse.cpu(), state.out.cpu())


def host_plan(call: DecodeCall, lengths: Sequence[int], **splits: int | None) -> SplitPlan:
    """A plan made on the host for ``lengths``."""
    return BACKEND.plan(call.spec, lengths, **splits)


def assert_answers(call: DecodeCall, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
    """Within twice the error of eager PyTorch in the call's dtype; NaN never passes."""
    host = on_host(call)
    answer = reference(host, sinks)
    assert not torch.isnan(answer.out).any(), "the reference is NaN"
    assert errors(out, lse, answer).exceeds(bounds(host, sinks, answer)) == []


def on_host(call: DecodeCall) -> DecodeCall:
    """The call with its tensors on the CPU."""
    cache = call.cache
    k, v = cache.k.cpu(), cache.v.cpu()
    host: Cache
    if isinstance(cache, PackedCache):
        host = PackedCache(k, v, cache.cu_seqlens_k.cpu())
    elif isinstance(cache, PagedCache):
        host = PagedCache(k, v, cache.block_table.cpu(), cache.seq_lens.cpu(), cache.layout)
    else:
        host = DenseCache(k, v, cache.seq_lens.cpu(), cache.layout)
    extras = {name: value.cpu() for name in _EXTRAS if (value := getattr(call, name)) is not None}
    return DecodeCall(call.q.cpu(), host, call.spec, **extras)


def taken(history: History, *requests: int) -> History:
    """Some requests of a history."""
    return History(
        [history.k[index] for index in requests], [history.v[index] for index in requests]
    )
