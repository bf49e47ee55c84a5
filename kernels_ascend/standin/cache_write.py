"""The two cache writes: new tokens go to slots (block * P + offset) of an ND cache (blocks, P, K,
D).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.standin.refusal import StandinGapError, refuse

_ATB_DTYPES = (torch.float16, torch.bfloat16, torch.int8)
_DTYPES = (
    torch.float16,
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
)


def scatter_pa_kv_cache(given: Mapping[str, Any]) -> None:
    """npu_scatter_pa_kv_cache in mode Norm."""
    operator = "npu_scatter_pa_kv_cache"
    for name in ("compress_lens", "compress_seq_offsets", "seq_lens"):
        if given[name] is not None:
            raise StandinGapError(f"{operator}: the stand-in does not model {name}")
    if given["cache_mode"] not in ("Norm", None):  # quirk: scatter-default-is-nz
        if given["key_cache"].shape[-1] == 16:
            raise StandinGapError(f"{operator}: the stand-in does not model the NZ cache")
        refuse(
            operator, f"cache_mode {given['cache_mode']!r} on an ND cache scrambles it; pass 'Norm'"
        )
    _write(operator, given, given["slot_mapping"], (torch.int32, torch.int64), _DTYPES)


def reshape_and_cache(given: Mapping[str, Any]) -> None:
    """_npu_reshape_and_cache on an ND cache."""
    # quirk: reshape-slots-int32
    _write("_npu_reshape_and_cache", given, given["slot_indices"], (torch.int32,), _ATB_DTYPES)


def _write(
    operator: str,
    given: Mapping[str, Any],
    slots: Tensor,
    slot_dtypes: tuple[torch.dtype, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if slots.dtype not in slot_dtypes:
        refuse(operator, f"slots must be one of {slot_dtypes}, got {slots.dtype}")
    key, value = given["key"], given["value"]
    if key.dtype != value.dtype:  # quirk: scatter-one-dtype
        refuse(operator, f"keys {key.dtype} and values {value.dtype} must share one dtype")
    if key.shape[:2] != value.shape[:2]:  # quirk: scatter-value-dim (the last may differ)
        refuse(operator, f"keys {list(key.shape)} and values {list(value.shape)} differ")
    for tokens, cache in (
        (given["key"], given["key_cache"]),
        (given["value"], given["value_cache"]),
    ):
        _check_pair(operator, tokens, cache, slots, dtypes)
    kept = slots >= 0  # quirk: scatter-negative-slot
    targets = slots[kept].long()
    if len(set(targets.tolist())) != len(targets):  # quirk: scatter-duplicate-slot
        refuse(operator, f"slots repeat: {slots.tolist()}")
    for tokens, cache in (
        (given["key"], given["key_cache"]),
        (given["value"], given["value_cache"]),
    ):
        cache.flatten(0, 1)[targets] = tokens[kept]


def _check_pair(
    operator: str, tokens: Tensor, cache: Tensor, slots: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    if tokens.dtype not in dtypes or tokens.dtype != cache.dtype:
        refuse(
            operator, f"tokens {tokens.dtype} and cache {cache.dtype} must share one of {dtypes}"
        )
    if tokens.dim() != 3 or cache.dim() != 4 or tokens.shape[1:] != cache.shape[2:]:
        refuse(operator, f"tokens {list(tokens.shape)} do not fit cache {list(cache.shape)}")
    if slots.shape != tokens.shape[:1]:
        refuse(operator, f"{list(slots.shape)} slots for {tokens.shape[0]} tokens")
    if not (tokens.is_contiguous() and cache.is_contiguous()):  # quirk: contiguous
        refuse(operator, "tokens and cache must be contiguous")
