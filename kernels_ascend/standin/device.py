"""Device ``npu`` held by host memory: every tensor reports ``npu:0`` and keeps its numbers in a CPU
tensor underneath.

None of this is Huawei's code, and nothing that runs on it says anything about a device: no timing,
no rounding, no kernel. It lets the host side of the Ascend backend (dispatch, layouts, lengths,
merge arithmetic) run where there is no NPU. Like a real NPU it refuses to mix devices, float64
matrix products and ``.numpy()``. No autograd, no compile, one stream, one device.

The name of torch's spare device slot can be given once per process: it stays ``npu`` after
``switch_off``, but then answers that no device is available.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

DEVICE_NAME = "Ascend910B3 (splitkv stand-in on the CPU, not a device)"

Kernel = Callable[[Mapping[str, Any]], Any]
"""Takes an operator's arguments by name, defaults filled in, tensors as CPU tensors; returns CPU
tensors.
"""

kernels: dict[str, Kernel] = {}
"""What runs for each qualified operator name, such as ``npu::npu_attention_update``."""


@dataclass(frozen=True, slots=True)
class Call:
    """One operator that reached the device; ``arguments`` by name for the operators in ``kernels``,
    else empty.
    """

    name: str
    arguments: Mapping[str, Any]

    @property
    def syncs(self) -> bool:
        """Whether the host had to wait for the device."""
        return self.name in _SYNCS


_SYNCS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "device to host"})
_CROSSES_DEVICES = frozenset(
    {"aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_"}
)
_CHANGES_SHAPE_IN_PLACE = frozenset(
    f"aten::{name}_" for name in ("resize", "set", "squeeze", "unsqueeze", "t", "transpose")
)
_MATMULS = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"})

# torch makes these by resizing an empty tensor, which a wrapper cannot follow
_RESIZING_FACTORIES = ("arange", "arange.start", "arange.start_step", "linspace", "randperm")

HOST_ARGUMENTS = frozenset({"npu::_npu_paged_attention"})
"""Operators that take a length tensor in host memory."""

_recorders: list[list[Call]] = []
_state = SimpleNamespace(named=False, available=False, registrations=[], tape=None)


@dataclass(slots=True)
class Taped:
    """One operator of a captured graph: what runs it again, and the CPU tensors that it fills."""

    name: str
    arguments: dict[str, Any]
    run: Callable[[], Any]
    filled: list[torch.Tensor]

    def replay(self) -> None:
        """Run it on what its inputs hold now."""
        found = _tensors(self.run())
        for target, value in zip(self.filled, found, strict=True):
            if value.data_ptr() != target.data_ptr():
                target.copy_(value)


class NpuTensor(torch.Tensor):
    """A tensor of device ``npu:0``; ``raw`` is the CPU tensor that holds its numbers."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "NpuTensor":
        tensor: NpuTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device("npu", 0),
        )
        tensor.raw = raw
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"npu({self.raw!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "NpuTensor":
        return NpuTensor(self.raw.clone())

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        _record("device to host", {})
        return self.raw.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(
            "can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )


class _DeviceModule:
    """What ``torch.npu`` answers."""

    @staticmethod
    def is_available() -> bool:
        return bool(_state.available)

    @staticmethod
    def is_initialized() -> bool:
        return bool(_state.available)

    @staticmethod
    def device_count() -> int:
        return 1 if _state.available else 0

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None:
        _check_index(
            torch.device("npu", device) if isinstance(device, int) else torch.device(device)
        )

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Nothing to wait for: every operator has finished when its call returns."""

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return _state.tape is not None

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return DEVICE_NAME

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers come from the CPU generator, which torch seeds itself."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False


class _Hooks(_DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return bool(_state.available)


def switch_on() -> None:
    """Make device ``npu`` exist in this process.

    Raises:
        RuntimeError: torch's spare device slot already has another name.
    """
    if not _state.named:
        _setup_privateuseone_for_python_backend(
            "npu", _DeviceModule(), _Hooks(), _DummyDeviceGuard()
        )
        _register_kernels()
        _state.named = True
    _state.available = True


def _register_kernels() -> None:
    library: Any = torch.library.Library
    fallback, aten = library("_", "IMPL"), library("aten", "IMPL")
    fallback.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")  # how a CPU tensor comes to the device
    for overload in _RESIZING_FACTORIES:
        aten.impl(overload, _on_host(overload), "PrivateUse1")
    # a Library that is collected takes its kernels along
    _state.registrations += [fallback, aten]


def switch_off() -> None:
    """Make device ``npu`` answer that it is not available; tensors that exist stay usable."""
    _state.available = False


@contextmanager
def recording() -> Iterator[list[Call]]:
    """The operators that reach the device inside the block, in order."""
    calls: list[Call] = []
    _recorders.append(calls)
    try:
        yield calls
    finally:
        _recorders.remove(calls)


@contextmanager
def taping(tape: list[Taped]) -> Iterator[None]:
    """Capture: the operators inside the block run once and are written down."""
    _state.tape = tape
    try:
        yield
    finally:
        _state.tape = None


def _tape(name: str, arguments: dict[str, Any], run: Callable[[], Any], out: Any) -> None:
    if _state.tape is not None:
        _state.tape.append(Taped(name, arguments, run, _tensors(out)))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _check_capture(waits: bool) -> None:
    if waits and _state.tape is not None:  # quirk: capture-no-wait
        raise RuntimeError("107027: Not allow to synchronize captured-stream")


def _record(name: str, arguments: Mapping[str, Any]) -> None:
    _check_capture(Call(name, {}).syncs)
    for calls in _recorders:
        calls.append(Call(name, arguments))


def _on_host(overload: str) -> Callable[..., Any]:
    name, _, variant = overload.partition(".")
    func = getattr(getattr(torch.ops.aten, name), variant or "default")
    return lambda *args, **kwargs: _run(func, args, kwargs)


def _check_index(device: torch.device) -> None:
    if device.type == "npu" and device.index not in (None, 0):
        raise RuntimeError(f"invalid device ordinal {device}: the stand-in has one device, npu:0")


def _unwrap(value: Any) -> Any:
    return value.raw if isinstance(value, NpuTensor) else value


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    _check_capture(not isinstance(source, NpuTensor))
    _unwrap(target).copy_(_unwrap(source))
    return target


def _check_one_device(name: str, leaves: list[Any]) -> None:
    if name in HOST_ARGUMENTS:
        leaves = _without_host_lengths(name, leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if name in _CROSSES_DEVICES or not any(isinstance(tensor, NpuTensor) for tensor in tensors):
        return
    for tensor in tensors:
        if not isinstance(tensor, NpuTensor) and (tensor.dim() > 0 or name in kernels):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"npu:0 and {tensor.device}! ({name}; copy it to the NPU first)"
            )


def _without_host_lengths(name: str, leaves: list[Any]) -> list[Any]:
    """The leaves but for an int32 list in host memory, which some operators want there."""
    lists = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 1]
    if any(isinstance(leaf, NpuTensor) for leaf in lists):  # quirk: atb-lengths-on-host
        raise RuntimeError(
            f"561002: {name.removeprefix('npu::')}: context_lens is on the NPU, tensor.hostData is "
            "null"
        )
    return [leaf for leaf in leaves if not any(leaf is one for one in lists)]


def _check_computable(name: str, leaves: list[Any]) -> None:
    if name in _CHANGES_SHAPE_IN_PLACE:
        raise RuntimeError(f"{name} is not modelled by the npu stand-in: take a view instead")
    if name in _MATMULS and any(
        isinstance(leaf, NpuTensor) and leaf.dtype == torch.float64 for leaf in leaves
    ):
        raise RuntimeError(f"{name}: an NPU has no float64 matrix product; cast to float32")


def _bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; torch drops those that equal their default, so defaults come back from
    the schema.
    """
    bound = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    bound |= {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
    return bound | dict(kwargs)


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    overload = func._schema.overload_name
    named = overload == "Tensor" or (overload == "out" and func.namespace == "npu")
    name = func._schema.name + (f".{overload}" if named else "")
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    _check_one_device(name, leaves)
    _check_computable(name, leaves)
    if name in kernels:
        arguments = _bind(func, args, kwargs)
        _record(name, arguments)
        raw = pytree.tree_map(_unwrap, arguments)
        out = kernels[name](raw)
        _tape(name, raw, lambda: kernels[name](raw), out)
        return pytree.tree_map(lambda value: _wrap(value, {}), out)
    return _run_on_host(func, name, args, dict(kwargs), leaves)


def _run_on_host(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
) -> Any:
    on_npu = [leaf for leaf in leaves if isinstance(leaf, NpuTensor)]
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        _check_index(wanted)
        kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
    to_host = bool(on_npu) and wanted is not None and wanted.type != "npu"
    _record("device to host" if to_host else name, {})
    sources = [leaf for leaf in leaves[1:2] if isinstance(leaf, torch.Tensor)]
    crosses = any(not isinstance(source, NpuTensor) for source in sources)
    _check_capture(name == "aten::copy_" and crosses)
    raw_args, raw_kwargs = pytree.tree_map(_unwrap, (args, kwargs))
    out = func(*raw_args, **raw_kwargs)
    _tape(name, {}, lambda: func(*raw_args, **raw_kwargs), out)
    if to_host:
        # a cast that changes nothing must still be a copy: host memory is not device memory
        return out.clone() if any(out is tensor.raw for tensor in on_npu) else out
    if wanted is None and not on_npu:
        return out
    known = {id(tensor.raw): tensor for tensor in on_npu}  # in-place and out= give the object back
    return pytree.tree_map(lambda value: _wrap(value, known), out)


def _wrap(value: Any, known: Mapping[int, NpuTensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wrapper = known.get(id(value))
    if wrapper is None:
        return NpuTensor(value)
    if wrapper.shape != value.shape:
        raise RuntimeError(
            f"an out= or in-place operator resized {list(wrapper.shape)} to {list(value.shape)}, "
            "which the npu stand-in does not model: hand it a tensor of the right shape"
        )
    return wrapper
