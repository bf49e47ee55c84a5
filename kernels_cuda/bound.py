"""Calls like one that a plan has served: pointers are filled in, and the compiled kernels start.

Most of the host's time for a launch goes into arguments that are the same every time: triton looks
at each of some seventy. ``facts`` is all that they depend on. What is kept of the first call is its
compiled kernels and their arguments, pointers left open; a call of the same facts and plan fills
these in. Wherever an assumption does not hold, the kernels are launched the ordinary way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from splitkv.common.cache import PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.facts import ALIGNED, tensor_facts
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.plan import DevicePlan
from splitkv.kernels_cuda.states import Destination, Workspace

_KNOWN = triton.__version__.split(".")[:2] == ["3", "6"]
"""Versions whose ``JITFunction.run`` was read: what it specialises on, that it returns the compiled
kernel, how it starts that, and that the launcher takes integers for pointers."""


def can_start(device: torch.device) -> bool:
    """Whether compiled kernels may be started on ``device`` without triton's own preparations: it
    is the current one, its stream is not being captured, and nobody listens to launches.
    """
    return (
        _KNOWN
        and device.type == "cuda"
        and device.index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
        and not _observed()
    )


def facts(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: Tensor | None
) -> tuple[tuple[object, ...], list[int]] | None:
    """All that the launches for a call without ``kv_start`` depend on but for where its tensors
    lie; and where they lie, in bytes, 0 for None. None for subclasses of tensors.
    """
    found = tensor_facts(tensors_of(call, destination, sinks))
    if found is None:
        return None
    known, places = found
    cache = call.cache
    same = places[_K] == places[_V]
    return (Bound, plan, call.spec, type(cache), cache.layout, same, *known), places


@dataclass(frozen=True, slots=True, eq=False)
class _Start:
    """A compiled kernel and its arguments; those of ``open`` are (position, source, bytes past it).

    A source is a tensor of the call, by its place in ``facts``' pointers, or, past the last of
    them, the workspace.
    """

    run: Any
    before: tuple[object, ...]
    after: tuple[object, ...]
    arguments: list[object]
    open: tuple[tuple[int, int, int], ...]

    def __call__(self, stream: int, pointers: Sequence[int]) -> None:
        arguments = self.arguments.copy()
        for position, source, past in self.open:
            arguments[position] = pointers[source] + past
        self.run(*self.before, stream, *self.after, *arguments)


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What is kept of a call: its kernels in order, and how many floats of workspace they use."""

    starts: tuple[_Start, ...]
    workspace: int

    def start(self, device: torch.device, pointers: list[int]) -> bool:
        """Start the kernels, if the workspace lies as the first one did; whether they were."""
        workspace = torch.empty(self.workspace, device=device)
        pointers.append(workspace.data_ptr())
        if pointers[-1] % ALIGNED:
            return False
        stream = driver.active.get_current_stream(device.index)
        for start in self.starts:
            start(stream, pointers)
        return True


def bind_launches(
    launches: Mapping[Launch, object],
    call: DecodeCall,
    plan: DevicePlan,
    workspace: Workspace,
    destination: Destination,
    sinks: Tensor | None,
) -> Bound | None:
    """What to keep of ``launches``, each with what triton returned for it; None: nothing can be.

    Nothing, where a tensor is neither the call's, the plan's nor of the workspace (lengths that
    came from the host), or two tensors of the call lie at one place, so that a later call could
    tell them apart. Only k and v may, where both are the same in all calls of these facts.
    """
    tensors = tensors_of(call, destination, sinks)
    places = {
        tensor.data_ptr(): source
        for source, tensor in enumerate(tensors)
        if tensor is not None and tensor.numel()
    }
    given = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    twice = call.cache.k.data_ptr() == call.cache.v.data_ptr()
    if len(places) + twice != len(given):
        return None
    memory = workspace.out.untyped_storage()
    base, size = memory.data_ptr(), memory.nbytes()
    if base % ALIGNED:
        return None
    own = {
        value.data_ptr()
        for field in fields(plan)
        if isinstance(value := getattr(plan, field.name), Tensor)
    }
    starts = []
    for launch, compiled in launches.items():
        if not launch.programs:
            continue
        names = launch.kernel.arg_names
        if not isinstance(compiled, CompiledKernel) or set(names) != set(launch.arguments):
            return None
        if launch.kernel.pre_run_hooks:
            return None
        arguments = [launch.arguments[name] for name in names]
        opened = []
        for position, value in enumerate(arguments):
            if not isinstance(value, Tensor):
                continue
            arguments[position] = pointer = value.data_ptr() if value.numel() else 0
            if pointer in places:
                opened.append((position, places[pointer], 0))
            elif base <= pointer < base + size:
                opened.append((position, len(tensors), pointer - base))
            elif pointer and pointer not in own:
                return None
        starts.append(
            _Start(
                compiled.run,
                (launch.programs, 1, 1),
                (compiled.function, compiled.packed_metadata, None, None, None),
                arguments,
                tuple(opened),
            )
        )
    return Bound(tuple(starts), size // 4)


_K, _V = 1, 2
"""Places among ``tensors_of``."""


def tensors_of(
    call: DecodeCall, destination: Destination, sinks: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Those that a call brings, in one order."""
    cache = call.cache
    return (
        call.q,
        cache.k,
        cache.v,
        cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens,
        cache.block_table if isinstance(cache, PagedCache) else None,
        call.cu_seqlens_q,
        call.alibi_slopes,
        call.attn_bias,
        call.attn_mask,
        call.k_scale,
        call.v_scale,
        call.k_zero,
        call.v_zero,
        sinks,
        destination.out,
        destination.lse,
        destination.top,
    )


def _observed() -> bool:
    """Whether hooks want to hear of each launch."""
    runtime = triton.knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )
