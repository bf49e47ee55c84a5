"""Which torch_npu is loaded, and what it says of the device. Nothing here imports it unless it is
loaded or asked to compute.
"""

import importlib
import importlib.util
import sys
from types import ModuleType

import torch

from splitkv.kernels_ascend.soc import Soc, soc_of


def operators() -> ModuleType:
    """The torch_npu module."""
    return importlib.import_module("torch_npu")


def is_standin() -> bool:
    """Whether the loaded torch_npu is splitkv's CPU stand-in."""
    return getattr(sys.modules.get("torch_npu"), "SPLITKV_STANDIN", False) is True


def missing() -> str | None:
    """Why this machine cannot run the operators, in a sentence, or None."""
    if sys.modules.get("torch_npu") is None:
        if importlib.util.find_spec("torch_npu") is None:
            return (
                "torch_npu is not installed; install CANN and the torch-npu release for torch "
                f"{torch.__version__}"
            )
        return (
            "torch_npu is installed but not loaded: torch loads it at import unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0; unset that, or import torch_npu first"
        )
    name = device_name()
    if name is None:
        return "torch_npu is loaded but sees no NPU; check the driver and ASCEND_RT_VISIBLE_DEVICES"
    if soc_of(name) is None:
        known = ", ".join(f"Ascend{soc.value}*" for soc in Soc)
        return (
            f"{name} is of no generation whose limits are known here ({known}); to take it for one "
            "of them call AscendBackend(soc=...) itself"
        )
    return None


def device_name() -> str | None:
    """The current NPU's name as the runtime reports it, such as ``Ascend910B3``; None without a
    device.
    """
    module = getattr(torch, "npu", None)
    if module is None or not module.is_available():
        return None
    return str(module.get_device_name())


def is_capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    return bool(torch.npu.is_current_stream_capturing())  # type: ignore[attr-defined]
