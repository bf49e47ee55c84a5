"""A ring knows which position each of its slots holds, whatever was written, cut back, refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitkv import DenseCache, PagedCache, RingCache
from splitkv.layers.ring_history import RingHistory, missing_prefix


def ring(
    blocks: int, page: int, *, anchors: int = 0, lengths: Tensor | None = None, **more: Any
) -> RingCache:
    """Pages of zeros; in each slot, k will hold the position written to it plus one."""
    seq_lens = torch.zeros(1, dtype=torch.int32) if lengths is None else lengths
    batch, columns = len(seq_lens), anchors + blocks
    k, v = torch.zeros(2, batch * columns, page, 1, 1)
    table = torch.arange(batch * columns, dtype=torch.int32).flip(0).reshape(batch, columns)
    return RingCache(k, v, table, seq_lens, anchor_blocks=anchors, **more)


def tokens(start: int, steps: int, mark: float = 0.0) -> Tensor:
    return (torch.arange(start, start + steps) + 1.0 + mark).reshape(1, steps, 1, 1)


def append(history: RingHistory, steps: int, mark: float = 0.0) -> None:
    rows = tokens(history.lengths[0], steps, mark)
    history.append(rows, rows)


def lost_in_memory(history: RingHistory, mark: dict[int, float]) -> list[int]:
    """Positions whose value is not found where the cache's own table puts them."""
    paged, page = history.cache.as_paged(), history.cache.page_size
    return [
        at
        for at in range(history.lengths[0])
        if float(paged.k[int(paged.block_table[0, at // page]), at % page]) != at + 1 + mark[at]
    ]


def flat(ranges: list[range]) -> list[int]:
    return [at for part in ranges for at in part]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 2),
    st.lists(st.tuples(st.booleans(), st.integers(0, 25)), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=150)
def test_property_lost_is_what_the_memory_does_not_hold(
    blocks: int, page: int, anchors: int, steps: list[tuple[bool, int]]
) -> None:
    history = RingHistory(ring(blocks, page, anchors=anchors), 1)
    mark: dict[int, float] = {}
    for turn, (cut, amount) in enumerate(steps):
        length = history.lengths[0]
        if cut:
            wanted = max(length - amount, 0)
            needed = {wanted - 1} & set(range(wanted))
            if wanted < length and needed & set(lost_in_memory(history, mark)):
                with pytest.raises(ValueError, match="were written over"):
                    history.trim([wanted])
            else:
                history.trim([wanted])
        else:
            append(history, amount, turn / 64)  # each turn has values of its own
            mark |= dict.fromkeys(range(length, length + amount), turn / 64)
        assert flat(history.lost(0)) == lost_in_memory(history, mark)


def test_what_was_written_again_is_held_again() -> None:
    history = RingHistory(ring(4, 4), 8)
    for _ in range(30):
        append(history, 1)
    assert history.lost(0) == [range(14)]  # slot by slot: 14 and 15 still lie in their page
    history.trim([0])
    assert history.lost(0) == []
    append(history, 3)
    assert history.lost(0) == []
    assert missing_prefix([history], 0, 3) == []


def test_lost_positions_have_gaps_where_few_were_written_again() -> None:
    history = RingHistory(ring(4, 1), 1)
    append(history, 4)
    for _ in range(6):
        append(history, 1)
    history.trim([7])
    assert history.lost(0) == [range(6)]
    history.trim([0])
    append(history, 2)
    history.append(tokens(2, 1), tokens(2, 1))
    assert history.lost(0) == []
    assert missing_prefix([history], 0, 4) == ["layer 0 holds 3 tokens, 4 were asked for"]


def test_pages_that_are_none_hold_nothing() -> None:
    cache = ring(3, 2, anchors=1)
    cache.block_table[0, 1] = -1
    history = RingHistory(cache, 3)
    append(history, 7)
    assert history.lost(0) == [range(2, 4)]
    assert missing_prefix([history], 0, 7) == ["layer 0 has written over positions 2 to 3"]
    history.trim([7])  # as it was: nothing to refuse


def test_of_a_ring_that_comes_with_tokens_the_newest_blocks_are_held() -> None:
    lengths = torch.tensor([30, 2], dtype=torch.int64)
    history = RingHistory(ring(2, 4, anchors=1, lengths=lengths), 5)
    assert [history.lost(0), history.lost(1)] == [[range(4, 24)], []]


def test_after_a_cut_the_last_token_kept_sees_no_rejected_one() -> None:
    # position 5 shares its slot with the rejected 9, and position 8 sees 5 to 8
    history = RingHistory(ring(4, 1), 4)
    for _ in range(10):
        append(history, 1)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 9: .* position 5, and 0 to 5 were"):
        history.trim([9])
    assert history.lengths == history.cache.seq_lens.tolist() == [10]
    roomier = RingHistory(ring(5, 1), 4)
    for _ in range(10):
        append(roomier, 1)
    roomier.trim([9])
    assert roomier.lengths == roomier.cache.seq_lens.tolist() == [9]
    with pytest.raises(ValueError, match=r"lengths\[0\] is 8: .* position 4, and 0 to 4 were"):
        roomier.trim([8])


def test_layers_may_come_with_one_tensor_of_lengths() -> None:
    shared = torch.zeros(1, dtype=torch.int32)
    layers = [RingHistory(ring(4, 2, lengths=shared), 4) for _ in range(2)]
    for layer in layers:
        append(layer, 3)
    for layer in layers:
        assert layer.lengths == layer.cache.seq_lens.tolist() == [3]
        assert lost_in_memory(layer, dict.fromkeys(range(3), 0.0)) == []
    assert shared.tolist() == [0]


def lengths_of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    "lengths",
    [lengths_of_inference(), torch.zeros(1, dtype=torch.int64).expand(2)],
    ids=["inference", "expanded"],
)
def test_lengths_that_cannot_be_written_are_not_written(lengths: Tensor) -> None:
    history = RingHistory(ring(4, 2, lengths=lengths), 4)
    history.append(*torch.ones(2, 2, 3, 1, 1))
    history.trim(torch.tensor([3, 2]))
    assert history.lengths == history.cache.seq_lens.tolist() == [3, 2]
    assert history.cache.seq_lens.dtype == lengths.dtype
    with torch.inference_mode():
        history.trim([2, 2])
    history.append(*torch.ones(2, 2, 1, 1, 1))
    assert history.lengths == history.cache.seq_lens.tolist() == [3, 3]


@pytest.mark.parametrize(
    "rows",
    [
        (None, torch.ones(1, 1, 1, 1)),
        (torch.ones(1, 1, 1, 1), [1.0]),
        (torch.ones(1, 1, 1, 1), torch.ones(1, 2, 1, 1)),
        (torch.ones(1, 9, 1, 1), torch.ones(1, 9, 1, 1)),
    ],
    ids=["k", "v", "two S", "max_seq_len"],
)
def test_refused_rows_leave_everything_as_it_was(rows: tuple[Any, Any]) -> None:
    history = RingHistory(ring(2, 2, max_seq_len=10), 2)
    append(history, 2)
    cache, before = history.cache, history.cache.k.clone()
    with pytest.raises(ValueError, match=r"must be|one S|seq_lens\[0\] is 11, .*max_seq_len is 10"):
        history.append(*rows)
    assert history.cache is cache
    assert history.lengths == cache.seq_lens.tolist() == [2]
    assert torch.equal(cache.k, before)
    assert history.lost(0) == []
    append(history, 8)
    assert history.lengths == [10]


@pytest.mark.parametrize(
    "lengths",
    [
        [1.5],
        [True],
        "1",
        None,
        [None],
        1,
        [[1]],
        [-1],
        [3],
        [1, 1],
        [],
        torch.ones(1),
        torch.ones(1, dtype=torch.bfloat16),
        torch.tensor(1),
    ],
    ids=str,
)
def test_lengths_that_are_none_are_refused(lengths: Any) -> None:
    history = RingHistory(ring(2, 2), 2)
    append(history, 2)
    with pytest.raises(ValueError, match="lengths"):
        history.trim(lengths)
    assert history.lengths == [2]


@pytest.mark.parametrize("value", [None, "4", 4.0, True])
@pytest.mark.parametrize("name", ["sliding_window", "anchor_tokens"])
def test_windows_and_anchors_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be a whole number, got {value!r}"):
        RingHistory(ring(4, 4, anchors=1), **{"sliding_window": 4, name: value})


def test_caches_that_are_no_ring_or_do_not_fit_are_refused() -> None:
    cache = ring(4, 4)
    paged = PagedCache(cache.k, cache.v, cache.block_table, cache.seq_lens)
    dense = DenseCache(cache.k[:1], cache.v[:1], cache.seq_lens)
    for other, name in ((paged, "PagedCache"), (dense, "DenseCache"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"cache must be a RingCache, got {name}"):
            RingHistory(other, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 5, the cache's max_seq_len is 4"):
        RingHistory(replace(cache, seq_lens=torch.tensor([5]), max_seq_len=4), 4)
    with pytest.raises(ValueError, match="pages hold 0 tokens"):
        RingHistory(ring(4, 0), 1)


@pytest.mark.parametrize("request_index", [5, 1, -1, 0.0, None, True])
def test_requests_that_are_none_are_refused(request_index: Any) -> None:
    history = RingHistory(ring(4, 4), 4)
    with pytest.raises(ValueError, match="request"):
        history.lost(request_index)
    with pytest.raises(ValueError, match="request"):
        missing_prefix([history], request_index, 1)
    for length in (-1, 1.5):
        with pytest.raises(ValueError, match="length"):
            missing_prefix([history], 0, length)  # type: ignore[arg-type]
