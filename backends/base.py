"""What a backend is: a declaration that can be read anywhere, and three computations."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState, finish
from splitkv.common.support import Support
from splitkv.common.visibility import IntArray


class Backend(ABC):
    """One way to compute. Subclasses declare ``name``, ``device_type`` and ``support``, and import
    their kernels inside methods only.

    A backend is handed calls that are already well formed and that it does not refuse; it validates
    nothing twice.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    """``torch.device.type`` of the tensors it takes."""
    support: ClassVar[Support]
    rounds_partials: ClassVar[bool] = False
    """Whether each split's ``out`` is rounded to the query's dtype before the merge; its error
    bound then allows for that.
    """
    batch_invariant: ClassVar[bool] = True
    """Whether a request's bits, its splits being fixed, do not depend on its batch mates, its
    place and its pages.
    """

    @property
    def evidence(self) -> str:
        """What a recorded run of it is worth: "device", or "stand-in" where an imitation
        computes.
        """
        return "device"

    @abstractmethod
    def missing(self) -> str | None:
        """Why this machine cannot run it (a library or a device, in a sentence), or None."""

    @abstractmethod
    def profile(self) -> DeviceProfile:
        """The device as the planner sees it."""

    @abstractmethod
    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        """The state of all queries over the cache: [B, S, H], or [sum of S, H] for packed
        queries.
        """

    @abstractmethod
    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        """States of the same queries over disjoint keys, merged."""

    def profile_for(self, spec: DecodeSpec) -> DeviceProfile:
        """The device as the planner sees it when ``spec`` is computed: what ``plan`` cuts for."""
        return self.profile()

    def refusals(self, spec: DecodeSpec) -> list[str]:
        """Every reason why it does not take ``spec``: value, limit, what to do. Needs no device."""
        return self.support.refusals(spec)

    def tensor_refusals(self, call: DecodeCall, plan: SplitPlan | None) -> list[str]:
        """Reasons that only a call's tensors and cuts show (strides, sizes); ``partial`` raises
        them.

        Reads no device data.
        """
        return []

    def route(self, spec: DecodeSpec) -> str | None:
        """Which of several ways of computing serves ``spec``, for people; None where there is
        one.
        """
        return None

    def plan(
        self,
        spec: DecodeSpec,
        seq_lens: Sequence[int] | IntArray,
        *,
        num_splits: int | None = None,
        split_size: int | None = None,
        capacity: int | None = None,
    ) -> SplitPlan:
        """Splits for these host lengths on this backend's device."""
        return plan_splits(
            spec,
            seq_lens,
            profile=self.profile_for(spec),
            num_splits=num_splits,
            split_size=split_size,
            capacity=capacity,
        )

    def plan_for(
        self, call: DecodeCall, *, num_splits: int | None = None, split_size: int | None = None
    ) -> SplitPlan | None:
        """A plan for this call's own lengths; None where the backend plans on the device
        instead.
        """
        lengths = call.cache.seq_lens
        return self.plan(call.spec, lengths.tolist(), num_splits=num_splits, split_size=split_size)

    def workspace_bytes(self, plan: SplitPlan) -> int:
        """Device memory for partial states that a call with ``plan`` needs."""
        return plan.partial_bytes

    def decode(
        self,
        call: DecodeCall,
        plan: SplitPlan | None,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` shaped like q and [B, S, H]; writes into ``out`` and ``lse`` where
        given.
        """
        result, result_lse = finish(self.partial(call, plan), sinks=sinks, dtype=call.q.dtype)
        if out is not None:
            result = out.copy_(result)
        if lse is not None:
            result_lse = lse.copy_(result_lse)
        return result, result_lse


def device_missing(device_type: str) -> str | None:
    """A sentence when torch sees no device of this type."""
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return f"torch {torch.__version__} sees no {device_type} device"
    return None
