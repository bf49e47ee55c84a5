"""The merge kernel: states of the same queries over disjoint keys, added in the order given.

The formulas stand in ``splitkv.common.state``. A program takes tiles of rows that lie side by side,
so that it reads whole stretches of memory and adds row by row, without a sum across lanes. One
state, or one among empty ones, comes out bit for bit: its weight is 1, and what is added to it is
-0.0, the identity of addition.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from splitkv.common.state import PartialState
from splitkv.kernels_ascend.kernels.budget import Cores, merge_rows, power_of_two
from splitkv.kernels_ascend.kernels.launch import Launch
from splitkv.kernels_ascend.kernels.primitives import finite_or_zero, loop_bound, narrow, widen


@triton.jit(do_not_specialize=["requests", "rows"])
def merge_kernel(
    part_out,  # [slots, rows, DV]
    part_lse,  # float32 [slots, rows]
    part_top,  # float32 [slots, rows]
    slots,  # int32 [requests + 1]: request b merges the states slots[b] to slots[b + 1]
    out,  # [requests, rows, DV]
    out_lse,  # float32 [requests, rows]
    out_top,  # float32 [requests, rows]
    requests,
    rows,
    DV: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    rows64 = rows.to(tl.int64)  # the interpreter counts in Python integers, which have no dtype
    dv = tl.arange(0, BLOCK_DV)
    nothing_seen = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    for tile in range(
        loop_bound(tl.program_id(0)),
        loop_bound(requests * row_tiles),
        loop_bound(tl.num_programs(0)),
    ):
        request = tile // row_tiles
        row = (tile % row_tiles) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        there = row < rows
        cells = row[:, None] * DV + dv[None, :]
        cells_there = there[:, None] & (dv < DV)[None, :]
        first = tl.load(slots + request)
        last = tl.load(slots + request + 1)

        top = nothing_seen
        base = nothing_seen
        for slot in range(loop_bound(first), loop_bound(last)):
            state = slot * rows64
            base = tl.maximum(
                base, tl.load(part_lse + state + row, mask=there, other=float("-inf"))
            )
            top = tl.maximum(top, tl.load(part_top + state + row, mask=there, other=float("-inf")))
        base = finite_or_zero(base)

        total = tl.zeros([BLOCK_ROWS], tl.float32)
        # from its bits: Triton makes +0.0 of the constant -0.0
        minus_zero = tl.full([BLOCK_ROWS, BLOCK_DV], -(2**31), tl.int32).to(
            tl.float32, bitcast=True
        )
        summed = minus_zero
        for slot in range(loop_bound(first), loop_bound(last)):
            state = slot * rows64
            lse = tl.load(part_lse + state + row, mask=there, other=float("-inf"))
            values = widen(tl.load(part_out + state * DV + cells, mask=cells_there, other=0.0))
            weight = tl.exp(lse - base)
            total += weight
            seen = lse != float("-inf")
            summed += tl.where(seen[:, None], values * weight[:, None], minus_zero)

        nothing = total == 0.0
        divisor = tl.where(nothing, 1.0, total)
        lone = total == 1.0
        lse = tl.where(lone, base, base + tl.log(divisor))
        lse = tl.where(nothing, float("-inf"), lse)
        merged = tl.where(nothing[:, None], 0.0, summed / divisor[:, None])
        at = request * rows64
        tl.store(out_top + at + row, top, mask=there)
        tl.store(out_lse + at + row, lse, mask=there)
        tl.store(out + at * DV + cells, narrow(merged, out.dtype.element_ty), mask=cells_there)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """States of rows, contiguous: out [slots, rows, Dv] of any float dtype; lse and top float32
    [slots, rows].
    """

    out: Tensor
    lse: Tensor
    top: Tensor


def merge_launch(parts: Parts, slots: Tensor, merged: Parts, cores: Cores) -> Launch:
    """Merge the states ``slots[b]`` to ``slots[b + 1]`` of each request b into ``merged``'s b-th.

    slots: int32 [requests + 1] on the device. merged: as ``parts``, with requests for slots.

    Raises:
        ValueError: Dv above 512.
    """
    requests, rows, head_dim_v = merged.out.shape
    tile = merge_rows(requests * rows, head_dim_v, cores.vector)
    return Launch(
        merge_kernel,
        min(requests * -(-rows // tile), cores.vector),
        {
            "part_out": parts.out,
            "part_lse": parts.lse,
            "part_top": parts.top,
            "slots": slots,
            "out": merged.out,
            "out_lse": merged.lse,
            "out_top": merged.top,
            "requests": requests,
            "rows": rows,
            "DV": head_dim_v,
            "BLOCK_ROWS": tile,
            "BLOCK_DV": power_of_two(head_dim_v),
        },
    )


def merge_stacked(states: PartialState, cores: Cores, dtype: torch.dtype = torch.float32) -> Parts:
    """Merge float32 states stacked on axis 0: max and lse [N, ..., H], out [N, ..., H, Dv].

    dtype: of the merged out. The results have one request and all rows: out [1, rows, Dv].

    Raises:
        ValueError: Dv above 512.
    """
    count, head_dim_v, device = states.lse.shape[0], states.out.shape[-1], states.out.device
    rows = states.lse[0].numel()
    parts = Parts(
        states.out.reshape(count, rows, head_dim_v).contiguous(),
        states.lse.reshape(count, rows).contiguous(),
        states.max.reshape(count, rows).contiguous(),
    )
    merged = Parts(
        torch.empty(1, rows, head_dim_v, dtype=dtype, device=device),
        *(torch.empty(1, rows, device=device) for _ in range(2)),
    )
    slots = torch.tensor([0, count], dtype=torch.int32, device=device)
    merge_launch(parts, slots, merged, cores).run(device)
    return merged
