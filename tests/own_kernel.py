"""Our own Ascend kernels as a backend on CPU tensors, so that the case table can be run through
them: in Triton's interpreter, or wherever ``Launch.run`` is made to run them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from splitkv.backends.base import Backend
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.profile import ASCEND_910B3, DeviceProfile
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.state import PartialState
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.kernels.budget import Cores
from splitkv.matrix.case import Case, Size, make
from splitkv.matrix.cases import CASES

FP16 = torch.float16
MEET = (300, 7, 0, 131)
CORES = Cores(3)
"""Few, so that a program takes several work items, and a split several tiles."""


class OwnKernel(Backend):
    """The split and merge kernels of ``splitkv.kernels_ascend.kernels``."""

    name = "own kernel"
    device_type = "cpu"
    support = own.SUPPORT

    def missing(self) -> str | None:
        return None

    def profile(self) -> DeviceProfile:
        return replace(ASCEND_910B3, workers=CORES.cube)

    def refusals(self, spec: DecodeSpec) -> list[str]:
        return own.refusals(spec)

    def tensor_refusals(self, call: DecodeCall, plan: SplitPlan | None) -> list[str]:
        return own.tensor_refusals(call)

    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        assert plan is not None
        return own.split_decode(call, plan, CORES)

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        return own.merge_states(states, CORES)


_EVERYTHING: dict[str, Any] = {
    "sliding_window": 90,
    "anchor_tokens": 5,
    "logits_soft_cap": 10.0,
    "alibi": True,
    "attn_bias": True,
    "attn_mask": True,
    "columns": 8,
    "num_splits": 3,
}
EXTRA = (
    make("own-all", "all that changes scores, several queries", MEET, num_queries=3, **_EVERYTHING),
    make("own-all-fp16", "in float16, D 128", MEET, head_dim=128, dtype=FP16, **_EVERYTHING),
    make(
        "own-all-dense",
        "over a dense cache, T no multiple of a tile",
        MEET,
        layout=Layout.BNSD,
        odd_capacity=True,
        **_EVERYTHING,
    ),
    make("own-d256", "D 256, HND", MEET, head_dim=256, layout=Layout.HND, **_EVERYTHING),
    make("own-page-16", "pages of 16", MEET, page_size=16, **_EVERYTHING),
    make("own-page-48", "pages of three tiles", MEET, page_size=48, **_EVERYTHING),
    make("own-page-20", "pages that no tile divides", MEET, page_size=20, **_EVERYTHING),
    make("own-rows", "more rows than two tiles hold", MEET, num_queries=18, alibi=True),
    make(
        "own-rows-group-1", "G 1, several queries", MEET, num_kv_heads=8, num_queries=5, alibi=True
    ),
)
"""What the case table has only one at a time."""


def taken() -> tuple[Case, ...]:
    """The cases of the table that the kernels take."""
    return tuple(case for case in CASES if case.size is Size.SMALL and not own.refusals(case.spec))
