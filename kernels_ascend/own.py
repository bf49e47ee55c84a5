"""Our own Triton-Ascend kernels: attention with what the vendor's operators have no argument for,
and the merge of any number of states. Nothing imports triton before it computes.

No NPU has run them. What is checked: the interpreter's results, and those of the lowered code on a
CPU; and that they compile to HIVM for the targets named in ``tests_ascend_kernels``.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch

from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Feature
from splitkv.common.state import PartialState, as_list, stack_states
from splitkv.common.support import No, OneOf, Range, Support, UnsupportedError, Why
from splitkv.kernels_ascend.kernels.budget import MERGE_MOST_DIM, Cores, cores_of
from splitkv.kernels_ascend.runtime import device_name, is_standin

_DIMS = OneOf((64, 128, 256))
_FEATURES: dict[Feature, No | None] = dict.fromkeys(Feature, None) | {
    Feature.PACKED: No(
        Why.NOT_YET,
        "the own kernel reads paged and dense caches",
        "page the cache, or give it as BSND",
    ),
    Feature.PACKED_QUERIES: No(
        Why.NOT_YET,
        "the own kernel takes one S for all requests",
        "call once for each number of queries",
    ),
    Feature.WINDOW_BLOCKS: No(
        Why.NOT_YET,
        "the own kernel's window begins at a token",
        "leave route= out: the operators' routes are told of windows as lengths and tables",
    ),
    Feature.KV_START: No(
        Why.NOT_YET,
        "the own kernel's requests begin at 0",
        "give a block table that begins at the first visible page, and lengths to match",
    ),
    Feature.MIXED_DTYPE: No(
        Why.NOT_YET,
        "the own kernel multiplies queries and keys of one dtype",
        "convert the queries",
    ),
    Feature.KV_SCALES: No(
        Why.NOT_YET, "the own kernel has no dequantisation", "dequantise into a 16-bit cache"
    ),
    Feature.KV_FINE_SCALES: No(
        Why.NOT_YET, "the own kernel has no dequantisation", "dequantise into a 16-bit cache"
    ),
    Feature.KV_ZERO_POINTS: No(
        Why.NOT_YET, "the own kernel has no dequantisation", "dequantise into a 16-bit cache"
    ),
    Feature.KV_INT4: No(
        Why.NOT_YET, "the own kernel has no dequantisation", "dequantise into a 16-bit cache"
    ),
}
SUPPORT = Support(
    dtypes=(torch.float16, torch.bfloat16),
    kv_dtypes=(torch.float16, torch.bfloat16),
    head_dim=_DIMS,
    head_dim_v=_DIMS,
    group=Range(),
    page_size=Range(),
    num_queries=Range(),
    features=_FEATURES,
)
"""What the split kernel takes."""


def missing() -> str | None:
    """Why this machine cannot run the kernels, in a sentence, or None."""
    if is_standin():
        return "the stand-in for torch_npu runs operators, not kernels"
    found = importlib.util.find_spec("triton")
    places = [] if found is None else found.submodule_search_locations or []
    if any((Path(place) / "backends" / "ascend").is_dir() for place in places):
        return None
    return "no triton with an Ascend backend is installed; install triton-ascend"


def refusals(spec: DecodeSpec) -> list[str]:
    """Every reason why the split kernel does not take ``spec``: value, limit, what to do."""
    return SUPPORT.refusals(spec)


def tensor_refusals(call: DecodeCall) -> list[str]:
    """Reasons that only a call's strides show; no device data is read."""
    return [
        f"{name} has stride {tensor.stride(-1)} in its last dimension: the own kernel reads whole "
        "rows, stride 1; make it contiguous"
        for name, tensor in (("k", call.cache.k), ("v", call.cache.v))
        if tensor.numel() and tensor.stride(-1) != 1
    ]


def split_decode(call: DecodeCall, plan: SplitPlan, cores: Cores | None = None) -> PartialState:
    """The state of all queries of ``call`` over its cache, [B, S, H], float32, no sink in it.

    cores: None for those of the current device. Lengths are read on the device.

    Raises:
        UnsupportedError: ``tensor_refusals`` has a reason; nothing was launched.
    """
    from splitkv.kernels_ascend.kernels import decode

    if reasons := tensor_refusals(call):
        raise UnsupportedError("\n".join(["own kernel:", *(f"    - {one}" for one in reasons)]))
    return decode.split_decode(call, plan, cores or cores_of(device_name()))


def mergeable(state: PartialState) -> bool:
    """Whether the merge kernel takes states like this one."""
    return state.out.dtype == torch.float32 and state.out.shape[-1] <= MERGE_MOST_DIM


def merge_states(
    states: Sequence[PartialState] | PartialState, cores: Cores | None = None
) -> PartialState:
    """Merge float32 states of the same queries over disjoint keys.

    Raises:
        ValueError: no state, states that differ in shape, dtype or device, or Dv above 512.
    """
    from splitkv.kernels_ascend.kernels import merge

    parts = as_list(states)
    if len(parts) == 1:
        return parts[0]
    merged = merge.merge_stacked(stack_states(parts), cores or cores_of(device_name()))
    shape = parts[0].lse.shape
    return PartialState(merged.top.view(shape), merged.lse.view(shape), merged.out.view(*shape, -1))
