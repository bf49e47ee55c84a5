"""Our own Triton-Ascend kernels; of this package only what computes imports triton."""
