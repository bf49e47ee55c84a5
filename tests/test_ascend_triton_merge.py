"""Our own Ascend merge kernel in Triton's interpreter, its mutants, and when it is used."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from histories import same_bits
from mutants_own_kernel import MERGE_MUTANTS, SourceMutant, plant
from own_merge import MERGES, Merge, error_and_complaints
from splitkv.common.state import PartialState, merge_states_torch, stack_states
from splitkv.kernels_ascend import merge as merging
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.kernels.budget import UB_BYTES, Cores, cores_of, merge_rows
from splitkv.kernels_ascend.kernels.launch import Launch

CPU = torch.device("cpu")
CORES = Cores(3)
BY_ID = {merge.id: merge for merge in MERGES}


def interpret(launch: Launch) -> None:
    launch.run(CPU)


def fields(state: PartialState) -> tuple[torch.Tensor, ...]:
    return state.max, state.lse, state.out


def random_states(count: int, rows: int, dim: int, seed: int = 0) -> list[PartialState]:
    random = torch.Generator().manual_seed(seed)
    lse = torch.randn(count, rows, generator=random)
    out = torch.randn(count, rows, dim, generator=random)
    return [PartialState(lse[i], lse[i], out[i]) for i in range(count)]


@pytest.mark.parametrize("merge", MERGES, ids=[merge.id for merge in MERGES])
def test_it_is_the_merge_of_the_formulas(merge: Merge) -> None:
    assert error_and_complaints(merge, interpret)[1] == []


@pytest.mark.parametrize("mutant", MERGE_MUTANTS, ids=[mutant.id for mutant in MERGE_MUTANTS])
def test_a_mutant_is_rejected(
    mutant: SourceMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(mutant, "merge", tmp_path, monkeypatch)
    for name in mutant.cases:
        assert error_and_complaints(BY_ID[name], interpret)[1], f"{name} does not see it"


def test_one_state_among_empty_ones_comes_out_bit_for_bit() -> None:
    (one,) = random_states(1, 4, 40)
    one.out[0, 3] = -0.0
    nothing = PartialState.empty((4,), 40)
    for mixed in ([nothing, one], [one, nothing, nothing], [nothing] * 20 + [one]):
        assert same_bits(fields(own.merge_states(mixed, CORES)), fields(one))


def test_only_empty_states_are_the_empty_state() -> None:
    nothing = PartialState.empty((2, 3), 24)
    assert same_bits(fields(own.merge_states([nothing] * 3, CORES)), fields(nothing))


def test_a_nan_is_not_lost() -> None:
    bad, good = PartialState.empty((4,), 16), random_states(1, 4, 16)[0]
    bad.lse[:] = math.nan
    merged = own.merge_states([PartialState.empty((4,), 16), bad, good], CORES)
    assert torch.isnan(merged.lse).all()
    assert torch.isnan(merged.out).all()


def test_bits_do_not_depend_on_how_many_cores_there_are() -> None:
    states = random_states(5, 70, 80)
    few, many = (fields(own.merge_states(states, Cores(count))) for count in (1, 24))
    assert same_bits(few, many)


def test_tiles_fit_into_the_unified_buffer_and_give_every_core_one() -> None:
    assert merge_rows(10_000, 128, programs=40) == 32
    assert merge_rows(100, 128, programs=40) == 8
    assert merge_rows(10_000, 512, programs=40) == 8
    assert UB_BYTES * 8 == 1572864  # bits, as the compiler counts
    with pytest.raises(ValueError, match="head_dim_v 513 is above 512"):
        merge_rows(10, 513, programs=40)


@pytest.mark.parametrize(
    ("name", "cube"),
    [("Ascend910B1", 24), ("Ascend910B3", 20), ("Ascend910_9382", 24), ("Ascend910B9", 20)],
)
def test_cores_are_known_by_the_device_name(name: str, cube: int) -> None:
    assert cores_of(name) == Cores(cube)
    assert Cores(cube).vector == 2 * cube
    assert cores_of(None) == Cores(20)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who merges: names in the order of the calls."""
    calls: list[str] = []

    def noted(name: str, right: Callable[..., PartialState]) -> Callable[..., PartialState]:
        def merged(parts: list[PartialState]) -> PartialState:
            calls.append(name)
            return right(parts)

        return merged

    monkeypatch.setattr(merging, "_fused", noted("operator", merge_states_torch))
    monkeypatch.setattr(merging, "merge_states_torch", noted("torch", merge_states_torch))
    monkeypatch.setattr(own, "merge_states", noted("own kernel", own.merge_states))
    return calls


def test_who_merges(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = random_states(3, 4, 16), random_states(17, 4, 16)
    odd, wide = random_states(3, 4, 15), random_states(3, 4, 520)
    double = [PartialState(*(tensor.double() for tensor in fields(state))) for state in many]
    monkeypatch.setattr(own, "missing", lambda: None)
    results = [merging.merge(states) for states in (few, many, odd, wide, double)]
    assert used == ["operator", "own kernel", "own kernel", "torch", "torch"]
    used.clear()
    monkeypatch.setattr(own, "missing", lambda: "no triton")
    for states, result in zip((few, many, odd, wide, double), results, strict=True):
        again = merging.merge(states)
        assert torch.allclose(again.out, result.out, atol=1e-6)
    assert used == ["operator", "torch", "torch", "torch", "torch"]


def test_a_triton_without_the_ascend_backend_does_not_count() -> None:
    assert "no triton with an Ascend backend" in (own.missing() or "")


def test_stacked_states_and_a_single_one() -> None:
    states = random_states(4, 3, 8)
    merged = own.merge_states(stack_states(states), CORES)
    assert same_bits(fields(merged), fields(own.merge_states(states, CORES)))
    assert own.merge_states(states[:1], CORES) is states[0]
    with pytest.raises(ValueError, match="at least one state"):
        own.merge_states([], CORES)
