"""Cases for what tensors look like: lengths, layouts, memory, heads, pages, dtypes."""

import math

import torch

from splitkv.common.spec import INT4, Layout, ScaleKind
from splitkv.matrix.case import Memory, Size, make

RAGGED = (641, 1, 0, 300)
"""Several pages, one token, nothing, and a ragged rest."""
PAIR = (530, 77)
BSND, BNSD, PACKED, HND = Layout.BSND, Layout.BNSD, Layout.PACKED, Layout.HND
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
ONE, BY_HEAD, BY_REQUEST = ScaleKind.TENSOR, ScaleKind.HEAD, ScaleKind.REQUEST_HEAD
BY_TOKEN, BY_CHANNEL = ScaleKind.TOKEN, ScaleKind.CHANNEL
BY_GROUP = ScaleKind.GROUP

LENGTHS = (
    make("lengths-ragged", "several pages, one token, nothing, a ragged rest", RAGGED),
    make("lengths-one", "a single token", (1,)),
    make("lengths-zero", "nothing cached anywhere", (0, 0)),
    make("lengths-zero-between", "empty requests between others", (5, 0, 33, 0, 129)),
    make("lengths-tiles", "tiles and their neighbours", (63, 64, 65, 127, 129, 255, 256, 257)),
    make("lengths-pages", "pages and their neighbours", (15, 16, 17, 31, 32, 33), page_size=16),
    make("lengths-long", "a longer history", (4099,), num_q_heads=4, num_kv_heads=1),
    make("lengths-host", "lengths that live on the host", RAGGED, host_lengths=True),
    make("batch-zero", "no request at all", ()),
    make("scores-large", "scores in the thousands", PAIR, q_gain=400.0),
    make("scores-large-fp32", "the same in float32", PAIR, q_gain=100.0, dtype=FP32),
    make("scale-own", "an sm_scale other than D**-0.5", PAIR, sm_scale=1.0),
)

LAYOUTS = (
    make("layout-bsnd", "dense, tokens before heads", RAGGED, layout=BSND),
    make("layout-bsnd-fp32", "the same in float32", RAGGED, layout=BSND, dtype=FP32),
    make(
        "layout-bsnd-odd",
        "a capacity T that is no multiple of anything",
        RAGGED,
        layout=BSND,
        odd_capacity=True,
    ),
    make("layout-bnsd", "dense, heads before tokens", RAGGED, layout=BNSD),
    make("layout-packed", "requests one after the other", RAGGED, layout=PACKED),
    make("layout-packed-fp32", "the same in float32", RAGGED, layout=PACKED, dtype=FP32),
    make("layout-hnd", "pages, heads before tokens", RAGGED, layout=HND),
    make("layout-hnd-fp32", "the same in float32", RAGGED, layout=HND, dtype=FP32),
    make("memory-joint", "K and V in one buffer", PAIR, memory=Memory.JOINT),
    make("memory-joint-bnsd", "dense", PAIR, layout=BNSD, memory=Memory.JOINT),
    make("memory-strided", "a last dimension of stride 2", PAIR, memory=Memory.STRIDED),
    make("memory-far", "offsets above 2**31", PAIR, memory=Memory.FAR, size=Size.LARGE),
    make("index-int64", "tables and lengths of int64", RAGGED, index_dtype=torch.int64),
    make("poison-inf", "unused slots hold inf", RAGGED, poison=math.inf, sliding_window=100),
    make("nan-in-k", "a NaN in a visible key comes out", PAIR, nan="k"),
    make("nan-in-v", "a NaN in a visible value comes out", PAIR, nan="v", num_splits=2),
)

HEADS = (
    make("head-dim-16", "D 16", PAIR, head_dim=16),
    make("head-dim-32", "D 32", PAIR, head_dim=32),
    make("head-dim-80", "D 80, no power of two", PAIR, head_dim=80),
    make("head-dim-96", "D 96, no power of two", PAIR, head_dim=96),
    make("head-dim-128", "D 128", PAIR, head_dim=128),
    make("head-dim-192", "D 192, no power of two", PAIR, head_dim=192),
    make("head-dim-256", "D 256", PAIR, head_dim=256),
    make("head-dim-128-64", "values narrower than keys", PAIR, head_dim=128, head_dim_v=64),
    make("head-dim-64-128", "values wider than keys", PAIR, head_dim_v=128),
    make("head-dim-192-128", "latent attention, expanded", PAIR, head_dim=192, head_dim_v=128),
    make(
        "head-dim-576-512",
        "latent attention, absorbed: one kv head",
        PAIR,
        num_q_heads=16,
        num_kv_heads=1,
        head_dim=576,
        head_dim_v=512,
        page_size=64,
    ),
    make("group-1", "a kv head for every query head", PAIR, num_q_heads=4, num_kv_heads=4),
    make("group-2", "G 2", PAIR, num_q_heads=4),
    make("group-3", "G 3, no power of two", PAIR, num_q_heads=9, num_kv_heads=3),
    make("group-4", "G 4 on 8 kv heads", PAIR, num_q_heads=32, num_kv_heads=8),
    make("group-7", "G 7, no power of two", PAIR, num_q_heads=14),
    make("group-8", "G 8", PAIR, num_q_heads=16),
    make("group-16", "G 16", PAIR, num_q_heads=16, num_kv_heads=1),
    make("group-24", "G 24, no power of two", PAIR, num_q_heads=24, num_kv_heads=1),
    make("group-64", "G 64", PAIR, num_q_heads=64, num_kv_heads=1),
)

_LATENT = {
    "num_kv_heads": 1,
    "head_dim": 576,
    "head_dim_v": 512,
    "page_size": 64,
    "memory": Memory.LATENT,
}
LATENT = (
    make("mla-16", "absorbed MLA, 16 heads of one rank", (130, 0, 33), num_q_heads=16, **_LATENT),
    make(
        "mla-64-window",
        "64 heads behind a window",
        (200, 0, 31),
        num_q_heads=64,
        sliding_window=100,
        **_LATENT,
    ),
    make("mla-128", "DeepSeek V3 on one device", (193, 0, 64, 1), num_q_heads=128, **_LATENT),
    make(
        "mla-128-splits",
        "the same in splits",
        (300, 0, 65),
        num_q_heads=128,
        num_splits=3,
        **_LATENT,
    ),
    make(
        "mla-128-two-queries",
        "the same with a drafted token",
        (140, 0, 2),
        num_q_heads=128,
        num_queries=2,
        **_LATENT,
    ),
)

PAGES = (
    make("page-1", "one token per page", PAIR, page_size=1),
    make("page-3", "pages of 3, no power of two", PAIR, page_size=3),
    make("page-16", "pages of 16", PAIR, page_size=16),
    make("page-32", "pages of 32", PAIR, page_size=32),
    make("page-64", "pages of 64", PAIR, page_size=64),
    make("page-256", "pages of 256", PAIR, page_size=256),
    make("page-480", "pages of 480, no power of two", PAIR, page_size=480),
)

DTYPES = (
    make("dtype-fp16", "float16 throughout", RAGGED, dtype=FP16),
    make("dtype-fp32", "float32 throughout", RAGGED, dtype=FP32),
    make("dtype-fp64", "float64 throughout", RAGGED, dtype=FP64),
    make("mixed-bf16-fp16", "a float16 cache under bfloat16 queries", PAIR, kv_dtype=FP16),
    make("mixed-bf16-fp32", "a float32 cache under bfloat16 queries", PAIR, kv_dtype=FP32),
    make("mixed-fp32-bf16", "a bfloat16 cache under float32", PAIR, dtype=FP32, kv_dtype=BF16),
    make("scales-none-e4m3", "float8 e4m3 without scales", PAIR, kv_dtype=E4M3),
    make("scales-one-e4m3", "float8 e4m3", PAIR, kv_dtype=E4M3, scales=ONE),
    make("scales-head-e5m2", "float8 e5m2", PAIR, kv_dtype=E5M2, scales=BY_HEAD),
    make("scales-one-int8", "int8, one scale", PAIR, kv_dtype=INT8, scales=ONE),
    make("scales-head-int8", "int8 by head", PAIR, kv_dtype=INT8, scales=BY_HEAD),
    make("scales-request-int8", "int8 by request and head", PAIR, kv_dtype=INT8, scales=BY_REQUEST),
    make("scales-k-only", "keys scaled, values not", PAIR, kv_dtype=INT8, k_scale=BY_HEAD),
    make("scales-token-int8", "int8 by token", PAIR, kv_dtype=INT8, scales=BY_TOKEN),
    make("scales-token-e4m3", "float8 e4m3 by token", PAIR, kv_dtype=E4M3, scales=BY_TOKEN),
    make(
        "scales-token-wide-v",
        "int8 by token, values wider than keys, whole pages",
        PAIR,
        kv_dtype=INT8,
        scales=BY_TOKEN,
        head_dim_v=128,
    ),
    make("scales-channel-int8", "int8 by channel", PAIR, kv_dtype=INT8, scales=BY_CHANNEL),
    make(
        "scales-channel-token",
        "keys by channel, values by token, both with zero points, behind a window",
        RAGGED,
        kv_dtype=INT8,
        k_scale=BY_CHANNEL,
        v_scale=BY_TOKEN,
        k_zero=True,
        v_zero=True,
        sliding_window=100,
        layout=Layout.HND,
    ),
    make(
        "zeros-one-int8",
        "one zero point, several queries",
        PAIR,
        kv_dtype=INT8,
        scales=ONE,
        k_zero=True,
        v_zero=True,
        num_queries=4,
    ),
    make(
        "zeros-request-int8",
        "zero points of request and head, in splits",
        PAIR,
        kv_dtype=INT8,
        scales=BY_REQUEST,
        k_zero=True,
        v_zero=True,
        num_splits=3,
        dtype=FP32,
    ),
    make(
        "zeros-token-int8",
        "zero points by token in a dense cache",
        PAIR,
        kv_dtype=INT8,
        scales=BY_TOKEN,
        k_zero=True,
        v_zero=True,
        layout=Layout.BNSD,
        dtype=FP16,
    ),
    make("groups-int4", "int4, groups of 32 around 8", RAGGED, kv_dtype=INT4, scales=BY_GROUP),
    make(
        "groups-int4-zeros",
        "int4 with zero points, groups of 16, packed",
        PAIR,
        kv_dtype=INT4,
        scales=BY_GROUP,
        k_zero=True,
        v_zero=True,
        head_dim=80,
        layout=PACKED,
        dtype=FP16,
    ),
    make(
        "groups-int4-fp32",
        "int4 under float32, several queries behind a window, in splits",
        PAIR,
        kv_dtype=INT4,
        scales=BY_GROUP,
        k_zero=True,
        dtype=FP32,
        layout=HND,
        num_queries=3,
        sliding_window=100,
        num_splits=3,
    ),
)
