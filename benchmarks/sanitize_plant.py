"""Faults that compute-sanitizer must report, one for each tool: else its silence means nothing.

Compiled by NVRTC through torch, since neither Triton nor Gluon lets a kernel race with itself.
"""

import torch

_KERNELS = {
    # four megabytes past a kilobyte
    "memcheck": "out[threadIdx.x + (1 << 20)] = 1;",
    # threads of several warps write one word and read it, and nobody waits
    "racecheck": "__shared__ volatile float x; x = threadIdx.x; out[threadIdx.x] = x;",
    # what nobody has written
    "initcheck": "out[threadIdx.x] = in[threadIdx.x] + 1;",
}


def plant(tool: str) -> None:
    """Commit the fault that ``tool`` looks for, on the current CUDA device."""
    source = f'extern "C" __global__ void planted(float* out, const float* in) {{{_KERNELS[tool]}}}'
    kernel = torch.cuda._compile_kernel(source, "planted")
    out = torch.empty(256, device="cuda")
    kernel((1, 1, 1), (256, 1, 1), [out, torch.empty(256, device="cuda")])
    torch.cuda.synchronize()
