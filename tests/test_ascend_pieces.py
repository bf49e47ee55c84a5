"""Masks turned into lengths: every visible (query, key) is in one piece, whatever the cuts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import ASCEND_910B3
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.pieces import Piece, cut_pieces, whole_causal_pieces
from splitkv.matrix.reference import visible

PAGE = 4


def make_spec(**semantics: object) -> DecodeSpec:
    semantics = {"num_queries": 1, **semantics}
    return DecodeSpec(
        num_q_heads=2, num_kv_heads=1, head_dim=16, layout=Layout.NHD, page_size=PAGE, **semantics
    )


def make_plan(spec: DecodeSpec, lengths: list[int], split_size: int | None) -> SplitPlan:
    profile = replace(ASCEND_910B3, tile_tokens=PAGE)
    if split_size is None:
        return plan_splits(spec, lengths, profile=profile, num_splits=1)
    return plan_splits(spec, lengths, profile=profile, split_size=split_size)


def seen(pieces: list[Piece], request: int, queries: int, length: int) -> np.ndarray:
    """How often each key is in a piece of each query, [queries, length]."""
    count = np.zeros((queries, length), dtype=int)
    for piece in pieces:
        if piece.request == request:
            count[piece.first : piece.first + piece.count, piece.start : piece.end] += 1
    return count


@st.composite
def cuts(draw: st.DrawFn) -> tuple[SplitPlan, list[int], list[int], int, bool]:
    queries = draw(st.integers(1, 5))
    blocks, block = draw(st.integers(1, 40)), draw(st.sampled_from([1, 1, 3, 8]))
    windowed = draw(st.booleans())
    spec = make_spec(
        num_queries=queries,
        causal=draw(st.booleans()),
        sliding_window=-(-blocks // block) * block if windowed else None,
        window_block=block if windowed else 1,
        anchor_tokens=draw(st.integers(0, 12)),
    )
    planned = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    lengths = [draw(st.integers(0, length)) for length in planned]
    counts = [draw(st.integers(0, queries)) for _ in planned]
    plan = make_plan(spec, planned, draw(st.none() | st.integers(1, 20)))
    return plan, lengths, counts, draw(st.sampled_from([1, PAGE])), draw(st.booleans())


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_each_visible_key_is_in_one_piece(
    cut: tuple[SplitPlan, list[int], list[int], int, bool],
) -> None:
    plan, lengths, counts, align, share = cut
    pieces = cut_pieces(plan, lengths, counts, align=align, share=share)
    for request, (length, queries) in enumerate(zip(lengths, counts, strict=True)):
        expected = visible(plan.spec, length, queries).numpy().astype(int)
        assert np.array_equal(seen(pieces, request, queries, length), expected)


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_only_short_single_query_pieces_begin_inside_a_page(
    cut: tuple[SplitPlan, list[int], list[int], int, bool],
) -> None:
    plan, lengths, counts, _, share = cut
    for piece in cut_pieces(plan, lengths, counts, align=PAGE, share=share):
        assert piece.length > 0
        assert share or piece.count == 1
        if piece.start % PAGE:
            assert piece.count == 1
            assert piece.start // PAGE == (piece.end - 1) // PAGE


def test_the_picture_in_the_module() -> None:
    spec = make_spec(num_queries=3, sliding_window=4)
    plan = make_plan(spec, [8], None)
    assert cut_pieces(plan, [8], [3], align=2) == [
        Piece(0, 0, 1, 2, 4),
        Piece(0, 1, 1, 3, 4),
        Piece(0, 0, 3, 4, 6),
        Piece(0, 1, 1, 6, 7),
        Piece(0, 2, 1, 6, 8),
    ]


def test_a_window_for_one_query_costs_one_copied_range() -> None:
    spec = make_spec(sliding_window=10)
    plan = make_plan(spec, [23], None)
    assert cut_pieces(plan, [23], [1], align=PAGE) == [
        Piece(0, 0, 1, 13, 16),
        Piece(0, 0, 1, 16, 23),
    ]


def test_queries_share_everything_but_the_last_page() -> None:
    spec = make_spec(num_queries=3)
    plan = make_plan(spec, [18], 8)
    shared = [piece for piece in cut_pieces(plan, [18], [3], align=PAGE) if piece.count == 3]
    assert [(piece.start, piece.end) for piece in shared] == [(0, 8), (8, 16)]


@pytest.mark.parametrize(
    ("length", "count", "expected"),
    [
        (5, 2, [Piece(0, 0, 2, 0, 5)]),
        (1, 3, [Piece(0, 2, 1, 0, 1)]),  # the first two queries see nothing
        (0, 3, []),
        (4, 0, []),
    ],
)
def test_whole_requests_for_the_operator_s_causal_mask(
    length: int, count: int, expected: list[Piece]
) -> None:
    assert whole_causal_pieces([length], [count]) == expected
