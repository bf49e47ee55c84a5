"""Small well-formed requests, and every way to spoil one with what the refusal then says."""

import math
from typing import Any

import torch
from torch import Tensor

from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import CPU
from splitkv.common.spec import DecodeSpec, Layout

B, H, K, D, P = 2, 4, 2, 16, 8
PAGES, LENGTHS = 6, [17, 8]
Request = dict[str, Any]


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def table(**entries: int) -> Tensor:
    """Pages 0 to 2 and 3; r1c2=9 puts 9 into row 1, column 2. Row 1 uses its first column only."""
    pages = torch.tensor([[0, 1, 2], [3, -7, 10**6]], dtype=torch.int32)
    for place, value in entries.items():
        pages[int(place[1]), int(place[3])] = value
    return pages


def paged(**changes: Any) -> Request:
    request = {
        "q": torch.zeros(B, H, D),
        "k": torch.zeros(PAGES, P, K, D),
        "v": torch.zeros(PAGES, P, K, D),
        "block_table": table(),
        "seq_lens": ints(*LENGTHS),
        "layout": "NHD",
    }
    return {**request, **changes}


def dense(**changes: Any) -> Request:
    request = {
        "q": torch.zeros(B, H, D),
        "k": torch.zeros(B, 20, K, D),
        "v": torch.zeros(B, 20, K, D),
        "seq_lens": ints(*LENGTHS),
        "layout": "BSND",
    }
    return {**request, **changes}


def packed(**changes: Any) -> Request:
    request = {
        "q": torch.zeros(B, H, D),
        "k": torch.zeros(25, K, D),
        "v": torch.zeros(25, K, D),
        "cu_seqlens_k": ints(0, 17, 25),
    }
    return {**request, **changes}


def several(**changes: Any) -> Request:
    """Ragged queries: two of request 0, one of request 1."""
    return paged(**{"q": torch.zeros(3, H, D), "cu_seqlens_q": ints(0, 2, 3), **changes})


def listed(**changes: Any) -> Request:
    request = paged(kv_indptr=ints(0, 3, 4), kv_indices=ints(0, 1, 2, 3))
    del request["block_table"]
    return {**request, **changes}


def int8(**changes: Any) -> Request:
    codes = torch.zeros(PAGES, P, K, D, dtype=torch.int8)
    return paged(**{"k": codes, "v": codes, "k_scale": 1.0, "v_scale": 1.0, **changes})


def other_plan(lengths: list[int], **fields: Any) -> SplitPlan:
    spec = DecodeSpec(
        **{
            "num_q_heads": H,
            "num_kv_heads": K,
            "head_dim": D,
            "layout": Layout.NHD,
            "page_size": P,
            "dtype": torch.float32,
            **fields,
        }
    )
    return plan_splits(spec, lengths, profile=CPU)


NAN = math.nan
META = torch.device("meta")

MALFORMED: dict[str, tuple[Request, str]] = {
    # shapes
    "q of two dimensions": (
        paged(q=torch.zeros(B, D)),
        r"q must be \[B, H, D\] or .*got shape \[2, 16\]",
    ),
    "q of another batch": (
        paged(q=torch.zeros(3, H, D)),
        r"q must be \[2, 1, 4, 16\].*got \[3, 1, 4, 16\]",
    ),
    "q of another head dim": (paged(q=torch.zeros(B, H, 8)), r"k has head dim 16, spec says 8"),
    "H that K does not divide": (
        paged(q=torch.zeros(B, 5, D)),
        r"num_q_heads 5 is not divisible by num_kv_heads 2",
    ),
    "no query": (
        paged(q=torch.zeros(B, 0, H, D)),
        r"q must be \[2, 1, 4, 16\].*got \[2, 0, 4, 16\]",
    ),
    "k of three dimensions": (
        paged(k=torch.zeros(PAGES, P, D)),
        r"k must be \[pages, P, K, D\].*got shape \[6, 8, 16\]",
    ),
    "v of another page count": (
        paged(v=torch.zeros(5, P, K, D)),
        r"k and v must agree.*got \[6, 8, 2, 16\] and \[5, 8, 2, 16\]",
    ),
    "block_table of one dimension": (
        paged(block_table=ints(0, 1)),
        r"block_table must be \[B, max_blocks\], got shape \[2\]",
    ),
    "block_table of another batch": (
        paged(block_table=ints(0, 1, 2)[None]),
        r"seq_lens has 2 requests, block_table has 1",
    ),
    "seq_lens of another batch": (
        paged(seq_lens=ints(1, 2, 3)),
        r"seq_lens has 3 requests, block_table has 2",
    ),
    "seq_lens of two dimensions": (
        paged(seq_lens=ints(1, 2)[None]),
        r"seq_lens must be \[B\], got shape \[1, 2\]",
    ),
    "dense k of another batch": (
        dense(k=torch.zeros(3, 20, K, D), v=torch.zeros(3, 20, K, D)),
        r"seq_lens has 2 requests, k has 3",
    ),
    "packed k of four dimensions": (
        packed(k=torch.zeros(25, 1, K, D)),
        r"k must be \[tokens, K, D\], got shape \[25, 1, 2, 16\]",
    ),
    "offsets of another batch": (
        several(cu_seqlens_q=ints(0, 3)),
        r"cu_seqlens_q must have B \+ 1 = 3 entries, got 2",
    ),
    "sinks per kv head": (paged(sinks=torch.zeros(K)), r"sinks must be \[4\], got \[2\]"),
    "slopes per kv head": (
        paged(alibi_slopes=torch.zeros(K)),
        r"alibi_slopes must be \[4\] or \[2, 4\], got \[2\]",
    ),
    "bias of three dimensions": (
        paged(attn_bias=torch.zeros(B, 1, 5)),
        r"attn_bias must be \[2, 4, 1, 5\] or .*got \[2, 1, 5\]",
    ),
    "mask of another S": (
        paged(attn_mask=torch.ones(B, 2, 5, dtype=torch.bool)),
        r"attn_mask must be \[2, 1, 5\], got \[2, 2, 5\]",
    ),
    "scale per query head": (
        int8(k_scale=torch.ones(H)),
        r"k_scale must be a number, \[K\] = \[2\] or .*got \[4\]",
    ),
    "out of another head dim": (
        paged(out=torch.zeros(B, H, 8)),
        r"out must be \[2, 4, 16\] torch.float32.*got \[2, 4, 8\]",
    ),
    "lse with S": (
        paged(lse=torch.zeros(B, 1, H)),
        r"lse must be \[2, 4\] torch.float32.*got \[2, 1, 4\]",
    ),
    # dtypes
    "integer q": (
        paged(q=torch.zeros(B, H, D, dtype=torch.int32)),
        r"dtype \(of q\) must be one of .*got torch.int32",
    ),
    "integer k and v": (
        dense(
            k=torch.zeros(B, 20, K, D, dtype=torch.int32),
            v=torch.zeros(B, 20, K, D, dtype=torch.int32),
        ),
        r"kv_dtype must be one of .*got torch.int32",
    ),
    "k and v of two dtypes": (
        paged(v=torch.zeros(PAGES, P, K, D).half()),
        r"one dtype, got torch.float32 and torch.float16",
    ),
    "int16 lengths": (
        paged(seq_lens=ints(*LENGTHS, dtype=torch.int16)),
        r"seq_lens must be int32 or int64, got torch.int16",
    ),
    "uint8 lengths": (
        dense(seq_lens=ints(*LENGTHS, dtype=torch.uint8)),
        r"seq_lens must be int32 or int64, got torch.uint8",
    ),
    "float lengths": (
        dense(seq_lens=torch.tensor([17.0, 8.0])),
        r"seq_lens must be int32 or int64, got torch.float32",
    ),
    "float lengths in a list": (
        dense(seq_lens=[17.0, 8.0]),
        r"seq_lens must be one-dimensional integers",
    ),
    "int16 table": (
        paged(block_table=torch.zeros(B, 3, dtype=torch.int16)),
        r"block_table must be int32 or int64, got torch.int16",
    ),
    "uint8 table": (
        paged(block_table=torch.zeros(B, 3, dtype=torch.uint8)),
        r"block_table must be int32 or int64, got torch.uint8",
    ),
    "int16 offsets of k": (
        packed(cu_seqlens_k=ints(0, 17, 25, dtype=torch.int16)),
        r"cu_seqlens_k must be int32 or int64, got torch.int16",
    ),
    "uint8 offsets of q": (
        several(cu_seqlens_q=ints(0, 2, 3, dtype=torch.uint8)),
        r"cu_seqlens_q must be int32 or int64, got torch.uint8",
    ),
    "uint8 page lists": (
        listed(kv_indptr=ints(0, 3, 4, dtype=torch.uint8)),
        r"kv_indptr must be int32 or int64, got torch.uint8",
    ),
    "int16 page lists": (
        listed(kv_indices=ints(0, 1, 2, 3, dtype=torch.int16)),
        r"kv_indices must be int32 or int64, got torch.int16",
    ),
    "float mask": (
        paged(attn_mask=torch.zeros(B, 1, 5)),
        r"attn_mask must be bool \(True may be seen\), got torch.float32",
    ),
    "boolean bias": (
        paged(attn_bias=torch.ones(B, 1, 1, 5, dtype=torch.bool)),
        r"attn_bias must be of a floating dtype, got torch.bool",
    ),
    "integer sinks": (
        paged(sinks=ints(1, 2, 3, 4)),
        r"sinks must be of a floating dtype, got torch.int32",
    ),
    "integer slopes": (
        paged(alibi_slopes=ints(1, 2, 3, 4)),
        r"alibi_slopes must be of a floating dtype, got torch.int32",
    ),
    "out of another dtype": (
        paged(out=torch.zeros(B, H, D).half()),
        r"out must be .*torch.float32 on cpu, got .*torch.float16",
    ),
    "lse in 16 bits": (
        paged(lse=torch.zeros(B, H).half()),
        r"lse must be .*torch.float32 on cpu, got .*torch.float16",
    ),
    # devices
    "q elsewhere": (
        paged(q=torch.zeros(B, H, D, device=META)),
        r"k must be on meta like q, got cpu",
    ),
    "v elsewhere": (
        paged(v=torch.zeros(PAGES, P, K, D, device=META)),
        r"k and v must be on one device, got cpu and meta",
    ),
    "table elsewhere": (
        paged(block_table=table().to(META)),
        r"block_table must be on cpu like q, got meta",
    ),
    "lengths elsewhere": (
        paged(seq_lens=ints(*LENGTHS).to(META)),
        r"seq_lens must be on cpu like q, or on cpu, got meta",
    ),
    "sinks elsewhere": (
        paged(sinks=torch.zeros(H, device=META)),
        r"sinks must be on cpu like q, got meta",
    ),
    "slopes elsewhere": (
        paged(alibi_slopes=torch.zeros(H, device=META)),
        r"alibi_slopes must be on cpu like q, got meta",
    ),
    "mask elsewhere": (
        paged(attn_mask=torch.ones(B, 1, 5, dtype=torch.bool, device=META)),
        r"attn_mask must be on cpu like q, got meta",
    ),
    "out elsewhere": (
        paged(out=torch.zeros(B, H, D, device=META)),
        r"out must be .*on cpu, got .*on meta",
    ),
    # lengths, tables, offsets
    "negative length": (
        paged(seq_lens=ints(17, -1)),
        r"seq_lens\[1\] is -1, allowed are 0 to 2147483647",
    ),
    "negative length in a list": (
        dense(seq_lens=[-3, 8]),
        r"seq_lens\[0\] is -3, allowed are 0 to 2147483647",
    ),
    "length beyond int32": (
        dense(seq_lens=torch.tensor([2**31, 8])),
        r"seq_lens\[0\] is 2147483648, allowed are 0 to 2147483647",
    ),
    "length beyond a dense cache": (
        dense(seq_lens=ints(21, 8)),
        r"seq_lens\[0\] is 21, the cache's capacity is 20 tokens",
    ),
    "table too short": (
        paged(seq_lens=ints(25, 8)),
        r"seq_lens\[0\] is 25, the block table's capacity is 24 tokens",
    ),
    "page id above the pool": (
        paged(block_table=table(r0c1=6)),
        r"block_table\[0, 1\] is 6, the pool has pages 0 to 5",
    ),
    "negative page id": (
        paged(block_table=table(r1c0=-1)),
        r"block_table\[1, 0\] is -1, the pool has pages 0 to 5",
    ),
    "page id of the last token": (
        paged(seq_lens=ints(17, 9)),
        r"block_table\[1, 1\] is -7, the pool has pages 0 to 5",
    ),
    "page id of an anchor": (
        paged(block_table=table(r0c0=77), sliding_window=1, anchor_tokens=1),
        r"block_table\[0, 0\] is 77",
    ),
    "offsets that start late": (
        packed(cu_seqlens_k=ints(1, 17, 25)),
        r"cu_seqlens_k\[0\] must be 0, got 1",
    ),
    "offsets that fall": (
        packed(cu_seqlens_k=ints(0, 26, 25)),
        r"cu_seqlens_k must not fall: cu_seqlens_k\[2\] is 25 after 26",
    ),
    "offsets of too few rows": (
        packed(cu_seqlens_k=ints(0, 17, 24)),
        r"cu_seqlens_k\[2\] must be the row count 25, got 24",
    ),
    "offsets of too many rows": (
        packed(cu_seqlens_k=ints(0, 17, 26)),
        r"cu_seqlens_k\[2\] must be the row count 25, got 26",
    ),
    "no offsets": (
        packed(cu_seqlens_k=ints()),
        r"cu_seqlens_k must be \[B \+ 1\], got shape \[0\]",
    ),
    "query offsets that fall": (
        several(cu_seqlens_q=ints(0, 4, 3)),
        r"cu_seqlens_q must not fall: cu_seqlens_q\[2\] is 3 after 4",
    ),
    "query offsets of too few rows": (
        several(cu_seqlens_q=ints(0, 1, 2)),
        r"cu_seqlens_q\[2\] must be the row count 3, got 2",
    ),
    "page lists that fall": (
        listed(kv_indptr=ints(0, 5, 4)),
        r"kv_indptr must not fall: kv_indptr\[2\] is 4 after 5",
    ),
    "page lists of too few pages": (
        listed(kv_indptr=ints(0, 2, 3)),
        r"kv_indptr\[2\] must be the row count 4, got 3",
    ),
    "length beyond its page list": (
        listed(seq_lens=ints(17, 9)),
        r"seq_lens\[1\] is 9, its 1 pages hold 8 tokens",
    ),
    # scales and slopes
    "NaN scale": (int8(k_scale=NAN), r"k_scale must be finite, got \[nan\]"),
    "infinite scale of one head": (
        int8(v_scale=torch.tensor([1.0, math.inf])),
        r"v_scale must be finite, got \[1.0, inf\]",
    ),
    "scale of a float cache": (
        paged(k_scale=2.0),
        r"k_scale needs a quantised cache .*the cache is torch.float32",
    ),
    "NaN slope": (
        paged(alibi_slopes=torch.tensor([0.1, NAN, 0.1, 0.1])),
        r"alibi_slopes must be finite",
    ),
    # contradictions and choices
    "both windows": (
        paged(sliding_window=8, window_left=7),
        r"sliding_window or window_left, not both: got 8 and 7",
    ),
    "window_left below -1": (
        paged(window_left=-2),
        r"window_left must be -1 \(unlimited\) or more, got -2",
    ),
    "window of 0": (paged(sliding_window=0), r"sliding_window must be a positive integer, got 0"),
    "negative anchors": (
        paged(anchor_tokens=-1),
        r"anchor_tokens must be an integer of 0 to 2147483647, got -1",
    ),
    "soft cap of 0": (
        paged(logits_soft_cap=0.0),
        r"logits_soft_cap must be finite and above 0 \(None: off\), got 0.0",
    ),
    "NaN soft cap": (
        paged(logits_soft_cap=NAN),
        r"logits_soft_cap must be finite and above 0 .*got nan",
    ),
    "NaN sm_scale": (paged(sm_scale=NAN), r"sm_scale must be finite in float32, got nan"),
    "both split arguments": (
        paged(num_splits=2, split_size=64),
        r"num_splits or split_size, not both: got 2 and 64",
    ),
    "num_splits of 0": (paged(num_splits=0), r"num_splits must be an integer of 1 or more .*got 0"),
    "plan and num_splits": (
        paged(plan=other_plan(LENGTHS), num_splits=2),
        r"plan, num_splits or split_size, only one of them",
    ),
    "plan of another batch": (
        paged(plan=other_plan([17])),
        r"plan is for 1 requests, the cache has 2",
    ),
    "plan of other heads": (
        paged(plan=other_plan(LENGTHS, num_q_heads=8)),
        r"plan was made for .*num_q_heads=8.*the call's spec differs",
    ),
    "plan of another window": (
        paged(plan=other_plan(LENGTHS, sliding_window=8)),
        r"plan was made for .*sliding_window=8",
    ),
    "plan for shorter requests": (
        paged(plan=other_plan([16, 8])),
        r"seq_lens\[0\] is 17, the plan was made for 16; call plan.refresh",
    ),
    "unknown layout": (paged(layout="NDH"), r"unknown layout 'NDH', known: \['BSND'"),
    "no layout with a table": (
        paged(layout=None),
        r"needs layout 'NHD' or 'HND' \(it is never guessed\), got None",
    ),
    "dense layout with a table": (
        paged(layout="BSND"),
        r"needs layout 'NHD' or 'HND' .*got 'BSND'",
    ),
    "no layout, no table": (
        dense(layout=None),
        r"a dense cache needs layout 'BSND' or 'BNSD'.*got layout None",
    ),
    "layout with packed": (
        packed(layout="NHD"),
        r"cu_seqlens_k goes with no layout and no seq_lens, got layout 'NHD'",
    ),
    "pages without lengths": (paged(seq_lens=None), r"a paged cache needs seq_lens \[B\]"),
    "two ways to find pages": (
        listed(block_table=table()),
        r"a cache is found one way, got block_table and kv_indptr",
    ),
    "half a page list": (listed(kv_indices=None), r"kv_indptr and kv_indices come together"),
    "unknown backend": (
        paged(backend="gpu"),
        r"unknown backend 'gpu', known: \['cuda', 'ascend', 'cpu'\]",
    ),
    "unknown validate": (
        paged(validate="all"),
        r"unknown validate 'all', known: \['full', 'shapes', 'none'\]",
    ),
    # autograd
    "q requires grad": (
        paged(q=torch.zeros(B, H, D, requires_grad=True)),
        r"q requires grad, decode attention is for inference only",
    ),
    "k requires grad": (
        paged(k=torch.zeros(PAGES, P, K, D, requires_grad=True)),
        r"k requires grad",
    ),
    "v requires grad": (dense(v=torch.zeros(B, 20, K, D, requires_grad=True)), r"v requires grad"),
}
"""What is wrong, and a pattern of the message: argument, value, limit."""
