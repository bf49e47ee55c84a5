"""Cases for what features do to each other: every two values of the axes below that can meet do so
in one of these cases, and for each backend in a case that it takes, where it takes the two at all.

Ids are digests of a row's words (``pairwise_rows``), so that an axis or a value that is added adds
rows and leaves the others as they are. To add one: give a new axis first the word for what all
cases have been so far, then ``python -m splitkv.matrix --extend``.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from splitkv.backends.base import Backend
from splitkv.backends.registry import backend_named
from splitkv.common.spec import INT4, Layout, ScaleKind
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.inputs import build
from splitkv.matrix.pairwise import Axis, Never, Row, Space, Takes, extended
from splitkv.matrix.pairwise_rows import ROWS

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
WINDOW, ANCHORS, BLOCK = 37, 5, 12
_QUERY_COUNTS = (1, 4, 0, 2)
"""Of ragged requests, in turn."""

_VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "layout": {
        "nhd": {"layout": Layout.NHD},
        "hnd": {"layout": Layout.HND},
        "bsnd": {"layout": Layout.BSND},
        "bnsd": {"layout": Layout.BNSD},
        "packed": {"layout": Layout.PACKED},
    },
    "page size": {
        "p128": {"page_size": 128},
        "p64": {"page_size": 64},
        "p16": {"page_size": 16},
        "p1": {"page_size": 1},
        "pageless": {"page_size": None},
    },
    "memory": {
        "apart": {},
        "joint": {"memory": Memory.JOINT},
        "strided": {"memory": Memory.STRIDED},
        "ring": {"memory": Memory.RING},
    },
    "queries": {"s1": {}, "s4": {"num_queries": 4}, "s6": {"num_queries": 6}, "ragged": {}},
    "causality": {"causal": {}, "acausal": {"causal": False}},
    "window": {
        "unlimited": {},
        "window": {"sliding_window": WINDOW},
        "anchored": {"sliding_window": WINDOW, "anchor_tokens": ANCHORS},
        "blocks": {"sliding_window": 3 * BLOCK, "window_block": BLOCK},
    },
    "beginning": {"from-0": {}, "later": {"kv_start": True}},
    "soft cap": {"uncapped": {}, "cap": {"logits_soft_cap": 20.0}},
    "slopes": {
        "flat": {},
        "alibi": {"alibi": True},
        "alibi-each": {"alibi": True, "alibi_per_request": True},
    },
    "bias": {
        "unbiased": {},
        "bias": {"attn_bias": True, "columns": 40},
        "bias-shared": {
            "attn_bias": True,
            "columns": 40,
            "bias_batch": False,
            "bias_heads": False,
            "bias_hides": True,
        },
    },
    "mask": {"unmasked": {}, "tree": {"attn_mask": True, "columns": 40}},
    "sinks": {"sinkless": {}, "sinks": {"sinks": True}},
    "head dims": {
        "d64": {"head_dim": 64},
        "d80": {"head_dim": 80},
        "d96": {"head_dim": 96},
        "d128": {"head_dim": 128},
        "d192": {"head_dim": 192},
        "d256": {"head_dim": 256},
        "d192-128": {"head_dim": 192, "head_dim_v": 128},
    },
    "group": {"g8": {}, "g7": {}, "g16": {}, "g1": {}},
    "kv heads": {"k2": {}, "k1": {}},
    "dtype": {"bf16": {"dtype": BF16}, "fp16": {"dtype": FP16}, "fp32": {"dtype": FP32}},
    "cache dtype": {
        "same": {},
        "e4m3": {"kv_dtype": torch.float8_e4m3fn},
        "e5m2": {"kv_dtype": torch.float8_e5m2},
        "int8": {"kv_dtype": torch.int8},
        "int4": {"kv_dtype": INT4},
    },
    "scale of k": {
        "k-bare": {},
        "k-one": {"k_scale": ScaleKind.TENSOR},
        "k-head": {"k_scale": ScaleKind.HEAD},
        "k-request": {"k_scale": ScaleKind.REQUEST_HEAD},
        "k-token": {"k_scale": ScaleKind.TOKEN},
        "k-channel": {"k_scale": ScaleKind.CHANNEL},
        "k-group": {"k_scale": ScaleKind.GROUP},
    },
    "scale of v": {
        "v-bare": {},
        "v-one": {"v_scale": ScaleKind.TENSOR},
        "v-head": {"v_scale": ScaleKind.HEAD},
        "v-request": {"v_scale": ScaleKind.REQUEST_HEAD},
        "v-token": {"v_scale": ScaleKind.TOKEN},
        "v-channel": {"v_scale": ScaleKind.CHANNEL},
        "v-group": {"v_scale": ScaleKind.GROUP},
    },
    "zero of k": {"k-symmetric": {}, "k-zero": {"k_zero": True}},
    "zero of v": {"v-symmetric": {}, "v-zero": {"v_zero": True}},
    "splits": {
        "auto": {},
        "cut3": {"num_splits": 3},
        "cut-size": {"split_size": 64},
        "whole": {"num_splits": 1},
    },
    "lengths": {"tail": {}, "holes": {}, "edges": {}, "long": {}},
    "result": {"output": {}, "state": {"returns_state": True}},
    "indices": {
        "int32": {},
        "int64": {"index_dtype": torch.int64},
        "host": {"host_lengths": True},
    },
}
"""By axis and word: what the word sets of ``Case`` and ``DecodeSpec``. What depends on another axis
is in ``case_of``. The order counts: ids follow from it.
"""

_PAGES, _TABLED = ("p128", "p64", "p16", "p1"), ("nhd", "hnd")
_UNTABLED = ("bsnd", "bnsd", "packed")
_SYMMETRIC = ("same", "e4m3", "e5m2")
_UNGROUPED = (*_SYMMETRIC, "int8")
_OF_K = tuple(word for word in _VALUES["scale of k"] if word != "k-group")
_OF_V = tuple(word for word in _VALUES["scale of v"] if word != "v-group")
NEVER = (
    Never("layout", _TABLED, "page size", ("pageless",), "a block table needs pages of a size"),
    Never("layout", _UNTABLED, "page size", _PAGES, "dense and packed caches have no pages"),
    Never("layout", _UNTABLED, "memory", ("ring",), "a ring is a short block table"),
    Never("page size", ("pageless",), "memory", ("ring",), "a ring is a short block table"),
    Never("memory", ("ring",), "window", ("unlimited",), "a ring forgets what left the window"),
    Never(
        "cache dtype",
        ("same",),
        "scale of k",
        ("k-one", "k-head", "k-request", "k-token", "k-channel"),
        "scales belong to quantised caches",
    ),
    Never(
        "cache dtype",
        ("same",),
        "scale of v",
        ("v-one", "v-head", "v-request", "v-token", "v-channel"),
        "scales belong to quantised caches",
    ),
    Never("cache dtype", _UNGROUPED, "scale of k", ("k-group",), "groups are of int4 codes"),
    Never("cache dtype", _UNGROUPED, "scale of v", ("v-group",), "groups are of int4 codes"),
    Never("scale of k", ("k-group",), "scale of v", _OF_V, "both hold int4 codes, or none does"),
    Never("scale of k", _OF_K, "scale of v", ("v-group",), "both hold int4 codes, or none does"),
    Never("cache dtype", ("int4",), "scale of k", _OF_K, "int4 codes have scales of groups"),
    Never("cache dtype", ("int4",), "scale of v", _OF_V, "int4 codes have scales of groups"),
    Never("cache dtype", _SYMMETRIC, "zero of k", ("k-zero",), "8-bit floats are symmetric"),
    Never("cache dtype", _SYMMETRIC, "zero of v", ("v-zero",), "8-bit floats are symmetric"),
    Never("scale of k", ("k-bare",), "zero of k", ("k-zero",), "a zero point has a scale"),
    Never("scale of v", ("v-bare",), "zero of v", ("v-zero",), "a zero point has a scale"),
    Never("sinks", ("sinks",), "result", ("state",), "a state never holds a sink"),
)

SPACE = Space(tuple(Axis(name, tuple(words)) for name, words in _VALUES.items()), NEVER)


def case_of(row: Row) -> Case:
    """The case that ``row`` describes.

    Raises:
        ValueError: it has a pair that cannot meet.
    """
    settings: dict[str, Any] = {}
    for axis, word in row.items():
        settings |= _VALUES[axis][word]
    kv_heads = int(row["kv heads"][1:])
    settings |= {"num_q_heads": int(row["group"][1:]) * kv_heads, "num_kv_heads": kv_heads}
    lengths = _lengths(row["lengths"], settings.get("page_size") or 32)
    if row["queries"] == "ragged":
        turns = -(-len(lengths) // len(_QUERY_COUNTS))
        settings["query_lens"] = (_QUERY_COUNTS * turns)[: len(lengths)]
    text = SPACE.text(row)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return make(f"pair-{digest}", text.replace(" ", ", ") or "plain", lengths, **settings)


def _lengths(word: str, page: int) -> tuple[int, ...]:
    """Requests whose histories are shorter than six queries are in each."""
    return {
        "tail": (70, 5),
        "holes": (9, 0, 66, 0),
        "edges": (page - 1, page, page + 1, 2),
        "long": (3, 260, 1, 17),
    }[word]


def taker(backend: Backend) -> Takes:
    """Whether ``backend`` runs a row: neither its spec nor its tensors are refused."""

    @cache
    def takes(text: str) -> bool:
        case = case_of(SPACE.row(text))
        return not backend.refusals(case.spec) and not _tensors_refused(backend, case)

    return lambda row: takes(SPACE.text(row))


def _tensors_refused(backend: Backend, case: Case) -> list[str]:
    if type(backend).tensor_refusals is Backend.tensor_refusals:
        return []  # it has none, and may lack the device to plan for
    call = build(case, 0).call
    plan = backend.plan_for(call, num_splits=case.num_splits, split_size=case.split_size)
    return backend.tensor_refusals(call, plan)


def takers() -> dict[str, Takes]:
    """Who may refuse a row, by name, the narrowest first."""
    return {name: taker(backend_named(name)) for name in ("ascend", "cuda", "cpu")}


def extension() -> list[str]:
    """The committed rows, and what they lack."""
    rows = extended(SPACE, [SPACE.row(text) for text in ROWS], list(takers().values()))
    return [SPACE.text(row) for row in rows]


def extend() -> Path:
    """Write the rows anew where some are missing; takes a minute or two. Returns where."""
    lines = [f"    {json.dumps(text)}," for text in extension()]
    head, _ = _ROWS_FILE.read_text(encoding="utf-8").split("ROWS:")
    text = "ROWS: tuple[str, ...] = (\n" + "\n".join(lines) + "\n)\n"
    _ROWS_FILE.write_text(head + text, encoding="utf-8")
    return _ROWS_FILE


_ROWS_FILE = Path(__file__).with_name("pairwise_rows.py")
PAIRWISE = tuple(case_of(SPACE.row(text)) for text in ROWS)
