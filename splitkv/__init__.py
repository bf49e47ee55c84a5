"""Decode attention that means the same thing on NVIDIA GPUs and on Ascend NPUs."""

from splitkv.backends.append import append_kv
from splitkv.backends.decode import decode, merge_states, partial
from splitkv.backends.one_call import decode_attention, partial_attention
from splitkv.backends.registry import explain, select
from splitkv.common.cache import DenseCache, PackedCache, PagedCache, RingCache
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import PROFILES, DeviceProfile
from splitkv.common.ranks import merge_across_ranks
from splitkv.common.spec import DecodeSpec, Feature, Layout, ScaleKind
from splitkv.common.state import PartialState, finish
from splitkv.common.support import UnsupportedError

__version__ = "0.1.0"

__all__ = [
    "PROFILES",
    "DecodeSpec",
    "DenseCache",
    "DeviceProfile",
    "Feature",
    "Layout",
    "PackedCache",
    "PagedCache",
    "PartialState",
    "RingCache",
    "ScaleKind",
    "SplitPlan",
    "UnsupportedError",
    "append_kv",
    "decode",
    "decode_attention",
    "explain",
    "finish",
    "merge_across_ranks",
    "merge_states",
    "partial",
    "partial_attention",
    "plan_splits",
    "select",
]
