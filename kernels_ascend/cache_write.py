"""New rows into a cache by the vendor's write: the only file that spells its keywords.

``npu_scatter_pa_kv_cache`` serves ND caches on A2 and A3. ``_npu_reshape_and_cache`` takes nothing
there that it does not, and wants the NNAL package besides; on 310P its cache is NZ, which nobody
makes here. What the operator does not take is left to torch operators.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from splitkv.common.support import dtype_name
from splitkv.kernels_ascend.limits import Facts, violations
from splitkv.kernels_ascend.pools import page_step, whole_pages
from splitkv.kernels_ascend.runtime import device_name, operators
from splitkv.kernels_ascend.soc import Soc, soc_of

OPERATOR = "npu_scatter_pa_kv_cache"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class _Target:
    """A cache as the operator's [blocks, P, K, D], contiguous; where its heads come before its
    tokens, each (block, head) is a block of one head.

    step: blocks from one block of the caller's to the next. by_head: whether heads are blocks.
    """

    tensor: Tensor
    step: int
    by_head: bool


def write(
    k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, block: Tensor, offset: Tensor
) -> bool:
    """Write rows [n, K, D] and [n, K, Dv] to (block, offset) of k and v; False, and nothing is
    done, where the operator does not take them.

    k, v: [blocks, P, K, D] and [blocks, P, K, Dv], any strides; rows have their dtypes. block,
    offset: int64 [n] within the cache; a negative block is skipped. Nothing waits for the device.
    """
    targets = _target(k), _target(v)
    soc = soc_of(device_name() or "")
    if targets[0] is None or targets[1] is None or soc is None:
        return False
    if (targets[0].step, targets[0].by_head) != (targets[1].step, targets[1].by_head):
        return False
    if not hasattr(operators(), OPERATOR):  # releases before it
        return False
    places = max(target.tensor.shape[0] * k.shape[1] for target in targets if target is not None)
    if not _within_limits(soc, _stored(k.dtype), _stored(v.dtype), places):
        return False
    if not len(block) or not k.numel() or not v.numel():
        return True
    slots = _slots(targets[0], k, block, offset)
    tokens = [_tokens(targets[0], k_rows), _tokens(targets[1], v_rows)]
    caches = [_bits(target.tensor) for target in targets if target is not None]
    getattr(operators(), OPERATOR)(*tokens, *caches, slots, cache_mode="Norm")
    return True


@lru_cache(maxsize=256)
def _within_limits(soc: Soc, dtype: str, kv_dtype: str, slots: int) -> bool:
    return not violations(
        Facts(operator=OPERATOR, soc=soc, dtype=dtype, kv_dtype=kv_dtype, cache_form=4, slots=slots)
    )


def _target(cache: Tensor) -> _Target | None:
    """None where neither tokens nor heads lie one after the other."""
    for by_head, pages in ((False, cache), (True, cache.transpose(1, 2))):
        if (step := page_step(pages)) is not None:
            whole = whole_pages(pages, step)
            tensor = whole.flatten(0, 1)[:, :, None] if by_head else whole
            return _Target(tensor, step, by_head)
    return None


def _slots(target: _Target, cache: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """int32 [n] or, by head, [n * K]: block * P + offset, -1 for rows to skip."""
    _, page, heads, _ = cache.shape
    first = block * target.step
    if target.by_head:
        first = first[:, None] * heads + torch.arange(heads, device=block.device)
        block, offset = block[:, None], offset[:, None]
    return torch.where(block < 0, -1, first * page + offset).flatten().to(torch.int32)


def _tokens(target: _Target, rows: Tensor) -> Tensor:
    rows = _bits(rows.contiguous())
    return rows.flatten(0, 1)[:, None] if target.by_head else rows


def _bits(tensor: Tensor) -> Tensor:
    """8-bit floats as bytes, which the operator moves without knowing what they are."""
    return tensor.view(torch.int8) if tensor.dtype in _FLOAT8 else tensor


def _stored(dtype: torch.dtype) -> str:
    return dtype_name(torch.int8 if dtype in _FLOAT8 else dtype)
