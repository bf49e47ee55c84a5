"""``splitkv doctor``: versions, devices, and what each backend can do here.

Libraries are looked up by their metadata, and torch is imported in another process first: where a
device's library breaks it, this one still has to say so.
"""

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from splitkv import __version__
from splitkv.cli.ascend_host import Part, mismatch, parts
from splitkv.cli.output import print_json, print_table

HELP = "What is installed here, which devices there are, which backends can run. Exits 1 if none."

LIBRARIES = ("torch", "numpy", "triton", "torch-npu", "transformers", "rich")
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Torch's own switch: with 0 it imports no device library of its own accord."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a library can be imported: ``why`` not, and a ``remedy``; both None where it can."""

    library: str
    why: str | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Device:
    type: str
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a backend can run here, and ``why`` not."""

    backend: str
    available: bool
    why: str | None


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds for each trial import (default 300)"
    )


def run(args: argparse.Namespace) -> int:
    probes = _probes(args.timeout)
    why_not = {probe.library: probe.why for probe in probes}
    devices = _devices() if why_not["torch"] is None else []
    backends = _backends(why_not.get("torch_npu")) if why_not["torch"] is None else []
    host = parts(args.timeout) if "torch_npu" in why_not else []
    ready = any(backend.available for backend in backends)
    if args.json:
        print_json(
            {
                "ok": ready,
                "versions": _versions(),
                "imports": [asdict(probe) for probe in probes],
                "ascend": {"parts": [asdict(part) for part in host], "mismatch": mismatch()},
                "devices": [asdict(device) for device in devices],
                "backends": [asdict(backend) for backend in backends],
            }
        )
    else:
        _show(probes, host, devices, backends)
    return 0 if ready else 1


def _versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        "splitkv": __version__,
        **{library: _installed(library) for library in LIBRARIES},
    }


def _installed(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _probes(timeout: float) -> list[Probe]:
    found = [_probe_torch(timeout)]
    if _installed("torch-npu") is not None:
        why = _import_error("torch_npu", timeout, autoload=False)
        remedy = "source the set_env.sh of the installed CANN toolkit" if why else None
        found.append(Probe("torch_npu", why, remedy))
    return found


def _probe_torch(timeout: float) -> Probe:
    if _installed("torch") is None:
        return Probe("torch", "it is not installed", "pip install torch")
    why = _import_error("torch", timeout)
    if why is None:
        return Probe("torch")
    if _import_error("torch", timeout, autoload=False) is None:
        remedy = (
            f"a device's library breaks it: set {AUTOLOAD}=0 to go without that device, "
            "or set the library up (torch_npu: source the set_env.sh of the CANN toolkit)"
        )
        return Probe("torch", why, remedy)
    return Probe("torch", why, "install torch again")


def _import_error(module: str, timeout: float, *, autoload: bool = True) -> str | None:
    """The last line of what a fresh interpreter says to ``import module``, or None."""
    environment = None if autoload else {**os.environ, AUTOLOAD: "0"}
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return f"importing {module} took longer than {timeout:g} s"
    if done.returncode == 0:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"the interpreter ended with code {done.returncode}"


def _devices() -> list[Device]:
    import torch

    threads = torch.get_num_threads()
    found = [Device("cpu", 0, f"{platform.machine()}, {threads} torch threads")]
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found += [
                Device(kind, index, module.get_device_name(index))
                for index in range(module.device_count())
            ]
    return found


def _backends(torch_npu: str | None) -> list[Readiness]:
    """torch_npu: why it cannot be imported, which is more than that it is not loaded."""
    from splitkv.backends.registry import BACKENDS

    found = []
    for backend in BACKENDS:
        why = backend.missing()
        if backend.device_type == "npu" and torch_npu is not None:
            why = f"torch_npu cannot be imported: {torch_npu}"
        found.append(Readiness(backend.name, why is None, why))
    return found


def _show(
    probes: list[Probe], host: list[Part], devices: list[Device], backends: list[Readiness]
) -> None:
    versions = ((name, number or "not installed") for name, number in _versions().items())
    print_table(("library", "version"), versions)
    for probe in probes:
        if probe.why is not None:
            print(f"\n{probe.library} cannot be imported: {probe.why}\n  {probe.remedy}")
    if (unpaired := mismatch()) is not None:
        print(f"\n{unpaired}")
    if host:
        print_table(
            ("library", "of", "here"),
            ((part.library, part.of, "found" if part.why is None else "missing") for part in host),
            title="what torch_npu needs of an Ascend host",
        )
    if devices:
        print_table(
            ("device", "name"),
            ((f"{device.type}:{device.index}", device.name) for device in devices),
        )
    if backends:
        print_table(
            ("backend", "here"),
            ((backend.backend, backend.why or "available") for backend in backends),
        )
