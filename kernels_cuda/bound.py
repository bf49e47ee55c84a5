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
from triton.backends.nvidia.driver import CudaLauncher
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
kernel, how it starts that, and what the launcher takes (integers for pointers)."""


def can_start(device: torch.device) -> bool:
    """Whether compiled kernels may be started on ``device`` without triton's own preparations: it
    is the current one, its stream is not being captured, and nobody listens to launches.
    """
    return device.type == "cuda" and _free(device.index)


def _free(index: int) -> bool:
    runtime = triton.knobs.runtime
    return (
        _KNOWN
        and index == torch.cuda.current_device()
        and not torch.cuda.is_current_stream_capturing()
        and not getattr(runtime.launch_enter_hook, "calls", True)
        and not getattr(runtime.launch_exit_hook, "calls", True)
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
    them, the workspace. ``run`` takes the grid, the stream, what is fixed, the kernel's own.
    """

    run: Any
    arguments: list[object]
    open: tuple[tuple[int, int, int], ...]

    def __call__(self, stream: int, pointers: Sequence[int]) -> None:
        arguments = self.arguments.copy()
        arguments[_STREAM] = stream
        for position, source, past in self.open:
            arguments[position] = pointers[source] + past
        self.run(*arguments)


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """What is kept of a call: its kernels in order, and what their workspace is like (None: there
    is none).
    """

    starts: tuple[_Start, ...]
    workspace: Tensor | None

    def start(self, index: int, pointers: list[int]) -> bool:
        """Start the kernels on the device of this index, if the workspace lies as the first one
        did; whether they were.
        """
        if self.workspace is not None:
            workspace = torch.empty_like(self.workspace)
            pointers.append(workspace.data_ptr())
            if pointers[-1] % ALIGNED:
                return False
        stream = driver.active.get_current_stream(index)
        for start in self.starts:
            start(stream, pointers)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedDecode:
    """A whole decode by kept kernels.

    plan: keeps the memory that they read. index: the device's. out, lse: like those that are
    returned where none is given. past: of each, bytes past an aligned place. reach: of each, bytes
    from its first to its end.
    """

    kernels: Bound
    plan: DevicePlan
    index: int
    out: Tensor
    lse: Tensor
    past: tuple[int, int]
    reach: tuple[int, int]

    def __call__(
        self, pointers: list[int], out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """``(out, lse)`` as given, or new ones; None: nothing was started.

        pointers: one for each of ``tensors_of`` but the last (there is no top), 0 for None.
        """
        if not _free(self.index):
            return None
        if out is None:
            out = torch.empty_like(self.out)
            pointers[_OUT] = out.data_ptr()
        if lse is None:
            lse = torch.empty_like(self.lse)
            pointers[_LSE] = lse.data_ptr()
        left, right = pointers[_OUT], pointers[_LSE]
        if (left % ALIGNED, right % ALIGNED) != self.past:
            return None
        if left < right + self.reach[1] and right < left + self.reach[0]:
            return None  # they may share memory, which is to be looked into
        pointers.append(0)
        return (out, lse) if self.kernels.start(self.index, pointers) else None


def repeated_decode(
    call: DecodeCall,
    plan: DevicePlan,
    memo: Mapping[object, object],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> RepeatedDecode | None:
    """What makes calls like ``call`` again, which was decoded into ``out`` and ``lse`` (in its
    caller's shape), if ``memo`` has its kernels and no tensor of it is elsewhere than q: what is on
    the host has to be read again.
    """
    whole = Destination(out, lse)
    if out.ndim < call.q.ndim:
        whole = Destination(out[:, None], lse[:, None])
    device = call.q.device
    if call.kv_start is not None or not can_start(device):
        return None
    tensors = tensors_of(call, whole, sinks)
    if any(tensor is not None and tensor.device != device for tensor in tensors):
        return None
    found = facts(call, plan, whole, sinks)
    kernels = None if found is None else memo.get(found[0])
    if not isinstance(kernels, Bound):
        return None
    return RepeatedDecode(
        kernels,
        plan,
        device.index,
        _pattern(out.shape, out.dtype, device),
        _pattern(lse.shape, lse.dtype, device),
        (out.data_ptr() % ALIGNED, lse.data_ptr() % ALIGNED),
        (_reach(out), _reach(lse)),
    )


def _pattern(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One element that stands for a tensor: making others like it takes half the time that it does
    by shape, dtype and device.
    """
    return torch.empty(1, dtype=dtype, device=device).expand(shape)


def _reach(tensor: Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


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
        run, fixed = _launcher(compiled)
        grid_and_stream = (launch.programs, 1, 1, None)
        own_arguments = (launch.arguments[name] for name in names)
        arguments = [*grid_and_stream, compiled.function, *fixed, *own_arguments]
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
        starts.append(_Start(run, arguments, tuple(opened)))
    pattern = _pattern((size // 4,), torch.float32, call.q.device) if size else None
    return Bound(tuple(starts), pattern)


def _launcher(compiled: CompiledKernel) -> tuple[Any, tuple[object, ...]]:
    """What starts ``compiled``, and what it takes between the function and the kernel's arguments:
    metadata, and no hooks. For a kernel without scratch memory it is triton's compiled launcher,
    past the wrapper that would allocate that.
    """
    run = compiled.run
    hooks = (compiled.packed_metadata, None, None, None)
    if type(run) is CudaLauncher and not (run.global_scratch_size or run.profile_scratch_size):
        return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None, *hooks)
    return run, hooks


_K, _V, _OUT, _LSE = 1, 2, 14, 15
"""Places among ``tensors_of``."""
_STREAM = 3
"""Its place among a launcher's arguments."""


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
