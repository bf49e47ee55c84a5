"""States of several ranks merge into what one device would have; who keeps which position."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rank_worker import WORLDS, random_state
from splitkv.common.ranks import merge_across_ranks, owner, shard_lengths, shard_windows
from splitkv.common.state import PartialState, merge_states_torch

Results = list[dict[str, Any]]
ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 240
"""For all ranks together on a busy machine; a collective gives up after 60."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """What every rank got, by the number of ranks; they all have to end well."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "rank_worker.py"), str(folder)],
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        world: [
            torch.load(folder / f"{world}ranks{rank}.pt", weights_only=False)
            for rank in range(world)
        ]
        for world in WORLDS
    }


@pytest.fixture
def two(worlds: dict[int, Results]) -> Results:
    return worlds[2]


@pytest.fixture
def four(worlds: dict[int, Results]) -> Results:
    return worlds[4]


@pytest.fixture(params=WORLDS)
def every(request: pytest.FixtureRequest, worlds: dict[int, Results]) -> Results:
    return worlds[request.param]


def assert_same_bits(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in ("max", "lse", "out"):
        got, want = result[name].contiguous(), expected[name].contiguous()
        assert got.shape == want.shape
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), name


def merged_here(states: list[PartialState]) -> dict[str, Tensor]:
    merged = merge_states_torch(states)
    return {"max": merged.max, "lse": merged.lse, "out": merged.out}


def assert_close_in_float64(result: dict[str, Tensor], single: dict[str, Tensor]) -> None:
    """One history merged in another order: a few roundings of float64 apart."""
    assert result["out"].dtype == torch.float64
    for name in ("lse", "out"):
        torch.testing.assert_close(result[name], single[name], rtol=1e-13, atol=1e-13)


# The merge


def test_replicated_states_are_merged_in_rank_order_and_have_the_same_bits_everywhere(
    every: Results,
) -> None:
    expected = merged_here([random_state(rank, 3, 2, 8) for rank in range(len(every))])
    for result in every:
        assert_same_bits(result["replicated"], expected)


def test_head_shards_have_the_bits_of_the_replicated_result(every: Results) -> None:
    heads = 8 // len(every)
    for rank, result in enumerate(every):
        mine = slice(rank * heads, (rank + 1) * heads)
        whole = result["replicated"]
        share = {
            "max": whole["max"][..., mine],
            "lse": whole["lse"][..., mine],
            "out": whole["out"][..., mine, :],
        }
        assert_same_bits(result["head_sharded"], share)


def test_state_and_lse_travel_in_one_float32_message(every: Results) -> None:
    size = 3 * 2 * 8 * (5 + 2)
    for result in every:
        assert result["replicated"]["sent"] == [([size], torch.float32)]
        assert result["head_sharded"]["sent"] == [([size], torch.float32)]


def test_float64_states_and_strided_ones_travel_unrounded(every: Results) -> None:
    turned = []
    for rank in range(len(every)):
        state = random_state(rank, 8, 3)
        turned.append(
            PartialState(
                state.max.double().T, state.lse.double().T, state.out.double().transpose(0, 1)
            )
        )
    for result in every:
        assert_same_bits(result["float64_and_strided"], merged_here(turned))


def test_states_of_no_request_merge(every: Results) -> None:
    for result in every:
        assert result["no_request"]["out"].shape == (0, 8, 4)


def test_what_one_rank_holds_alone_arrives_bit_for_bit(every: Results) -> None:
    state = random_state(1, 3, 8)
    for result in every:
        assert_same_bits(
            result["one_rank_has_all"], {"max": state.max, "lse": state.lse, "out": state.out}
        )


def test_malformed_and_unsupported_merges_are_refused_on_every_rank(every: Results) -> None:
    for result in every:
        said = result["refusals"]
        assert said["heads"].startswith("ValueError: layout 'head_sharded' cuts H into ")
        assert said["layout"].startswith(
            "ValueError: unknown layout 'sharded', known: ['replicated'"
        )
        assert said["unknown algo"].startswith(
            "ValueError: unknown algo 'gossip', known: ['gather'"
        )
        for algo in ("all_reduce", "ring", "tree"):
            assert said[algo].startswith(
                f"UnsupportedError: merge_across_ranks does not take algo={algo!r}: "
            )
            assert said[algo].endswith("use algo='gather'")


def test_groups_are_the_callers(every: Results) -> None:
    state = random_state(0, 3, 8)
    assert_same_bits(
        every[0]["own_groups"]["alone"], {"max": state.max, "lse": state.lse, "out": state.out}
    )
    for rank, result in enumerate(every[1:], 1):
        assert (
            result["own_groups"]["alone"] == f"ValueError: rank {rank} is not a member of the group"
        )


def test_one_dimension_of_a_device_mesh_is_a_group(four: Results) -> None:
    for rank, result in enumerate(four):
        row, column = rank // 2 * 2, rank % 2
        cp = merged_here([random_state(member, 3, 8) for member in (row, row + 1)])
        dp = merged_here([random_state(member, 3, 8) for member in (column, column + 2)])
        assert_same_bits(result["own_groups"]["cp"], cp)
        assert_same_bits(result["own_groups"]["dp"], dp)
        assert (
            "DeviceMesh of one dimension, got 2; choose one of ('dp', 'cp')"
            in result["own_groups"]["mesh"]
        )


def test_without_a_process_group_the_answer_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call torch.distributed.init_process_group first"):
        merge_across_ranks(PartialState.empty((1, 2), 4))


# Cases


def test_N02_a_rank_without_keys_adds_nothing_and_a_row_without_keys_is_empty(
    four: Results,
) -> None:
    for result in four:
        merged = result["n02_ranks_without_keys"]
        assert not any(merged[name].isnan().any() for name in ("max", "lse", "out"))
        assert_close_in_float64(merged, merged["single"])
        assert bool((merged["lse"][3] == -math.inf).all())
        assert not merged["out"][3].any()
        assert_same_bits(merged, four[0]["n02_ranks_without_keys"])


@pytest.mark.parametrize("shards", ["halves", "one by one", "blocks of 16"])
def test_N06_a_sliding_window_holds_over_the_ranks_together(two: Results, shards: str) -> None:
    for result in two:
        merged = result["n06_a_window_over_ranks"][shards]
        assert torch.equal(merged["out"], torch.full((1, 2, 16), 55.5))
        eps = torch.finfo(torch.float32).eps
        assert merged["lse"].flatten().tolist() == pytest.approx([math.log(16)] * 2, rel=2 * eps)


def test_J06_a_sink_enters_once_for_all_ranks(four: Results) -> None:
    eps = torch.finfo(torch.float32).eps
    for result in four:
        out, lse = (result["j06_one_sink_for_all_ranks"][name] for name in ("out", "lse"))
        assert out.flatten().tolist() == pytest.approx([0.8] * 32, rel=2 * eps)
        assert lse.flatten().tolist() == pytest.approx([math.log(5)] * 2, rel=2 * eps)


def test_K07_the_result_has_the_head_dim_of_v(two: Results) -> None:
    for result in two:
        merged = result["k07_v_narrower_than_k"]
        assert merged["out"].shape == (1, 2, 64, 128)
        assert merged["lse"].shape == (1, 2, 64)
        assert_close_in_float64(merged, merged["single"])


def test_B13_weights_keep_float32(two: Results) -> None:
    eps = torch.finfo(torch.float32).eps
    for result in two:
        merged = result["b13_lse_travels_in_float32"]
        assert merged["sent"] == [torch.float32]
        assert merged["lse"].dtype == torch.float32
        pairs = merged["pairs"].double()
        exact = torch.sigmoid(pairs[:, 0] - pairs[:, 1])
        assert exact.tolist() == pytest.approx([0.7310585786, 0.7310585786, 0.5099986668], abs=1e-7)
        assert merged["out"].flatten().tolist() == pytest.approx(exact.tolist(), rel=4 * eps)
        lse = torch.logsumexp(pairs, 1)
        assert merged["lse"].flatten().tolist() == pytest.approx(lse.tolist(), rel=2 * eps)


# Who keeps what


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_N01_local_lengths_are_what_ownership_counts(world: int, interleave: int) -> None:
    lengths = range(201)
    position = np.arange(200)
    kept = [shard_lengths(lengths, world, rank, interleave) for rank in range(world)]
    assert np.array_equal(sum(kept), np.arange(201))
    for rank in range(world):
        mine = owner(position, world, interleave) == rank
        counted = [int(mine[:length].sum()) for length in lengths]
        assert kept[rank].tolist() == counted


@pytest.mark.parametrize(
    ("world", "interleave", "length", "expected"),
    [
        (4, 1, 8, [2, 2, 2, 2]),
        (4, 1, 9, [3, 2, 2, 2]),
        (2, 4, 10, [6, 4]),
        (4, 16, 0, [0, 0, 0, 0]),
    ],
)
def test_N01_examples(world: int, interleave: int, length: int, expected: list[int]) -> None:
    kept = [shard_lengths([length], world, rank, interleave)[0] for rank in range(world)]
    assert kept == expected


def test_N04_each_tokens_bound_is_localised_by_itself() -> None:
    assert shard_lengths([8, 9, 10], 2, 1).tolist() == [4, 4, 5]


@given(st.integers(0, 3000), st.integers(1, 400), st.integers(1, 8), st.integers(1, 70))
@settings(deadline=None, max_examples=100)
def test_property_a_windows_shares_are_what_ownership_counts(
    length: int, window: int, world: int, interleave: int
) -> None:
    position = np.arange(max(length - window, 0), length)
    for rank in range(world):
        counted = int((owner(position, world, interleave) == rank).sum())
        assert shard_windows([length], window, world, rank, interleave).tolist() == [counted]


def test_owner_takes_numbers_arrays_and_tensors() -> None:
    assert owner(9, 4, 2) == 0
    assert owner(np.arange(6), 3).tolist() == [0, 1, 2, 0, 1, 2]
    assert owner(torch.arange(6), 2, 2).tolist() == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 0, 0), "world and interleave must be 1 or more, got 0 and 1"),
        (([1], 2, 0, 0), "world and interleave must be 1 or more, got 2 and 0"),
        (([1], 2, 2), "rank must be 0 to 1, got 2"),
        (([1], 2, -1), "rank must be 0 to 1, got -1"),
        (([4, -1], 2, 0), r"seq_lens\[1\] is -1"),
    ],
)
def test_malformed_shares_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_lengths(*arguments)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window must be 1 or more, got 0"):
        shard_windows([4], 0, 2, 0)
