"""The fastest paged peer at each anchor, as measured on an H200 on 2026-11-30.

bfloat16, head dim 128, one query; torch 2.11, FlashInfer 0.6.18, FlashAttention 3 as vLLM 0.23.0
builds it (that version's Triton kernels and those of SGLang 0.5.23 were slower everywhere).
Microseconds per call in a graph, K and V rotated over 192 MB, pages of 16 and 128 in random order,
plans and schedules made beforehand. Libraries that are not installed where the grid runs are
compared with through this table.
"""

PAGED = {
    "32:8x128/1x1024": (9.328, "FlashInfer tc p128"),
    "32:8x128/1x8192": (18.12, "FA3 p128"),
    "32:8x128/1x131072": (128.5, "FlashInfer tc p128"),
    "32:8x128/8x8192": (69.93, "FA3 p128"),
    "32:8x128/64x2048": (129.6, "FlashInfer tc p128"),
    "32:8x128/64x8192": (481.5, "FlashInfer tc p128"),
    "32:8x128/256x2048": (489, "FlashInfer tc p128"),
    "32:8x128/rag-a": (189.9, "FA3 p128"),
    "32:8x128/rag-b": (283.3, "FlashInfer batch p128"),
    "32:8x128/rag-c": (242.7, "FA3 p128"),
    "28:4x128/1x1024": (9.417, "FlashInfer tc p128"),
    "28:4x128/1x8192": (14.94, "FA3 p128"),
    "28:4x128/1x131072": (71.44, "FlashInfer tc p128"),
    "28:4x128/8x8192": (41.87, "FlashInfer tc p128"),
    "28:4x128/64x2048": (67.99, "FlashInfer tc p128"),
    "28:4x128/64x8192": (242.3, "FlashInfer tc p128"),
    "28:4x128/256x2048": (254.3, "FlashInfer tc p128"),
    "28:4x128/rag-a": (106, "FlashInfer batch p128"),
    "28:4x128/rag-b": (151.8, "FlashInfer batch p128"),
    "28:4x128/rag-c": (128.5, "FlashInfer tc p128"),
    "8:1x128/1x1024": (8.794, "FlashInfer tc p128"),
    "8:1x128/1x8192": (10.86, "FlashInfer tc p16"),
    "8:1x128/1x131072": (31.32, "FlashInfer tc p128"),
    "8:1x128/8x8192": (18.31, "FlashInfer tc p128"),
    "8:1x128/64x2048": (25.88, "FA3 p128"),
    "8:1x128/64x8192": (71.19, "FA3 p128"),
    "8:1x128/256x2048": (68.15, "FlashInfer tc p128"),
    "8:1x128/rag-a": (36.59, "FlashInfer tc p128"),
    "8:1x128/rag-b": (42.02, "FlashInfer tc p128"),
    "8:1x128/rag-c": (43.55, "FlashInfer tc p128"),
    "32:32x128/1x1024": (10.69, "FlashInfer cc p128"),
    "32:32x128/1x8192": (38.81, "FA3 p128"),
    "32:32x128/1x131072": (476.7, "FlashInfer tc p128"),
    "32:32x128/8x8192": (242, "FlashInfer tc p128"),
    "32:32x128/64x2048": (481, "FA3 p128"),
    "32:32x128/64x8192": (1868, "FA3 p128"),
    "32:32x128/256x2048": (1869, "FA3 p128"),
    "32:32x128/rag-a": (702.9, "FA3 p128"),
    "32:32x128/rag-b": (970.2, "FA3 p128"),
    "32:32x128/rag-c": (927.2, "FA3 p128"),
}
