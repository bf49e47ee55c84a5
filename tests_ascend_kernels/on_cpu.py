"""Lowered linalg executed on this CPU: Huawei's bishengir-opt to the LLVM dialect, then LLVM 19.

Programs run one after the other, before Huawei's optimiser, memory plan and synchronisation: this
sees what Triton and Triton-Ascend made of the source, and nothing of what comes after.
"""

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hivm import tools
from lowering import Linalg, lower, passed
from splitkv.kernels_ascend.kernels.launch import Launch

_PASSES = (  # upstream MLIR's; the second lowering of affine and arith serves what memrefs leave
    "--convert-elementwise-to-linalg",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--memref-expand",
    "--convert-cf-to-llvm",
    "--convert-arith-to-llvm",
    "--convert-math-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
)
_SUPPORT = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int64_t rank; void *descriptor; } memref;
typedef struct { char *allocated, *aligned; int64_t offset, sizes_and_strides[]; } ranked;

/* What the LLVM dialect calls for a copy between memrefs that are not contiguous. */
void memrefCopy(int64_t size, memref *from, memref *to) {
  ranked *a = from->descriptor, *b = to->descriptor;
  int64_t rank = from->rank, at[8] = {0}, *sizes = a->sizes_and_strides;
  int64_t *step_a = sizes + rank, *step_b = b->sizes_and_strides + rank;
  for (int64_t d = 0; d < rank; d++)
    if (sizes[d] == 0) return;
  for (;;) {
    int64_t i = a->offset, j = b->offset, d = rank - 1;
    for (int64_t e = 0; e < rank; e++) i += at[e] * step_a[e], j += at[e] * step_b[e];
    memcpy(b->aligned + j * size, a->aligned + i * size, size);
    while (d >= 0 && ++at[d] == sizes[d]) at[d--] = 0;
    if (d < 0) return;
  }
}

/* float to the nearest bfloat16, ties to even: its bits in the low half of the register. */
float __truncsfbf2(float x) {
  union { float f; uint32_t u; } y = {x};
  y.u = x != x ? 0x7fc0 : (y.u + 0x7fff + ((y.u >> 16) & 1)) >> 16;
  return y.f;
}
"""
_SCALARS: dict[type, Any] = {int: ctypes.c_int32, float: ctypes.c_float}


@dataclass(frozen=True)
class OnCpu:
    """A kernel as a function of this process."""

    function: Any

    def run(self, launch: Launch) -> None:
        """Run the programs in order on the CPU's tensors."""
        words: list[Any] = []
        for value in (
            None,
            None,
            *passed(launch).values(),
        ):  # lock and workspace, which nobody uses
            words += (
                _memref(value)
                if value is None or isinstance(value, Tensor)
                else [_SCALARS[type(value)](value)]
            )
        for program in range(launch.programs):
            grid = [ctypes.c_int32(one) for one in (launch.programs, 1, 1, program, 0, 0)]
            self.function(*words, *grid)


def build(linalg: Linalg) -> OnCpu:
    """Compile ``linalg`` for this machine.

    Raises:
        subprocess.CalledProcessError: a step fails; ``stderr`` says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "kernel.mlir").write_text(linalg.text)
        (place / "support.c").write_text(_SUPPORT)
        steps = (
            [tools() / "bishengir-opt", "kernel.mlir", *_PASSES, "-o", "llvm.mlir"],
            [_llvm("mlir-translate"), "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll"],
            [_llvm("opt"), "-O2", "kernel.ll", "-o", "kernel.bc"],
            [_llvm("llc"), "-O2", "-relocation-model=pic", "-filetype=obj", "kernel.bc"],
            ["gcc", "-shared", "-fPIC", "-O2", "-o", "kernel.so", "kernel.o", "support.c", "-lm"],
        )
        for step in steps:
            subprocess.run(step, cwd=place, capture_output=True, text=True, check=True)
        library = ctypes.CDLL(str(place / "kernel.so"))  # stays mapped when its file is gone
    function = getattr(library, linalg.name)
    function.restype = None
    return OnCpu(function)


def _llvm(tool: str) -> str:
    found = shutil.which(f"{tool}-19")
    assert found is not None, f"{tool}-19 is not installed: apt-get install mlir-19-tools llvm-19"
    return found


def _memref(tensor: Tensor | None) -> list[Any]:
    """The words of a memref<?xT>: allocated, aligned, offset, size, stride."""
    address = 0 if tensor is None else tensor.data_ptr()
    size = 0 if tensor is None else tensor.untyped_storage().nbytes() // tensor.element_size()
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, *(ctypes.c_int64(word) for word in (0, size, 1))]


_BUILT: dict[object, OnCpu] = {}


def run_lowered(launch: Launch, device: torch.device | None = None) -> None:
    """Lower, build (once per variant) and run: in the place of ``Launch.run``."""
    kinds = [
        (name, value.dtype if isinstance(value, Tensor) else type(value))
        for name, value in passed(launch).items()
    ]
    constants = [(name, value) for name, value in launch.arguments.items() if name.isupper()]
    variant = (launch.kernel, *kinds, *constants)
    if variant not in _BUILT:
        _BUILT[variant] = build(lower(launch))
    _BUILT[variant].run(launch)
