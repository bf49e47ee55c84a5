"""npu_attention_update: an n-way merge by LSE, without a guard for rows that nobody attended to."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.standin.refusal import refuse

MAX_SHARDS = 16
_NAME = "npu_attention_update"


def attention_update(given: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Merge ``lse`` (float32 [R] each) and ``local_out`` ([R, D] each) over the shards."""
    lses, outs, update_type = given["lse"], given["local_out"], given["update_type"]
    _check(lses, outs, update_type)
    lse = torch.stack(lses)
    lse = torch.where(lse == math.inf, -math.inf, lse)  # quirk: update-plus-inf
    top = lse.amax(0)
    weights = torch.exp(lse - top)  # quirk: update-all-invalid (-inf - -inf is NaN)
    total = weights.sum(0)
    merged = torch.stack([out.float() for out in outs]).mul(weights[..., None]).sum(0)
    out = (merged / total[..., None]).to(outs[0].dtype)
    # quirk: update-type-0 (undefined on a device; empty here, so that nobody reads a result)
    return out, top + torch.log(total) if update_type == 1 else lse.new_empty(0)


def _check(lses: list[Tensor], outs: list[Tensor], update_type: int) -> None:
    if update_type not in (0, 1):
        refuse(_NAME, f"update_type {update_type} is not 0 or 1")
    if not 1 <= len(lses) <= MAX_SHARDS:  # quirk: update-shards
        refuse(_NAME, f"{len(lses)} shards, the limit is {MAX_SHARDS}")
    if len(lses) != len(outs):
        refuse(_NAME, f"{len(lses)} LSEs for {len(outs)} outputs")
    rows = lses[0].shape[0] if lses[0].dim() == 1 else -1
    for lse, out in zip(lses, outs, strict=True):
        if lse.dtype != torch.float32 or lse.dim() != 1:  # quirk: update-flat
            refuse(_NAME, f"lse must be float32 [R], got {lse.dtype} {list(lse.shape)}")
        if out.dim() != 2 or out.shape[0] != rows or lse.shape[0] != rows:
            refuse(_NAME, f"local_out must be [{rows}, D], got {list(out.shape)}")
        if (
            out.dtype not in (torch.float32, torch.float16, torch.bfloat16)
            or out.dtype != outs[0].dtype
        ):
            refuse(
                _NAME, f"local_out dtype {out.dtype} is not supported, or differs between shards"
            )
        if out.shape != outs[0].shape or out.shape[1] % 8 or not 8 <= out.shape[1] <= 512:
            refuse(_NAME, f"D {out.shape[1]} is not a multiple of 8 from 8 to 512")
