"""Random well-formed cases from the whole space that ``Case`` can express, but for the far pool
(gigabytes of address space), values that are a view of the keys, and recordings.

Choices come from NumPy's Philox, as the tensors of a case do: a seed and an index name a case on
every host. A third of the cases is plain, a third crowded with features, so that narrow backends
take some and wide ones meet combinations. Lengths lie at the edges of tiles, pages and windows more
often than between them.
"""

from collections.abc import Sequence
from itertools import count
from typing import TypeVar

import torch

from splitkv.common.spec import FLOAT_DTYPES, INT4, QUANTISED_DTYPES, Layout, ScaleKind
from splitkv.matrix.case import Case, Memory
from splitkv.matrix.case_text import from_settings
from splitkv.matrix.draw import raw

Option = TypeVar("Option")
Settings = dict[str, object]

MOST_TOKENS = 600
"""Tokens of the longest request: several of every tile, and pages of most sizes."""
_MOST_NUMBERS = 2**20
"""Of K and V of a request: its numbers are drawn four times over."""
_CROWDS = (4, 18, 40)
"""Percent of the optional features that a case has."""
_COMMON = 12
"""Percent, at least, of what the narrowest backend takes too: queries, windows, sinks."""
_TILES = (16, 32, 64, 128, 256)

_HEADS_KV = (1, 1, 2, 2, 3, 4, 8)
_GROUPS = (1, 1, 2, 3, 4, 4, 5, 7, 8, 16)
_WIDE_GROUPS = (32, 64, 65, 128)
_DIMS = (16, 32, 64, 64, 64, 80, 96, 128, 128, 128)
_ODD_DIMS = (1, 3, 8, 24, 40, 72, 112, 192, 256, 257, 576)
_PAGES = (16, 16, 32, 64, 128, 128, 128, 256)
_ODD_PAGES = (1, 2, 3, 8, 48, 100, 512)
_DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16, torch.float32)
_SCALE_KINDS = (None, *(kind for kind in ScaleKind if kind is not ScaleKind.GROUP))
_CODES = tuple(dtype for dtype in QUANTISED_DTYPES if dtype != INT4)
_QUERIES = (2, 3, 4, 4, 8, 16, 17)
_SM_SCALES = (0.0, -0.1, 0.03, 0.5, 1.0)
_SOFT_CAPS = (0.01, 0.5, 5.0, 30.0, 50.0)
_GAINS = (0.0, 0.01, 10.0, 100.0)
_FINITE_POISONS = (0.0, 400.0)
_POISONS = (*_FINITE_POISONS, float("inf"), float("-inf"))


class Dice:
    """Choices from one stream of integers."""

    def __init__(self, seed: int, name: str) -> None:
        self._seed, self._name, self._block = seed, name, count()
        self._left: list[int] = []

    def below(self, limit: int) -> int:
        """0 to ``limit`` - 1."""
        if not self._left:
            block = f"choices{next(self._block)}"
            self._left = raw(self._seed, self._name, block, 128).tolist()
        return self._left.pop() % limit

    def between(self, low: int, high: int) -> int:
        """``low`` to ``high``, both included."""
        return low + self.below(high - low + 1)

    def among(self, options: Sequence[Option]) -> Option:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent


def draw(seed: int, index: int, most_tokens: int = MOST_TOKENS) -> Case:
    """Case ``index`` of ``seed``, no request longer than ``most_tokens``."""
    id = f"fuzz-{seed}-{index}"
    dice = Dice(seed, id)
    crowd = dice.among(_CROWDS)
    found = _layer(dice, crowd) | _scores(dice, crowd)
    found |= _window(dice, most_tokens) if dice.chance(max(crowd, _COMMON)) else {}
    found |= _cache_types(dice, crowd, found)
    found |= _requests(dice, crowd, found, most_tokens)
    found |= _splits(dice, found, most_tokens)
    found |= _columns(dice, crowd, found)
    found |= _memory(dice, crowd, found)
    found |= _result(dice, crowd, found)
    return from_settings(id, found)


def _layer(dice: Dice, crowd: int) -> Settings:
    """Layout, heads and dims."""
    layout = dice.among((Layout.NHD, Layout.NHD, Layout.HND, *Layout))
    kv_heads, group = dice.among(_HEADS_KV), dice.among(_GROUPS)
    if dice.chance(crowd // 4):
        kv_heads, group = 1, dice.among(_WIDE_GROUPS)
    found: Settings = {"layout": layout, "num_kv_heads": kv_heads, "num_q_heads": kv_heads * group}
    found["head_dim"] = dice.among(_ODD_DIMS if dice.chance(crowd) else _DIMS)
    if dice.chance(crowd // 2):
        found["head_dim_v"] = dice.among(_DIMS + _ODD_DIMS)
    if layout.paged:
        found["page_size"] = dice.among(_ODD_PAGES if dice.chance(crowd) else _PAGES)
    found["dtype"] = dice.among(_DTYPES)
    if dice.chance(crowd // 4):
        found["dtype"] = torch.float64
    return found


def _scores(dice: Dice, crowd: int) -> Settings:
    """What becomes of a product of query and key."""
    found: Settings = {}
    if dice.chance(crowd // 2):
        found["sm_scale"] = dice.among(_SM_SCALES)
    if dice.chance(crowd):
        found["logits_soft_cap"] = dice.among(_SOFT_CAPS)
    if dice.chance(crowd):
        found |= {"alibi": True, "alibi_per_request": dice.chance(50)}
    found["kv_start"] = dice.chance(crowd)
    found["attn_bias"], found["attn_mask"] = dice.chance(crowd), dice.chance(crowd)
    found["sinks"] = dice.chance(max(crowd, _COMMON))
    if dice.chance(crowd // 2):
        found["q_gain"] = dice.among(_GAINS)
    return found


def _window(dice: Dice, most: int) -> Settings:
    """A window, perhaps of blocks; anchors with it in half the cases, and now and then alone."""
    edges = [size + step for size in (2, *_TILES) for step in (-1, 0, 1) if size + step <= most]
    window = dice.among(edges) if dice.chance(60) else dice.between(1, most)
    anchors = dice.among((1, 3, 16, 127, 128, 129)) if dice.chance(50) else 0
    found: Settings = {"sliding_window": None, "anchor_tokens": anchors}
    if not dice.chance(5):
        block = dice.among((3, 16, 32, window)) if dice.chance(60) else 1
        found |= {"sliding_window": -(-window // block) * block, "window_block": block}
    return found


def _cache_types(dice: Dice, crowd: int, found: Settings) -> Settings:
    if not dice.chance(crowd):
        return {}
    if dice.chance(40):
        return {"kv_dtype": dice.among(FLOAT_DTYPES)}
    dims = _number(found, "head_dim"), _number(found, "head_dim_v")
    if not any(dim % 16 for dim in dims) and dice.chance(40):
        scales = dict.fromkeys(("k_scale", "v_scale"), ScaleKind.GROUP)
        zeros = {"k_zero": dice.chance(50), "v_zero": dice.chance(50)}
        return {"kv_dtype": INT4, **scales, **zeros}
    made: Settings = {"kv_dtype": dice.among(_CODES)}
    for part in "kv":
        kind = made[f"{part}_scale"] = dice.among(_SCALE_KINDS)
        if kind is not None and made["kv_dtype"] is torch.int8:
            made[f"{part}_zero"] = dice.chance(50)
    return made


def _requests(dice: Dice, crowd: int, found: Settings, most: int) -> Settings:
    """Lengths and queries of each request; few tokens where heads are many and wide."""
    page, window, dim = (
        _number(found, name) for name in ("page_size", "sliding_window", "head_dim")
    )
    wide = _number(found, "num_kv_heads") * (dim + (_number(found, "head_dim_v") or dim))
    most = max(min(most, _MOST_NUMBERS // wide), 3)
    queries = dice.among(_QUERIES) if dice.chance(max(crowd, _COMMON)) else 1
    ragged = dice.chance(crowd)
    marks = (1, 2, queries, page, 2 * page, window, *_TILES, 2 * _TILES[-1], most - 1)
    edges = [mark + step for mark in marks for step in (-1, 0, 1) if 0 <= mark + step <= most]
    batch = dice.among((1, 1, 2, 2, 3, 4, 6))
    if dice.chance(2) and found["layout"] in (Layout.NHD, Layout.HND) and not ragged:
        extras = ("kv_start", "alibi", "attn_bias", "attn_mask", "k_scale", "v_scale")
        batch = batch if any(found.get(name) for name in extras) else 0
    lengths = tuple(
        dice.among(edges) if dice.chance(65) else dice.below(most + 1) for _ in range(batch)
    )
    made: Settings = {"seq_lens": lengths, "num_queries": queries}
    made["causal"] = not dice.chance(crowd // 2)
    if ragged:
        made["packed_queries"] = True
        made["query_lens"] = tuple(dice.between(0, queries) for _ in lengths)
    return made


def _splits(dice: Dice, found: Settings, most: int) -> Settings:
    """How the plan cuts, and whether it was made for longer requests."""
    made: Settings = {}
    way = dice.below(5)
    if way == 0:
        made["num_splits"] = dice.among((1, 2, 3, 4, 7, 64))
    elif way in (1, 2):
        made["split_size"] = dice.among((1, 16, 64, 128, 129, 200, 256, most))
    if dice.chance(15):
        lengths = found["seq_lens"]
        assert isinstance(lengths, tuple)
        made["planned_lens"] = tuple(
            length + dice.among((0, 0, 1, 130, most)) for length in lengths
        )
    return made


def _columns(dice: Dice, crowd: int, found: Settings) -> Settings:
    """Width of mask and bias: none, one, the queries', past the longest request."""
    if not (found["attn_bias"] or found["attn_mask"]):
        return {}
    lengths, queries = found["seq_lens"], _number(found, "num_queries")
    assert isinstance(lengths, tuple)
    longest = max(lengths, default=0)
    made: Settings = {"columns": dice.among((0, 1, 3, queries, 17, 64, longest, longest + 5))}
    if found["attn_bias"]:
        made |= {"bias_batch": not dice.chance(30), "bias_heads": not dice.chance(30)}
        made["bias_hides"] = dice.chance(crowd)
    return made


def _memory(dice: Dice, crowd: int, found: Settings) -> Settings:
    """Strides, capacity, index types, where lengths live, what unused slots hold."""
    made: Settings = {"odd_capacity": dice.chance(30), "host_lengths": dice.chance(40)}
    if found.get("sliding_window") and found.get("page_size") and dice.chance(30):
        made["memory"] = Memory.RING
    elif dice.chance(crowd):
        made["memory"] = dice.among((Memory.JOINT, Memory.STRIDED))
    if dice.chance(30):
        made["index_dtype"] = torch.int64
    if dice.chance(30):
        has_inf = found.get("kv_dtype") is not torch.float8_e4m3fn
        made["poison"] = dice.among(_POISONS if has_inf else _FINITE_POISONS)
    return made


def _result(dice: Dice, crowd: int, found: Settings) -> Settings:
    """A state in place of a result, of two parts if it can be; a NaN that somebody sees."""
    made: Settings = {}
    by_place = (
        "sliding_window",
        "kv_start",
        "alibi",
        "attn_bias",
        "attn_mask",
        "packed_queries",
    )
    cuts = ("num_splits", "split_size", "planned_lens")
    if not found["sinks"] and dice.chance(max(crowd, 10)):
        made["returns_state"] = True
        whole = found["num_queries"] == 1 and not any(found.get(x) for x in by_place + cuts)
        if whole and "page_size" in found and dice.chance(50):
            made["merged_at_block"] = dice.below(4)
    held = found.get("kv_dtype") not in (torch.int8, INT4) and not found.get("bias_hides")
    if held and dice.chance(crowd // 4):
        lengths, queries = found["seq_lens"], found.get("query_lens", (1,))
        assert isinstance(lengths, tuple)
        assert isinstance(queries, tuple)
        if lengths and queries and lengths[0] and queries[0]:
            made["nan"] = dice.among("kv")
    return made


def _number(found: Settings, name: str) -> int:
    value = found.get(name) or 0
    assert isinstance(value, int)
    return value
