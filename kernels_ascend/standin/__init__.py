"""A CPU stand-in for device ``npu`` and for the torch_npu operators that the Ascend backend calls.

Nothing here is Huawei's code. It is written from documentation and from reading public sources, and
models contracts and refusals, with the quirks that an adapter trips over (``quirks.QUIRKS``). What
passes on it is checked against our reading of those contracts and proves nothing about a device: no
kernel, no timing, no rounding of an NPU. It is never imported unless asked for.

    from splitkv.kernels_ascend import standin
    torch_npu = standin.install()
    with standin.recording() as calls: ...
"""

from splitkv.kernels_ascend.standin.device import Call, NpuTensor, recording
from splitkv.kernels_ascend.standin.operators import install, installed, is_standin, uninstall
from splitkv.kernels_ascend.standin.quirks import QUIRKS
from splitkv.kernels_ascend.standin.refusal import StandinGapError

__all__ = [
    "QUIRKS",
    "Call",
    "NpuTensor",
    "StandinGapError",
    "install",
    "installed",
    "is_standin",
    "recording",
    "uninstall",
]
