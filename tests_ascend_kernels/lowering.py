"""From a kernel of ours to linalg, by Triton-Ascend's own compiler; no device is asked.

Triton-Ascend wants to know the device's architecture and driver while it compiles; two objects here
answer in their place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton.backends.ascend.driver as ascend_driver
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver

from splitkv.kernels_ascend.kernels.launch import Launch

TARGETS = ("Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910_9382")
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int8: "i8",
}


class _NoDevice:
    """What Triton-Ascend asks a device for. Linalg does not depend on the answer."""

    def get_arch(self) -> str:
        return TARGETS[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", TARGETS[1], 0)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Linalg:
    """A lowered kernel. text: MLIR; mix_mode: "aiv" for vector cores, "mix" for both kinds."""

    name: str
    text: str
    mix_mode: str


def lower(launch: Launch) -> Linalg:
    """The linalg IR of what ``launch`` would run.

    Raises:
        triton.CompilationError: Triton does not take the source.
        subprocess.CalledProcessError: Triton-Ascend does not lower it; ``stderr`` says why.
    """
    nowhere = _NoDevice()
    ascend_driver.NPUUtils = _NoDevice
    driver.set_active(nowhere)
    target = nowhere.get_current_target()
    backend = backends["ascend"].compiler(target)
    options = backend.parse_options({})
    signature = {
        parameter.name: _type_of(launch.arguments[parameter.name], parameter.is_constexpr)
        for parameter in launch.kernel.params
    }
    constants = {
        name: launch.arguments[name] for name, kind in signature.items() if kind == "constexpr"
    }
    source = ASTSource(fn=launch.kernel, signature=signature, constants=constants)
    context = ir.context()
    ir.load_dialects(context)
    module = source.make_ir(
        options, backend.get_codegen_implementation(), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    metadata = {"hash": "none", "target": target, **options.__dict__}
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, metadata)
    text = str(module)
    mode = text.split('mix_mode = "')[1].split('"')[0]
    return Linalg(launch.kernel.fn.__name__, text, mode)


def passed(launch: Launch) -> dict[str, object]:
    """The arguments that the lowered kernel takes, in its order: all but constants."""
    return {
        parameter.name: launch.arguments[parameter.name]
        for parameter in launch.kernel.params
        if _type_of(launch.arguments[parameter.name], parameter.is_constexpr) != "constexpr"
    }


def _type_of(value: object, constant: bool) -> str:
    """Triton's name of an argument's type."""
    if constant or value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        return f"*{_NAMES[value.dtype]}"
    return {int: "i32", float: "fp32"}[type(value)]
