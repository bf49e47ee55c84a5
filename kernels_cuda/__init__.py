"""Triton kernels for NVIDIA GPUs and their launchers: what imports triton for CUDA is here."""
