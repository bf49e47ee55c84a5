"""Triton kernels for NVIDIA GPUs and their launchers: the only folder that imports triton for CUDA."""
