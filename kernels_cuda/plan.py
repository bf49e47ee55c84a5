"""A plan as the kernels read it: work items and workspace slots, on the device."""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.plan import Int32Array, SplitMode, SplitPlan

ITEM_FIELDS = 5
"""request, start, end, whether it opens the request's window, workspace slot"""


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """items: int32 [5, capacity], one column per split, longest first. slots: int32 [B + 1].
    merged: int32 [1 + B], how many requests have partial states, then which.

    An item holds request, start, end, whether it opens the request's window, and the workspace slot
    of its partial state: -1 where the request has no other item, whose result is then final. Every
    request has an item, if an empty one, so that every row of the output is written. Columns past
    the last item hold request -1. Partial states of request b lie in slots[b] to slots[b + 1].
    num_items, num_slots, num_merged: how many there are (items, slots, requests to be merged), or
    an upper bound where the cuts were made on the device; max_slots: how many slots there can be
    after a refresh; most_states: of one request.
    """

    items: Tensor
    slots: Tensor
    merged: Tensor
    num_items: int
    num_slots: int
    num_merged: int
    max_slots: int
    most_states: int

    @property
    def capacity(self) -> int:
        return self.items.shape[1]

    @property
    def batch(self) -> int:
        return self.slots.shape[0] - 1

    @classmethod
    def over(
        cls,
        buffer: Tensor,
        batch: int,
        *,
        num_items: int,
        num_slots: int,
        num_merged: int,
        max_slots: int,
        most_states: int,
    ) -> "DevicePlan":
        """Views of ``buffer``, int32 [``table_size``]."""
        capacity = (len(buffer) - table_size(0, batch)) // ITEM_FIELDS
        items, slots, merged = buffer.split([ITEM_FIELDS * capacity, batch + 1, batch + 1])
        return cls(
            items.view(ITEM_FIELDS, capacity),
            slots,
            merged,
            num_items,
            num_slots,
            num_merged,
            max_slots,
            most_states,
        )

    def refreshable(self) -> "DevicePlan":
        """The same memory, to be launched over all that a refreshed plan may come to hold.

        Any number of programs merges all: there are as many as now do it well, and enough for a
        few requests, since where nothing is merged each costs what it takes to start.
        """
        return replace(
            self,
            num_items=self.capacity,
            num_slots=self.max_slots,
            num_merged=max(self.num_merged, min(self.batch, _MERGED_AT_LEAST)),
            most_states=self.max_slots,
        )


_MERGED_AT_LEAST = 8
"""Requests that a captured merge has programs for."""


def table_size(capacity: int, batch: int) -> int:
    """Numbers in the memory of a plan."""
    return ITEM_FIELDS * capacity + 2 * (batch + 1)


_buffers: WeakKeyDictionary[SplitPlan, dict[torch.device, Tensor]] = WeakKeyDictionary()
"""A plan keeps its memory when it is refreshed: a captured graph goes on reading it."""


def bind(plan: SplitPlan, device: torch.device) -> DevicePlan:
    """The device's copy of ``plan``, uploaded at its first use and after ``plan.refresh``.

    A CUDA graph keeps reading this copy, so the plan must outlive the graph; after ``plan.refresh``
    call ``bind`` (or decode once) before the graph is replayed, and the graph computes by the new
    cuts.

    Raises:
        RuntimeError: the upload would have to happen during CUDA graph capture.
    """
    key = bound_key(device)
    if (bound := plan.bound.get(key)) is None:
        if capturing(device):
            raise RuntimeError(
                "the first use of a plan uploads it, which a CUDA graph cannot capture; "
                "decode once before the capture"
            )
        bound = plan.bound[key] = _upload(plan, device)
    assert isinstance(bound, DevicePlan)
    return bound


def bound_key(device: torch.device) -> tuple[object, ...]:
    """Where ``plan.bound`` keeps the device's copy."""
    return (DevicePlan, device)


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; a host tensor goes through pinned memory, so that nobody waits.

    Raises:
        RuntimeError: during CUDA graph capture, whose replays would read the same host memory
        again.
    """
    if tensor.device == device:
        return tensor
    if capturing(device):
        raise RuntimeError(
            "lengths and offsets must live on the device while a CUDA graph is captured, "
            "got host tensors"
        )
    return tensor.pin_memory().to(device, non_blocking=True)


def device_offsets(call: DecodeCall) -> Tensor | None:
    """``cu_seqlens_q`` where the kernels read it."""
    if call.cu_seqlens_q is None:
        return None
    return to_device(call.cu_seqlens_q, call.q.device).contiguous()


def _upload(plan: SplitPlan, device: torch.device) -> DevicePlan:
    size = table_size(len(plan.request) + plan.batch, plan.batch)
    flat = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    num_items, num_slots, num_merged = _write_tables(plan, flat.numpy())
    buffers = _buffers.setdefault(plan, {})
    if device not in buffers:
        buffers[device] = torch.empty(size, dtype=torch.int32, device=device)
    buffers[device].copy_(flat, non_blocking=True)
    whole = plan.mode is SplitMode.WHOLE and not (
        plan.spec.sliding_window and plan.spec.anchor_tokens
    )
    return DevicePlan.over(
        buffers[device],
        plan.batch,
        num_items=num_items,
        num_slots=num_slots,
        num_merged=num_merged,
        max_slots=0 if whole else len(plan.request),
        most_states=plan.max_splits,
    )


def _write_tables(plan: SplitPlan, flat: Int32Array) -> tuple[int, int, int]:
    """Write the tables of a host plan; returns the numbers of items, slots and merged requests."""
    count, indptr = plan.num_splits, plan.indptr
    items = flat[: -2 * len(indptr)].reshape(ITEM_FIELDS, -1)
    slots, merged = flat[-2 * len(indptr) :].reshape(2, -1)
    counts = indptr[1:] - indptr[:-1]
    shared = counts > 1
    which = np.flatnonzero(shared)
    merged[0] = len(which)
    merged[1 : 1 + len(which)] = which
    merged[1 + len(which) :] = -1
    slots[0] = 0
    np.add.accumulate(np.where(shared, counts, 0), out=slots[1:])
    request, start, end = plan.request[:count], plan.start[:count], plan.end[:count]
    slot = np.arange(count) + (slots - indptr)[request]
    slot[~shared[request]] = -1
    order = plan.launch_order
    for row, column in zip(
        items, (request, start, end, plan.window_first[:count], slot), strict=True
    ):
        row[:count] = column[order]
    items[:, count:] = -1
    idle = np.flatnonzero(counts == 0)
    items[0, count : count + len(idle)] = idle
    items[1:4, count : count + len(idle)] = 0
    return count + len(idle), int(slots[-1]), len(which)
