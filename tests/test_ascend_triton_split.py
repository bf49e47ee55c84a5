"""Our own Ascend split kernel in Triton's interpreter: case table, mutants and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from mutants_own_kernel import SPLIT_MUTANTS, SourceMutant, plant
from own_kernel import CORES, EXTRA, OwnKernel, taken
from splitkv.common.plan import plan_splits
from splitkv.common.spec import Feature
from splitkv.common.support import UnsupportedError
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.kernels import decode
from splitkv.kernels_ascend.kernels.budget import Cores, SplitTile, split_tile
from splitkv.kernels_ascend.kernels.decode import split_launch, split_states
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.cases import CASES
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.inputs import build
from splitkv.matrix.parity import SEED, Outcome, run_case
from splitkv.matrix.reference import reference

BACKEND = OwnKernel()
BY_ID = {case.id: case for case in (*taken(), *EXTRA)}
STRIDED = "memory-strided"
OWN = {  # what brings a call here: the operators have no argument for it
    Feature.SOFT_CAP,
    Feature.ALIBI,
    Feature.ATTN_BIAS,
    Feature.ATTN_MASK,
    Feature.ANCHORS,
}


def _parameters() -> list[object]:
    """The rest of the table is slow here; lowered (tests_ascend_kernels) all of it is run."""
    quick = {
        name
        for name, case in BY_ID.items()
        if OWN & set(case.features) and case.spec.page_size != 1
    }
    return [
        pytest.param(case, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, case in BY_ID.items()
        if case.memory is not Memory.STRIDED
    ]


@pytest.mark.parametrize("case", _parameters())
def test_a_case_is_the_reference_and_unseen_slots_change_no_bit(case: Case) -> None:
    result = run_case(BACKEND, case)
    assert (result.outcome, result.why) == (Outcome.PASSED, ())


@pytest.mark.parametrize("mutant", SPLIT_MUTANTS, ids=[mutant.id for mutant in SPLIT_MUTANTS])
def test_a_mutant_is_rejected(
    mutant: SourceMutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(mutant, "split", tmp_path, monkeypatch)
    for name in mutant.cases:
        result = run_case(BACKEND, BY_ID[name])
        assert result.outcome is Outcome.FAILED, f"{name} does not see it"
        assert result.errors is not None, "it did not compute: " + "; ".join(result.why)


def test_every_feature_that_the_operators_lack_is_among_the_cases() -> None:
    wanted = {"soft-cap", "alibi", "bias", "mask-tree", "anchors", "anchors-splits", "layout-hnd"}
    assert wanted <= set(BY_ID)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layout-packed", "the own kernel reads paged and dense caches"),
        ("queries-ragged", "the own kernel takes one S for all requests"),
        ("dtype-fp32", "dtype float32 is not one of float16, bfloat16"),
        ("head-dim-80", "head_dim 80 is not in 64, 128, 256"),
        ("model-drafts", "the own kernel has no dequantisation"),
    ],
)
def test_refusals_in_words(name: str, said: str) -> None:
    (case,) = (case for case in CASES if case.id == name)
    assert any(said in reason for reason in own.refusals(case.spec)), own.refusals(case.spec)


def test_strides_that_it_does_not_read_are_refused_before_anything_runs() -> None:
    call = build(BY_ID[STRIDED], SEED).call
    plan = BACKEND.plan_for(call)
    assert plan is not None
    with pytest.raises(UnsupportedError, match="k has stride 2 in its last dimension"):
        own.split_decode(call, plan, CORES)
    strided = [case for case in BY_ID.values() if case.memory is Memory.STRIDED]
    assert len(strided) > 1
    assert {run_case(BACKEND, case).outcome for case in strided} == {Outcome.REFUSED}


@pytest.mark.parametrize(
    ("settings", "tile"),
    [
        ({}, SplitTile(16, 128)),
        ({"head_dim": 256}, SplitTile(16, 64)),
        ({"num_queries": 5}, SplitTile(32, 64)),
        ({"num_queries": 5, "head_dim": 256}, SplitTile(32, 32)),
        ({"page_size": 16}, SplitTile(16, 16)),
        ({"page_size": 48}, SplitTile(16, 16)),
        ({"page_size": 3}, SplitTile(16, 16)),
        ({"page_size": 96}, SplitTile(16, 32)),
    ],
)
def test_a_tile_stays_within_its_page_and_the_unified_buffer(
    settings: dict[str, int], tile: SplitTile
) -> None:
    assert split_tile(make("tile", "", (1,), **settings).spec) == tile


def test_the_grid_is_no_larger_than_the_cube_cores() -> None:
    call = build(BY_ID["splits-size"], SEED).call
    plan = BACKEND.plan_for(call, split_size=128)
    assert plan is not None
    assert plan.num_splits * call.spec.num_kv_heads > 20
    launches = [split_launch(call, plan, split_states(call, plan), Cores(n)) for n in (20, 1000)]
    assert [launch.programs for launch in launches] == [20, plan.num_splits * 2]


def test_bits_do_not_depend_on_how_many_cores_there_are() -> None:
    call = build(BY_ID["own-all"], SEED).call
    plan = BACKEND.plan_for(call, num_splits=3)
    assert plan is not None
    one, many = (own.split_decode(call, plan, Cores(count)) for count in (1, 24))
    assert torch.equal(one.out, many.out)
    assert torch.equal(one.lse, many.lse)


def test_splits_that_begin_within_a_tile() -> None:
    call = build(BY_ID["layout-bsnd"], SEED).call
    profile = replace(BACKEND.profile(), tile_tokens=16)
    lengths = call.cache.seq_lens.numpy()
    fine = plan_splits(call.spec, lengths, profile=profile, split_size=48)
    state = own.split_decode(call, fine, CORES)
    answer, out = reference(call), state.out.to(call.q.dtype)
    assert errors(out, state.lse, answer).exceeds(bounds(call, None, answer)) == []


def test_a_refreshed_plan_is_read_anew() -> None:
    call = build(BY_ID["splits-2"], SEED).call
    lengths = call.cache.seq_lens
    plan = BACKEND.plan(call.spec, (1100, 1100), num_splits=2)
    own.split_decode(call, plan, CORES)
    plan.refresh(lengths.numpy())
    right = own.split_decode(call, plan, CORES)
    shorter = replace(call.cache, seq_lens=lengths - 100)
    made = BACKEND.plan(call.spec, (lengths - 100).numpy(), num_splits=2)
    other = own.split_decode(replace(call, cache=shorter), plan, CORES)
    wanted = own.split_decode(replace(call, cache=shorter), made, CORES)
    assert not torch.equal(right.out, other.out)
    assert torch.allclose(other.out, wanted.out, atol=1e-2)
    assert torch.allclose(other.lse, wanted.lse, atol=1e-5)


class Npu(NamedTuple):
    """What is asked of a device that torch does not know here."""

    type: str = "npu"


def test_a_plan_that_is_not_yet_on_the_device_is_refused_under_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = BACKEND.plan(BY_ID["soft-cap"].spec, (300,))
    monkeypatch.setattr(decode, "is_capturing", lambda: True)
    npu = cast(torch.device, Npu())
    with pytest.raises(RuntimeError, match="run one call with it before the capture"):
        decode.device_plan(plan, npu)
    plan.bound["own kernel", npu] = bound = decode.device_plan(plan, torch.device("cpu"))
    assert decode.device_plan(plan, npu) is bound
