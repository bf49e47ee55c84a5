"""A call's kernels in order: splits, then the merge of what belongs to one request.

Queries, slopes and biases are laid out by kv head and row (row r is query r // G, head r % G of the
group), small tensors next to the cache, which stays as it lies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from splitkv.common.cache import PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.state import PartialState
from splitkv.kernels_ascend.kernels.budget import Cores, split_tile
from splitkv.kernels_ascend.kernels.launch import Launch
from splitkv.kernels_ascend.kernels.merge import Parts, merge_launch
from splitkv.kernels_ascend.kernels.split import split_kernel
from splitkv.kernels_ascend.runtime import is_capturing

_UNLIMITED = 2**31 - 2**16
"""A window or anchor count that hides nothing; larger ones would overflow 32-bit positions."""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """What a plan's splits are on the device.

    items: int32 [4, N]: request, start, end, opens the window. slots: int32 [B + 1], the states of
    each request. steps: int32 [S * G], the query of each row.
    """

    items: Tensor
    slots: Tensor
    steps: Tensor


def device_plan(plan: SplitPlan, device: torch.device) -> DevicePlan:
    """The plan's arrays on ``device``: copied once, and again after ``plan.refresh``.

    Raises:
        RuntimeError: a copy would be needed while the stream is being captured.
    """
    key = ("own kernel", device)
    bound = plan.bound.get(key)
    if not isinstance(bound, DevicePlan):
        if device.type == "npu" and is_capturing():
            raise RuntimeError(
                "the stream is being captured, and this plan is not yet on the device: run one "
                "call with it before the capture"
            )
        count, spec = plan.num_splits, plan.spec
        columns = (plan.request, plan.start, plan.end, plan.window_first)
        items = torch.stack([torch.from_numpy(one[:count].astype("int32")) for one in columns])
        steps = torch.arange(spec.num_queries * spec.group, dtype=torch.int32) // spec.group
        slots = torch.from_numpy(plan.indptr.copy())
        bound = DevicePlan(*(one.to(device) for one in (items, slots, steps)))
        plan.bound[key] = bound
    return bound


def split_states(call: DecodeCall, plan: SplitPlan) -> Parts:
    """Uninitialised room for the state of every split: out [N, K * S * G, Dv] and so on."""
    spec, device = call.spec, call.q.device
    rows = spec.num_q_heads * spec.num_queries
    return Parts(
        torch.empty(plan.num_splits, rows, spec.head_dim_v, device=device),
        *(torch.empty(plan.num_splits, rows, device=device) for _ in range(2)),
    )


def split_launch(call: DecodeCall, plan: SplitPlan, states: Parts, cores: Cores) -> Launch:
    """Attend to every split of ``plan``, leaving its state in ``states``."""
    spec, cache = call.spec, call.cache
    assert not isinstance(cache, PackedCache)
    device = call.q.device
    on_device = device_plan(plan, device)
    rows = spec.num_queries * spec.group
    tile = split_tile(spec)
    row_tiles = -(-rows // tile.rows)
    work = plan.num_splits * spec.num_kv_heads * row_tiles
    if isinstance(cache, PagedCache):
        (k, v), table = cache.nhd(), cache.block_table.contiguous()
    else:
        k, v = (tensor.transpose(1, 2) for tensor in cache.bnsd())
        table = None
    slopes = slope_rows(call)
    bias = bias_rows(call, tile.tokens)
    windowed = spec.sliding_window is not None
    return Launch(
        split_kernel,
        min(work, cores.cube),
        {
            "q": query_rows(call),
            "k": k,
            "v": v,
            "items": on_device.items,
            "seq_lens": cache.seq_lens.to(device=device, dtype=torch.int32),
            "steps": on_device.steps,
            "block_table": table,
            "slopes": slopes,
            "bias": bias,
            "part_out": states.out,
            "part_lse": states.lse,
            "part_top": states.top,
            "table_stride": 0 if table is None else table.shape[1],
            "k_first": k.stride(0),
            "k_row": k.stride(1),
            "k_head": k.stride(2),
            "v_first": v.stride(0),
            "v_row": v.stride(1),
            "v_head": v.stride(2),
            "slope_stride": _stride(slopes, 0),
            "bias_first": _stride(bias, 0),
            "bias_head": _stride(bias, 1),
            "work": work,
            "capacity": plan.num_splits,
            "rows": rows,
            "row_tiles": row_tiles,
            "kv_heads": spec.num_kv_heads,
            "queries": spec.num_queries,
            "columns": 0 if bias is None else bias.shape[-1] - tile.tokens,
            "window": min(spec.sliding_window or 0, _UNLIMITED),
            "anchors": min(spec.anchor_tokens, _UNLIMITED) if windowed else 0,
            "sm_scale": spec.scale,
            "cap": spec.logits_soft_cap or 0.0,
            "D": spec.head_dim,
            "DV": spec.head_dim_v,
            "PAGE_SIZE": cache.page_size or 0,
            "CAUSAL": spec.causal and spec.num_queries > 1,
            "WINDOW": windowed,
            "RAGGED_START": windowed or plan.granule % tile.tokens != 0,
            "SOFT_CAP": spec.logits_soft_cap is not None,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.tokens,
        },
    )


def split_decode(call: DecodeCall, plan: SplitPlan, cores: Cores) -> PartialState:
    """The state of all queries of ``call`` over its cache, [B, S, H]."""
    spec, device = call.spec, call.q.device
    states = split_states(call, plan)
    merged = Parts(
        torch.empty(call.batch, *states.out.shape[1:], device=device),
        *(torch.empty(call.batch, states.out.shape[1], device=device) for _ in range(2)),
    )
    if call.q.numel():
        split_launch(call, plan, states, cores).run(device)
        merge_launch(states, device_plan(plan, device).slots, merged, cores).run(device)
    by_head = (call.batch, spec.num_kv_heads, spec.num_queries, spec.group)
    shape = call.rows
    return PartialState(
        merged.top.view(by_head).transpose(1, 2).reshape(shape),
        merged.lse.view(by_head).transpose(1, 2).reshape(shape),
        merged.out.view(*by_head, spec.head_dim_v).transpose(1, 2).reshape(*shape, spec.head_dim_v),
    )


def query_rows(call: DecodeCall) -> Tensor:
    """Queries as [B, K, S * G, D]; one query per request lies like that already."""
    spec = call.spec
    grouped = call.q.reshape(-1, spec.num_queries, spec.num_kv_heads, spec.group, spec.head_dim)
    return grouped.transpose(1, 2).contiguous()


def slope_rows(call: DecodeCall) -> Tensor | None:
    """ALiBi's slopes as float32 [1 or B, K, S * G]."""
    if call.alibi_slopes is None:
        return None
    spec = call.spec
    grouped = call.alibi_slopes.float().reshape(-1, spec.num_kv_heads, 1, spec.group)
    by_query = grouped.expand(-1, -1, spec.num_queries, -1)
    return by_query.reshape(len(grouped), spec.num_kv_heads, -1).contiguous()


def bias_rows(call: DecodeCall, before: int) -> Tensor | None:
    """Bias and mask in one, float32 [1 or B, 1 or K, S * G, before + n]: -inf where a column is
    hidden, and ``before`` silent columns in front.
    """
    spec, bias, mask = call.spec, call.attn_bias, call.attn_mask
    if bias is None and mask is None:
        return None
    columns = max(one.shape[-1] for one in (bias, mask) if one is not None) + before
    rows = torch.zeros(1, 1, 1, columns, device=call.q.device)
    if bias is not None:
        by_head = bias.shape[1] > 1
        heads, group = (spec.num_kv_heads, spec.group) if by_head else (1, 1)
        grouped = bias.float().reshape(len(bias), heads, group, *bias.shape[2:])
        by_query = grouped.transpose(2, 3).expand(-1, -1, -1, spec.group, -1).flatten(2, 3)
        rows = pad(by_query, (columns - bias.shape[-1], 0))
    if mask is not None:
        by_query = mask.repeat_interleave(spec.group, 1)[:, None]
        seen = pad(by_query, (columns - mask.shape[-1], 0), value=True)
        rows = torch.where(seen, rows, -torch.inf)
    return rows.contiguous()


def _stride(tensor: Tensor | None, axis: int) -> int:
    """Elements from one entry of ``axis`` to the next; 0 where one stands for all."""
    return 0 if tensor is None or tensor.shape[axis] == 1 else tensor.stride(axis)
