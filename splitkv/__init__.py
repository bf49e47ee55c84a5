"""Decode attention that means the same thing on NVIDIA GPUs and on Ascend NPUs.

The names below are loaded when they are first used: ``splitkv doctor`` has to answer on a machine
where importing torch fails.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitkv.backends.append import append_kv
    from splitkv.backends.cascade.decode import cascade_decode, cascade_partial, plan_cascade
    from splitkv.backends.cascade.plan import CascadePlan
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
else:
    _HOMES = {
        "backends.append": ("append_kv",),
        "backends.cascade.decode": ("cascade_decode", "cascade_partial", "plan_cascade"),
        "backends.cascade.plan": ("CascadePlan",),
        "backends.decode": ("decode", "merge_states", "partial"),
        "backends.one_call": ("decode_attention", "partial_attention"),
        "backends.registry": ("explain", "select"),
        "common.cache": ("DenseCache", "PackedCache", "PagedCache", "RingCache"),
        "common.plan": ("SplitPlan", "plan_splits"),
        "common.profile": ("PROFILES", "DeviceProfile"),
        "common.ranks": ("merge_across_ranks",),
        "common.spec": ("DecodeSpec", "Feature", "Layout", "ScaleKind"),
        "common.state": ("PartialState", "finish"),
        "common.support": ("UnsupportedError",),
    }

    def __getattr__(name: str) -> object:
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(import_module(f"splitkv.{home}"), name)
                globals()[name] = value
                return value
        raise AttributeError(f"module 'splitkv' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "PROFILES",
    "CascadePlan",
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
    "cascade_decode",
    "cascade_partial",
    "decode",
    "decode_attention",
    "explain",
    "finish",
    "merge_across_ranks",
    "merge_states",
    "partial",
    "partial_attention",
    "plan_cascade",
    "plan_splits",
    "select",
]
