"""Cases for what is computed: queries, windows, scores, splits, states, and what models combine."""

import torch

from splitkv.common.spec import Layout, ScaleKind
from splitkv.matrix.case import make
from splitkv.matrix.cases_shapes import PAIR, RAGGED

BSND, BNSD, PACKED = Layout.BSND, Layout.BNSD, Layout.PACKED
FP32, INT8 = torch.float32, torch.int8
BY_HEAD = ScaleKind.HEAD
SMOLLM2 = {"fixture": "smollm2_qkv", "num_q_heads": 9, "num_kv_heads": 3}

QUERIES = (
    make("queries-2", "two queries", RAGGED, num_queries=2),
    make("queries-4", "four queries", RAGGED, num_queries=4),
    make("queries-8-fp32", "eight queries", RAGGED, num_queries=8, dtype=FP32),
    make("queries-beyond-keys", "more queries than keys", (1, 3, 0, 5, 130), num_queries=4),
    make("queries-dense", "four queries, dense cache", RAGGED, num_queries=4, layout=BSND),
    make(
        "queries-dense-odd", "with an odd T", RAGGED, num_queries=4, layout=BSND, odd_capacity=True
    ),
    make(
        "queries-ragged", "each request its own number", (300, 9, 0, 530), query_lens=(1, 4, 2, 8)
    ),
    make(
        "queries-ragged-none", "a request that asks nothing", (300, 77, 140), query_lens=(2, 0, 3)
    ),
    make(
        "queries-ragged-packed",
        "queries and cache packed",
        (300, 9, 77),
        query_lens=(1, 4, 2),
        layout=PACKED,
    ),
    make("queries-d128", "four queries, D 128", RAGGED, num_queries=4, head_dim=128),
    make("queries-d128-ragged", "ragged, D 128", (300, 9, 530), query_lens=(1, 4, 2), head_dim=128),
    make("queries-d128-packed", "packed cache", RAGGED, num_queries=4, head_dim=128, layout=PACKED),
    make("queries-d128-splits", "cut", (1100, 300), num_queries=4, head_dim=128, num_splits=3),
    make("non-causal", "all queries see all keys", RAGGED, num_queries=4, causal=False),
    make(
        "non-causal-ragged",
        "ragged queries, no mask",
        (300, 9, 77),
        query_lens=(1, 4, 2),
        causal=False,
    ),
)

WINDOWS = (
    make("window-1", "a query sees itself only", RAGGED, sliding_window=1),
    make("window-128", "a window of one page", RAGGED, sliding_window=128),
    make(
        "window-fp32", "a window that starts inside a page", RAGGED, sliding_window=200, dtype=FP32
    ),
    make(
        "window-lengths",
        "length at the window's edge",
        (99, 100, 101, 116, 117),
        sliding_window=100,
        page_size=16,
    ),
    make("window-queries", "each query its own window", RAGGED, sliding_window=100, num_queries=4),
    make(
        "window-ragged",
        "ragged queries",
        (532, 9, 300),
        sliding_window=100,
        query_lens=(1, 4, 3),
        page_size=16,
    ),
    make(
        "window-non-causal",
        "no causal mask",
        RAGGED,
        sliding_window=100,
        num_queries=4,
        causal=False,
    ),
    make("window-dense", "dense cache", RAGGED, sliding_window=100, layout=BNSD),
    make("window-packed", "packed cache", RAGGED, sliding_window=100, layout=PACKED),
    make("window-packed-d128", "D 128", RAGGED, sliding_window=100, layout=PACKED, head_dim=128),
    make("window-splits", "a window that is cut", (1500, 900), sliding_window=700, num_splits=3),
    make("chunks", "chunked attention", RAGGED, sliding_window=128, window_block=128),
    make(
        "chunks-lengths",
        "queries on both sides of a chunk's edge",
        (127, 128, 129, 130, 256),
        sliding_window=128,
        window_block=128,
        num_queries=4,
        page_size=16,
    ),
    make(
        "chunks-splits",
        "a chunk that is cut",
        (1500, 900),
        sliding_window=1024,
        window_block=1024,
        num_splits=3,
    ),
    make(
        "blocks-fp32",
        "a window of two blocks that fit no page",
        RAGGED,
        sliding_window=96,
        window_block=48,
        dtype=FP32,
    ),
    make(
        "blocks-anchors",
        "anchors and a window of blocks, several queries",
        RAGGED,
        sliding_window=96,
        window_block=48,
        anchor_tokens=4,
        num_queries=4,
        dtype=FP32,
    ),
    make(
        "blocks-longer",
        "a plan for longer requests, window of blocks",
        (700, 3, 0),
        planned_lens=(1100, 300, 9),
        num_splits=4,
        sliding_window=300,
        window_block=100,
    ),
    make("anchors", "four anchors", RAGGED, sliding_window=100, anchor_tokens=4),
    make(
        "anchors-fp32",
        "anchors that end inside a page",
        RAGGED,
        sliding_window=64,
        anchor_tokens=150,
        dtype=FP32,
    ),
    make(
        "anchors-queries",
        "several queries",
        RAGGED,
        sliding_window=100,
        anchor_tokens=4,
        num_queries=4,
    ),
    make(
        "anchors-meet", "anchors that reach the window", PAIR, sliding_window=500, anchor_tokens=40
    ),
    make(
        "anchors-splits",
        "anchors and a cut window",
        (1500, 900),
        sliding_window=700,
        anchor_tokens=4,
        num_splits=3,
    ),
)

STARTS = (
    make("starts", "each request with a first visible position", RAGGED, kv_start=True),
    make("starts-fp32", "several queries", RAGGED, kv_start=True, num_queries=4, dtype=FP32),
    make("starts-splits", "whole splits out of sight", (1500, 900), kv_start=True, num_splits=5),
    make("starts-packed", "packed cache", RAGGED, kv_start=True, layout=PACKED),
    make(
        "starts-anchors",
        "in front of anchors and window, and behind",
        (532, 300, 300, 300, 40),
        kv_start=True,
        sliding_window=100,
        anchor_tokens=150,
        num_queries=2,
    ),
    make(
        "starts-longer",
        "a plan for longer requests, window",
        (700, 3, 0, 250),
        planned_lens=(1100, 300, 9, 900),
        num_splits=4,
        sliding_window=200,
        kv_start=True,
    ),
)

SCORES = (
    make("soft-cap", "a soft cap", RAGGED, logits_soft_cap=20.0),
    make(
        "soft-cap-tight",
        "scores far beyond the cap",
        PAIR,
        logits_soft_cap=2.0,
        q_gain=8.0,
        dtype=FP32,
    ),
    make("soft-cap-window", "with a window", RAGGED, logits_soft_cap=20.0, sliding_window=100),
    make("alibi", "ALiBi slopes", RAGGED, alibi=True),
    make(
        "alibi-fp32",
        "slopes by request, several queries",
        RAGGED,
        alibi=True,
        alibi_per_request=True,
        num_queries=4,
        dtype=FP32,
    ),
    make("alibi-window", "with a window", RAGGED, alibi=True, sliding_window=100),
    make("bias", "a bias on the last 300 positions", RAGGED, attn_bias=True, columns=300),
    make(
        "bias-shared",
        "one bias for all heads and requests",
        PAIR,
        attn_bias=True,
        columns=64,
        bias_batch=False,
        bias_heads=False,
    ),
    make(
        "bias-wide",
        "more columns than keys, several queries",
        RAGGED,
        attn_bias=True,
        columns=700,
        num_queries=4,
        dtype=FP32,
    ),
    make("bias-hides", "a bias of -inf", PAIR, attn_bias=True, columns=90, bias_hides=True),
    make("mask-tree", "a tree of drafts", PAIR, attn_mask=True, columns=6, num_queries=6),
    make("mask-one", "one query, sparse keys", RAGGED, attn_mask=True, columns=300),
    make(
        "mask-wide",
        "more columns than keys",
        (40, 3, 0, 65),
        attn_mask=True,
        columns=70,
        num_queries=4,
        dtype=FP32,
    ),
    make(
        "mask-window",
        "a tree under a window",
        PAIR,
        attn_mask=True,
        columns=6,
        num_queries=6,
        sliding_window=100,
    ),
    make(
        "mask-bias",
        "a tree with a bias",
        PAIR,
        attn_mask=True,
        attn_bias=True,
        columns=8,
        num_queries=8,
    ),
    make("sinks", "a sink on every head", RAGGED, sinks=True),
    make("sinks-fp32", "sinks, splits", RAGGED, sinks=True, num_splits=3, dtype=FP32),
    make("sinks-queries", "sinks, several queries", RAGGED, sinks=True, num_queries=4),
)

SPLITS = (
    make("splits-1", "never cut", (1100, 300), num_splits=1),
    make("splits-2", "cut in two", (1100, 300), num_splits=2),
    make(
        "splits-many-fp32", "more splits than tiles", (1100, 300, 0, 1), num_splits=64, dtype=FP32
    ),
    make("splits-size", "splits of 256 tokens", (1100, 300, 0, 1), split_size=256),
    make("splits-size-queries", "with several queries", (1100, 300), split_size=256, num_queries=4),
    make("splits-page-3", "splits on pages of 3", (1100, 300), num_splits=3, page_size=3),
    make(
        "plan-longer",
        "a plan for longer requests",
        (700, 3, 0),
        planned_lens=(1100, 300, 9),
        num_splits=4,
    ),
    make(
        "plan-longer-window",
        "a plan for longer requests, window",
        (700, 3, 0),
        planned_lens=(1100, 300, 9),
        num_splits=4,
        sliding_window=300,
    ),
    make("state", "the state of a whole history", RAGGED, returns_state=True),
    make("state-fp32", "the state, splits", RAGGED, returns_state=True, num_splits=3, dtype=FP32),
    make(
        "state-merged",
        "the states of two halves, merged",
        RAGGED,
        returns_state=True,
        merged_at_block=2,
    ),
    make(
        "state-merged-fp32",
        "the same in float32",
        RAGGED,
        returns_state=True,
        merged_at_block=1,
        page_size=64,
        dtype=FP32,
    ),
    make(
        "state-window",
        "the state, window, several queries",
        RAGGED,
        returns_state=True,
        sliding_window=100,
        num_queries=4,
    ),
)

MODELS = (
    make(
        "model-gpt-oss",
        "window, sinks, G 8",
        RAGGED,
        num_q_heads=16,
        sliding_window=128,
        sinks=True,
    ),
    make(
        "model-gemma",
        "window, soft cap, D 256",
        RAGGED,
        num_q_heads=4,
        head_dim=256,
        sliding_window=200,
        logits_soft_cap=50.0,
    ),
    make(
        "model-llama4",
        "chunks, G 5, D 128",
        (1100, 300),
        num_q_heads=10,
        head_dim=128,
        sliding_window=512,
        window_block=512,
    ),
    make(
        "model-qwen",
        "G 7, D 128, pages of 16, splits",
        (1100, 300),
        num_q_heads=14,
        head_dim=128,
        page_size=16,
        num_splits=4,
    ),
    make(
        "model-drafts",
        "ragged drafts on an int8 cache with a window",
        PAIR,
        query_lens=(4, 2),
        kv_dtype=INT8,
        scales=BY_HEAD,
        sliding_window=100,
    ),
)

REAL = (
    make("real-smollm2", "two layers of a language model", (2048, 2048), **SMOLLM2),
    make("real-smollm2-fp32", "in float32, cut", (2048, 2047), **SMOLLM2, dtype=FP32, num_splits=5),
    make("real-smollm2-queries", "its last four queries", (2048, 600), **SMOLLM2, num_queries=4),
    make(
        "real-smollm2-window",
        "with a window and anchors",
        (2048, 2000),
        **SMOLLM2,
        sliding_window=512,
        anchor_tokens=4,
    ),
    make(
        "real-smollm2-bnsd",
        "dense, float16",
        (2048, 2048),
        **SMOLLM2,
        layout=BNSD,
        dtype=torch.float16,
    ),
)
