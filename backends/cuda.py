"""The cuda backend."""

from collections.abc import Sequence

import torch

from splitkv.backends.base import Backend, device_missing
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.profile import H200, DeviceProfile
from splitkv.common.spec import Feature
from splitkv.common.state import PartialState, merge_states_torch
from splitkv.common.support import No, Range, Support, Why


class CudaBackend(Backend):
    """Being written."""

    name = "cuda"
    device_type = "cuda"
    support = Support(
        dtypes=(torch.float16, torch.bfloat16),
        kv_dtypes=(torch.float16, torch.bfloat16),
        head_dim=Range(),
        head_dim_v=Range(),
        group=Range(),
        page_size=Range(),
        num_queries=Range(),
        features=dict.fromkeys(Feature, No(Why.NOT_YET, "being written")),
    )

    def missing(self) -> str | None:
        return device_missing(self.device_type)

    def profile(self) -> DeviceProfile:
        return H200

    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        raise NotImplementedError

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        return merge_states_torch(states)
