"""Who computes: backends in priority order, the choice, and the reasons."""

import torch

from splitkv.backends.ascend import AscendBackend
from splitkv.backends.base import Backend
from splitkv.backends.cpu import CpuBackend
from splitkv.backends.cuda import CudaBackend
from splitkv.common.spec import DecodeSpec
from splitkv.common.support import UnsupportedError

BACKENDS: tuple[Backend, ...] = (CudaBackend(), AscendBackend(), CpuBackend())
"""In priority order: the first without reasons wins."""


def backend_named(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        ValueError: nobody is; the text lists the known names.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise ValueError(f"unknown backend {name!r}, known: {[backend.name for backend in BACKENDS]}")


def reasons(
    backend: Backend, spec: DecodeSpec, device: torch.device | str | None = None
) -> list[str]:
    """Why ``backend`` cannot serve ``spec`` for tensors on ``device`` (None: any) on this
    machine.
    """
    found = []
    kind = None if device is None else _device_kind(device)
    if kind is not None and kind != backend.device_type:
        found.append(
            f"the tensors are on {kind}, it takes {backend.device_type} tensors; move them"
        )
    if (missing := backend.missing()) is not None:
        found.append(missing)
    return found + backend.refusals(spec)


def _device_kind(device: torch.device | str) -> str:
    """``cuda`` of ``cuda:1``; torch knows a vendor's name only with that vendor's library."""
    kind = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    known = [backend.device_type for backend in BACKENDS]
    if isinstance(device, str) and kind not in known:
        raise ValueError(f"unknown device {device!r}, known: {known}")
    return kind


def check_device(device: str) -> None:
    """Raise unless this machine has ``device`` and a backend for it.

    Raises:
        ValueError: no backend takes tensors of that name.
        UnsupportedError: the device or its library is not here, with the backend's sentence.
    """
    kind = _device_kind(device)
    for backend in BACKENDS:
        if backend.device_type == kind and (lack := backend.missing()) is not None:
            raise UnsupportedError(f"device {device!r}: {lack}")
    try:
        torch.device(device)
    except RuntimeError as fault:
        raise ValueError(f"device {device!r} is malformed: {fault}") from fault


def explain(spec: DecodeSpec, device: torch.device | str | None = None) -> dict[str, list[str]]:
    """Every backend's answer: its reasons against ``spec``, an empty list where it takes it. Runs
    nothing.
    """
    return {backend.name: reasons(backend, spec, device) for backend in BACKENDS}


def select(
    spec: DecodeSpec, device: torch.device | str | None = None, name: str | None = None
) -> Backend:
    """The first backend that takes ``spec``; with ``name``, that one or an error, never another.

    Raises:
        ValueError: ``name`` is not a backend.
        UnsupportedError: nobody (or not the named one) takes it; the text has every reason, and who
        can where somebody can.
    """
    candidates = BACKENDS if name is None else (backend_named(name),)
    for backend in candidates:
        if not reasons(backend, spec, device):
            return backend
    head = "no backend takes" if name is None else f"backend {name!r} does not take"
    lines = [f"{head} {spec}"]
    for backend in candidates:
        lines += [
            f"  {backend.name}:",
            *(f"    - {reason}" for reason in reasons(backend, spec, device)),
        ]
    if name is not None:
        able = [other.name for other in BACKENDS if not reasons(other, spec, device)]
        lines.append(f"  backends that take it: {', '.join(able) or 'none'}")
    raise UnsupportedError("\n".join(lines))
