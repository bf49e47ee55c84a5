"""The CPU backend: torch on the CPU, every feature, and float64 on request."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from splitkv.backends.base import Backend
from splitkv.backends.cpu_attention import attend
from splitkv.backends.cpu_work import scratch_bytes
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.profile import CPU, DeviceProfile
from splitkv.common.spec import FLOAT_DTYPES, QUANTISED_DTYPES, Feature
from splitkv.common.state import PartialState, merge_states_torch
from splitkv.common.support import Range, Support


class CpuBackend(Backend):
    """Torch on the CPU: takes everything. float64 q, k and v make it the oracle."""

    name = "cpu"
    device_type = "cpu"
    support = Support(
        dtypes=FLOAT_DTYPES,
        kv_dtypes=FLOAT_DTYPES + QUANTISED_DTYPES,
        head_dim=Range(),
        head_dim_v=Range(),
        group=Range(),
        page_size=Range(),
        num_queries=Range(),
        features=dict.fromkeys(Feature, None),
    )

    def missing(self) -> str | None:
        return None

    def profile(self) -> DeviceProfile:
        """One worker: a product already uses every thread, so that splits would only add merges."""
        threads = torch.get_num_threads()
        source = f"{CPU.source}; {threads} threads (torch.get_num_threads()) work as one"
        return replace(CPU, workers=1, source=source)

    def workspace_bytes(self, plan: SplitPlan) -> int:
        """Bytes of partial states and of the scratch that the calling thread keeps."""
        return plan.partial_bytes + scratch_bytes(plan.spec)

    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        assert plan is not None  # plan_for always gives one: host lengths cost nothing here
        # autocast would round scores to 16 bits, autograd would hold on to the scratch
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return attend(call, plan)

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        return merge_states_torch(states)
