"""The CUDA backend: Triton kernels on NVIDIA GPUs, or in Triton's interpreter on the CPU."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from splitkv.backends.base import Backend, device_missing
from splitkv.backends.repeated import Repeats
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.profile import A100, H200, DeviceProfile
from splitkv.common.spec import QUANTISED_DTYPES, DecodeSpec, Feature
from splitkv.common.state import PartialState, as_list, merge_states_torch, stack_states
from splitkv.common.support import No, Range, Support, Why, dtype_name

if TYPE_CHECKING:
    from splitkv.kernels_cuda.bound import RepeatedDecode
    from splitkv.kernels_cuda.states import Destination

_SMALLEST_CAPABILITY = (8, 0)
"""bfloat16 in tensor cores, asynchronous copies: what the kernels are compiled for."""

E4M3_CAPABILITY = (8, 9)
"""The first with an instruction that converts e4m3; triton compiles the type for no earlier one."""
_WIDEST_QUANTISED = 256

_LITTLE_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""With 100 KB of it in a multiprocessor (CUDA C++ programming guide, compute capabilities): room
for one program of up to 75 KB, where 164 KB and more have room for two.
"""
_WIDEST_WITH_COMPANY = 256
"""Head dims up to which a profile's neighbours share a multiprocessor."""

_NO_TRITON = "triton is not installed; pip install 'splitkv[cuda]'"


class CudaBackend(Backend, Repeats):
    """Triton kernels: one for the splits, one that merges them, by a plan of host or device."""

    name = "cuda"
    device_type = "cuda"
    support = Support(
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        kv_dtypes=(torch.float16, torch.bfloat16, torch.float32, *QUANTISED_DTYPES),
        head_dim=Range(1, 576),
        head_dim_v=Range(1, 512),
        group=Range(1, 128),
        page_size=Range(),
        num_queries=Range(),
        features=dict.fromkeys(Feature, None)
        | {
            Feature.MIXED_DTYPE: No(
                Why.NOT_YET,
                "the kernels multiply queries and keys of one dtype",
                "convert q to the cache's dtype",
            ),
        },
    )

    def missing(self) -> str | None:
        if (no_device := device_missing(self.device_type)) is not None:
            return no_device
        capability = torch.cuda.get_device_capability()
        if capability < _SMALLEST_CAPABILITY:
            return (
                f"{torch.cuda.get_device_name()} has compute capability {_dotted(capability)}, "
                f"the kernels need {_dotted(_SMALLEST_CAPABILITY)}"
            )
        if not _has_triton():
            return _NO_TRITON
        if _interpreting():
            return "TRITON_INTERPRET is on: kernels would not run on the GPU; unset it, start again"
        return None

    def refusals(self, spec: DecodeSpec) -> list[str]:
        """What the declaration refuses, and limits on quantised caches: e4m3 by the device that is
        there, if one is.
        """
        found = super().refusals(spec)
        wide = max(spec.head_dim, spec.head_dim_v)
        if spec.cache_dtype in QUANTISED_DTYPES and wide > _WIDEST_QUANTISED:
            found.append(
                f"kv_dtype {dtype_name(spec.cache_dtype)} with head dim {wide}: the kernel for "
                f"head dims above {_WIDEST_QUANTISED} reads no quantised cache yet; use a cache of "
                "float16 or bfloat16"
            )
        if spec.cache_dtype == torch.float8_e4m3fn and torch.cuda.is_available():
            capability = torch.cuda.get_device_capability()
            if capability < E4M3_CAPABILITY:
                found.append(
                    f"kv_dtype float8_e4m3fn needs compute capability {_dotted(E4M3_CAPABILITY)}, "
                    f"{torch.cuda.get_device_name()} has {_dotted(capability)}; use float8_e5m2 or "
                    "int8"
                )
        return found

    def profile(self) -> DeviceProfile:
        return _profile(torch.cuda.current_device())

    def profile_for(self, spec: DecodeSpec) -> DeviceProfile:
        """Wide heads take a multiprocessor to themselves, and a program for every 64 rows."""
        profile = self.profile()
        if max(spec.head_dim, spec.head_dim_v) <= _WIDEST_WITH_COMPANY:
            return profile
        row_tiles = -(-spec.num_queries * spec.group // 64)
        workers = max(profile.workers // (profile.neighbours * row_tiles), 1)
        return replace(profile, workers=workers, neighbours=1, alone=1.0, together=1.0)

    def plan_for(
        self, call: DecodeCall, *, num_splits: int | None = None, split_size: int | None = None
    ) -> SplitPlan:
        """A plan for this call's own lengths, made where they live: nobody waits for the device."""
        if call.cache.seq_lens.device.type != self.device_type:
            plan = super().plan_for(call, num_splits=num_splits, split_size=split_size)
            assert plan is not None
            return plan
        from splitkv.kernels_cuda.cut import plan_on_device

        return plan_on_device(
            call, self.profile_for(call.spec), num_splits=num_splits, split_size=split_size
        )

    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        from splitkv.kernels_cuda.states import Destination

        device = call.q.device
        lse, top = (torch.empty(call.rows, device=device) for _ in range(2))
        out = torch.empty((*call.rows, call.spec.head_dim_v), device=device)
        self._attend(call, plan, Destination(out, lse, top), None)
        return PartialState(top, lse, out)

    def decode(
        self,
        call: DecodeCall,
        plan: SplitPlan | None,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        from splitkv.kernels_cuda.states import Destination

        device = call.q.device
        if out is None:
            out = torch.empty((*call.rows, call.spec.head_dim_v), dtype=call.q.dtype, device=device)
        if lse is None:
            lse = torch.empty(call.rows, device=device)
        self._attend(call, plan, Destination(out, lse), sinks)
        return out, lse

    def repeated(
        self, call: DecodeCall, plan: SplitPlan, sinks: Tensor | None, out: Tensor, lse: Tensor
    ) -> "RepeatedDecode | None":
        from splitkv.kernels_cuda.bound import repeated_decode
        from splitkv.kernels_cuda.plan import bind

        return repeated_decode(call, bind(plan, call.q.device), plan.bound, sinks, out, lse)

    def _attend(
        self,
        call: DecodeCall,
        plan: SplitPlan | None,
        destination: "Destination",
        sinks: Tensor | None,
    ) -> None:
        from splitkv.kernels_cuda.attention import attend
        from splitkv.kernels_cuda.plan import bind

        memo = None if plan is None else plan.bound
        if plan is None:
            plan = self.plan_for(call)
        attend(call, bind(plan, call.q.device), destination, sinks, memo)

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        """Merge in one launch; float64 states, the oracle's, in torch expressions."""
        parts = as_list(states)
        if len(parts) == 1:
            return parts[0]
        if parts[0].lse.dtype == torch.float64:
            return merge_states_torch(parts)
        from splitkv.kernels_cuda.merge import merge_stacked

        return merge_stacked(states if isinstance(states, PartialState) else stack_states(parts))


class InterpretedCudaBackend(CudaBackend):
    """The same kernels on CPU tensors in Triton's interpreter.

    A run of it is evidence for the kernels' arithmetic, not for any device.
    Not in the registry: nobody gets it without naming it. It plans as for an H200.
    """

    device_type = "cpu"

    @property
    def evidence(self) -> str:
        return "interpreter"

    def missing(self) -> str | None:
        if not _has_triton():
            return _NO_TRITON
        if not _interpreting():
            return "Triton's interpreter is off; set TRITON_INTERPRET=1 before triton is imported"
        return None

    def profile(self) -> DeviceProfile:
        return H200


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _interpreting() -> bool:
    from splitkv.kernels_cuda.primitives import INTERPRETED

    return bool(INTERPRETED.value)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


@functools.cache
def _profile(device: int) -> DeviceProfile:
    """Multiprocessors are read from the device; the other numbers are the nearest known one's."""
    properties = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    known = H200 if (9, 0) <= capability < (12, 0) else A100
    if capability in _LITTLE_SHARED_MEMORY:
        cores = known.workers // known.neighbours
        known = replace(known, workers=cores, neighbours=1, alone=1.0, together=1.0)
    workers = properties.multi_processor_count * known.neighbours
    exact = any(name in properties.name for name in ("H200", "A100"))
    return replace(
        known,
        name=properties.name,
        workers=workers,
        read_bandwidth=known.read_bandwidth * (1 if exact else workers / known.workers),
        source=f"{properties.multi_processor_count} SMs read from the device; "
        f"other numbers of {known.name}"
        + ("" if exact else ", bandwidth in proportion to SMs (assumed)"),
    )
