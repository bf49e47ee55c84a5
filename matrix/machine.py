"""What a run was made on, read from the machine."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_DRIVER_FILES = {
    "cuda": (Path("/proc/driver/nvidia/version"), r"Kernel Module.*?\s(\d+\.\d[\d.]*)"),
    "npu": (Path("/usr/local/Ascend/driver/version.info"), r"Version=(\S+)"),
}
_LIBRARIES = {
    "cpu": ("torch", "numpy"),
    "cuda": ("torch", "triton", "numpy"),
    "npu": ("torch", "torch_npu", "triton-ascend", "numpy"),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """``device`` as it names itself, its ``driver``, ``versions`` of Python and what computes."""

    device: str
    driver: str | None
    versions: dict[str, str]


def this_machine(device: torch.device, libraries: tuple[str, ...] = ()) -> Machine:
    """This machine's ``device``; ``libraries`` are added to those that go with its kind."""
    names = dict.fromkeys((*_LIBRARIES.get(device.type, ("torch", "numpy")), *libraries))
    versions = {"python": platform.python_version()}
    versions |= {name: found for name in names if (found := _version(name)) is not None}
    if device.type == "cuda" and torch.version.cuda is not None:
        versions["cuda"] = torch.version.cuda
    if device.type == "npu" and (cann := getattr(torch.version, "cann", None)) is not None:
        versions["cann"] = cann
    return Machine(_device_name(device), _driver(device.type), versions)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _cpu_name()
    module = getattr(torch, device.type)
    return str(module.get_device_name(device))


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _driver(device_type: str) -> str | None:
    path, pattern = _DRIVER_FILES.get(device_type, (Path(), ""))
    if not path.is_file():
        return None
    found = re.search(pattern, path.read_text())
    return found[1] if found else None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
