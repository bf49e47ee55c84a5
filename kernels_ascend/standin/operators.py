"""The table of modelled operators, and the module object that passes for ``torch_npu``."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from splitkv.kernels_ascend.standin import device, graph
from splitkv.kernels_ascend.standin.cache_write import reshape_and_cache, scatter_pa_kv_cache
from splitkv.kernels_ascend.standin.fused_infer import (
    fused_infer_v1,
    fused_infer_v2,
    incre,
    prompt,
)
from splitkv.kernels_ascend.standin.fusion import fusion_attention
from splitkv.kernels_ascend.standin.paged_attention import paged_attention
from splitkv.kernels_ascend.standin.schemas import SCHEMAS
from splitkv.kernels_ascend.standin.update import attention_update

KERNELS: dict[str, device.Kernel] = {
    **graph.KERNELS,
    "npu_fused_infer_attention_score": fused_infer_v1,
    "npu_fused_infer_attention_score_v2": fused_infer_v2,
    "npu_incre_flash_attention": incre,
    "npu_prompt_flash_attention": prompt,
    "npu_fusion_attention": fusion_attention,
    "_npu_paged_attention": paged_attention,
    "npu_attention_update": attention_update,
    "npu_scatter_pa_kv_cache": scatter_pa_kv_cache,
    "_npu_reshape_and_cache": reshape_and_cache,
}

_libraries: list[Any] = []  # a Library that is collected takes its schemas along


def install() -> ModuleType:
    """Make device ``npu`` and a module ``torch_npu`` available, both stand-ins; a second call
    returns the same module.

    Raises:
        RuntimeError: a real torch_npu is loaded, or torch's spare device slot has another name.
    """
    module = sys.modules.get("torch_npu")
    if module is not None and not is_standin(module):
        raise RuntimeError("a real torch_npu is loaded: the stand-in does not replace it")
    device.switch_on()
    if module is None:
        _define_operators()
        module = _module()
        sys.modules["torch_npu"] = module
    return module


def uninstall() -> None:
    """Take ``torch_npu`` away again and make device ``npu`` answer that it is not available."""
    if is_standin(sys.modules.get("torch_npu")):
        del sys.modules["torch_npu"]
    device.switch_off()


@contextmanager
def installed() -> Iterator[ModuleType]:
    """The stand-in inside the block, and what was there before after it."""
    before = sys.modules.get("torch_npu")
    module = install()
    try:
        yield module
    finally:
        if before is None:
            uninstall()


def is_standin(module: ModuleType | None) -> bool:
    """Whether ``module`` is this stand-in rather than Huawei's torch_npu."""
    return getattr(module, "SPLITKV_STANDIN", False) is True


def _define_operators() -> None:
    if _libraries:
        return
    make: Any = torch.library.Library
    library = make("npu", "DEF")
    for name, kernel in KERNELS.items():
        library.define(SCHEMAS[name])
        device.kernels[f"npu::{name}"] = kernel
    _libraries.append(library)


def _module() -> ModuleType:
    module = ModuleType(
        "torch_npu", "splitkv's CPU stand-in for torch_npu; none of it is Huawei's code."
    )
    module.__spec__ = ModuleSpec("torch_npu", loader=None)
    functions = {name: _function(name) for name in KERNELS if not name.endswith(".out")}
    for name in KERNELS:
        if name.endswith(".out"):
            functions[name.removesuffix(".out")].out = _function(name)  # type: ignore[attr-defined]
    npu = vars(torch)["npu"]
    npu.NPUGraph, npu.graph = graph.NPUGraph, graph.graph
    module.__dict__.update(SPLITKV_STANDIN=True, __version__="standin", npu=npu, **functions)
    return module


def _function(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for keyword, value in kwargs.items():
            if keyword.startswith("actual_"):
                _check_host(name, keyword, value)
        packet, _, overload = name.partition(".")
        operator = getattr(torch.ops.npu, packet)
        return getattr(operator, overload or "default")(*args, **kwargs)

    call.__name__ = name
    return call


def _check_host(operator: str, keyword: str, value: Any) -> None:
    entries = value if isinstance(value, list | tuple) else [value]
    if any(isinstance(entry, device.NpuTensor) for entry in entries):  # quirk: host-lengths
        raise RuntimeError(
            f"561002: {operator}: {keyword} must be host integers, got a tensor on the NPU "
            "(a real call would wait for it)"
        )
