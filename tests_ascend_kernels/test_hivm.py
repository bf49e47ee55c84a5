"""Every kernel variant compiles to HIVM for every target, within the unified buffer."""

from dataclasses import replace

import pytest

from hivm import UB_BYTES, compile_hivm, ub_bytes
from lowering import TARGETS, lower
from own_merge import MERGES, launched
from recorded import compiled, versions
from splitkv.kernels_ascend.kernels import budget
from splitkv.kernels_ascend.kernels.budget import merge_ub_bytes
from splitkv.matrix.kernel_record import digest, load
from variants import CORES, Variant, merge_variants, split_variants

VARIANTS = {variant.id: variant for variant in (*merge_variants(), *split_variants())}
RECORD = load()
EACH = [
    pytest.param(name, marks=() if index % 4 == 0 else pytest.mark.slow)
    for index, name in enumerate(VARIANTS)
]
"""A quarter is compiled anew in CI: the record, which is of these sources, has all of them."""


@pytest.mark.parametrize("name", EACH)
def test_it_compiles_for_every_target_as_recorded(name: str) -> None:
    variant = VARIANTS[name]
    found = compiled(variant)
    planned = [found[target] for target in TARGETS]
    assert all(isinstance(count, int) and 0 < count <= UB_BYTES for count in planned), found
    constants = variant.launch.arguments
    if name.startswith("merge"):
        assert found["cores"] == "vector"
        assert max(planned) <= merge_ub_bytes(constants["BLOCK_ROWS"], constants["DV"])
    else:
        assert found["cores"] == "cube and vector"
    assert found == RECORD["hivm"][name]


def test_the_record_is_of_these_variants_sources_and_compilers() -> None:
    assert list(RECORD["hivm"]) == list(VARIANTS)
    assert RECORD["sources"] == digest(), "run tests_ascend_kernels/recorded.py"
    assert RECORD["versions"] == versions()


def larger(variant: Variant, **constants: int) -> Variant:
    """The variant with other constants than its launch would have."""
    arguments = {**variant.launch.arguments, **constants}
    return replace(variant, launch=replace(variant.launch, arguments=arguments))


@pytest.mark.parametrize("target", TARGETS)
def test_tiles_that_are_too_large_overflow_and_the_budget_says_so(target: str) -> None:
    wide = VARIANTS["merge-d512-rows8-float32-float32"]
    found = compile_hivm(lower(larger(wide, BLOCK_ROWS=32).launch), target)
    assert found.error is not None
    assert "ub overflow, requires" in found.error
    assert f"while {UB_BYTES * 8} bits available" in found.error
    assert merge_ub_bytes(32, 512) > UB_BYTES == budget.UB_BYTES

    deep = VARIANTS["split-page-128-plain-d256-bfloat16"]
    tokens = deep.launch.arguments["BLOCK_N"]
    found = compile_hivm(lower(larger(deep, BLOCK_N=2 * tokens).launch), target)
    assert found.error is not None
    assert "ub overflow, requires" in found.error


def test_a_kernel_that_is_no_kernel_is_an_error() -> None:
    launch, _ = launched(MERGES[0], CORES)
    broken = lower(launch)
    broken = replace(broken, text=broken.text.replace("scf.for", "scf.four", 1))
    found = compile_hivm(broken, TARGETS[0])
    assert found.error is not None
    assert "overflow" not in found.error


def test_a_plan_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(AssertionError, match="not understood"):
        ub_bytes("module {}")
