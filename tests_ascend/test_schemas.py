"""Rung 1: every operator call that splitkv makes, against the real torch_npu.

Names, kinds and defaults come from its schemas, shapes and dtypes from its meta functions. A call
that passes here has the right spelling for this release of the wheel; whether a device takes it,
and what it computes, is not seen here.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from real_operators import Seen, attempt, has_meta, operator_of
from splitkv.kernels_ascend.standin.schemas import SCHEMAS

Recorded = dict[str, Any]
Call = dict[str, Any]

FIA, FIA_V2 = "npu::npu_fused_infer_attention_score", "npu::npu_fused_infer_attention_score_v2"
UPDATE = "npu::npu_attention_update"
SCATTER = "npu::npu_scatter_pa_kv_cache"
WITHOUT_META = {
    "npu::_npu_paged_attention",
    "npu::_npu_reshape_and_cache",
    *(f"{name}.out" for name in (FIA, FIA_V2)),
    *(f"{name.replace('::', '::_')}_get_max_workspace" for name in (FIA, FIA_V2)),
}
"""Of these only the names are checked: the wheel does not say what comes back."""
UNLIKE: dict[str, str] = {}
"""Operators whose meta function and the stand-in disagree, and whose mistake it is."""


def of(recorded: Recorded, operator: str) -> list[Call]:
    return [call for call in recorded["calls"] if call["operator"] == operator]


def disagreement(call: Call) -> str | None:
    """Where the wheel does not say what the stand-in returned; a refusal is the test's error."""
    seen, results = attempt(call["operator"], call["arguments"])
    wanted = [
        {"dtype": leaf["dtype"], "shape": leaf["shape"]} if isinstance(leaf, dict) else leaf
        for leaf in pytree.tree_leaves(call["results"], is_leaf=lambda leaf: isinstance(leaf, dict))
    ]
    if seen is Seen.NAMES or results == wanted:
        return None
    return f"{call['by']}: {call['operator']} returns {results}, the stand-in {wanted}"


def test_everything_ran_or_was_refused(recorded: Recorded) -> None:
    failed = {name: said for name, said in recorded["ran"].items() if "failed:" in "".join(said)}
    assert not failed
    ran = [name for name, said in recorded["ran"].items() if any("npu::" in line for line in said)]
    assert len(ran) > 150, "the table does not reach the operators"


def test_every_operator_of_the_stand_in_is_called(recorded: Recorded) -> None:
    called = {call["operator"].removeprefix("npu::") for call in recorded["calls"]}
    assert called <= set(SCHEMAS)
    # modelled for whoever writes caches with it; splitkv's own append does without
    assert set(SCHEMAS) - called == {"_npu_reshape_and_cache"}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_stand_ins_schema_is_the_wheels(name: str) -> None:
    real = operator_of(f"npu::{name}")
    ours = torch._C.parse_schema(f"{real.namespace}::{SCHEMAS[name]}")
    assert str(ours) == str(real._schema)


def test_every_call_binds_and_shapes_and_dtypes_agree(recorded: Recorded) -> None:
    found = [line for call in recorded["calls"] if (line := disagreement(call)) is not None]
    unexpected = [line for line in found if not any(name in line for name in UNLIKE)]
    assert not unexpected
    assert all(any(name in line for line in found) for name in UNLIKE), "a mistake was mended"


def test_the_list_of_operators_without_a_meta_function_is_complete(recorded: Recorded) -> None:
    names = {f"npu::{name}" for name in SCHEMAS}
    without = {name for name in names if not has_meta(name)}
    counts = {name: len(of(recorded, name)) for name in sorted(names)}
    print("calls:", counts)
    print("names only, no meta function:", sorted(without))
    assert without == WITHOUT_META & names


# Negative controls: the same calls, each with one mistake


def misspelt(arguments: dict[str, Any]) -> None:
    arguments["softmax_lse"] = arguments.pop("softmax_lse_flag")


def of_another_rank(arguments: dict[str, Any]) -> None:
    query = arguments["query"]
    query["shape"], query["stride"] = query["shape"][1:], query["stride"][1:]


def in_an_unknown_layout(arguments: dict[str, Any]) -> None:
    arguments["input_layout"] = "BDNS"


def with_text_for_a_number(arguments: dict[str, Any]) -> None:
    arguments["num_heads"] = "8"


def without_values(arguments: dict[str, Any]) -> None:
    del arguments["value"]


@pytest.mark.parametrize(
    "mistake",
    [misspelt, of_another_rank, in_an_unknown_layout, with_text_for_a_number, without_values],
)
def test_a_wrong_call_is_refused(mistake: Callable[..., None], recorded: Recorded) -> None:
    call = deepcopy(of(recorded, FIA)[0])
    mistake(call["arguments"])
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        attempt(FIA, call["arguments"])


def test_every_append_is_the_vendors_write_in_mode_norm(recorded: Recorded) -> None:
    appends = {name: said for name, said in recorded["ran"].items() if name.startswith("append")}
    assert len(appends) == 20
    assert set(map(tuple, appends.values())) == {(SCATTER,)}
    written = of(recorded, SCATTER)
    assert {call["arguments"]["cache_mode"] for call in written} == {"Norm"}
    assert {call["arguments"]["slot_mapping"]["dtype"] for call in written} == {"int32"}
    arguments = deepcopy(written[0]["arguments"])
    arguments["cache_modes"] = arguments.pop("cache_mode")
    with pytest.raises((RuntimeError, TypeError)):
        attempt(SCATTER, arguments)


def test_a_misspelt_argument_is_refused_without_a_meta_function_too(recorded: Recorded) -> None:
    arguments = {
        name: {"dtype": "bfloat16", "shape": [2, 2, 64], "stride": [128, 64, 1], "device": "npu"}
        for name in ("key", "value", "key_cache", "value_cache")
    }
    slots = {"dtype": "int32", "shape": [2], "stride": [1], "device": "npu"}
    name = "npu::_npu_reshape_and_cache"
    assert attempt(name, {**arguments, "slot_indices": slots})[0] is Seen.NAMES
    with pytest.raises((RuntimeError, TypeError)):
        attempt(name, {**arguments, "slots": slots})


def test_a_wrong_shape_or_dtype_of_the_stand_in_is_seen(recorded: Recorded) -> None:
    call = deepcopy(of(recorded, FIA)[0])
    assert disagreement(call) is None
    call["results"][1]["shape"] = call["results"][1]["shape"][:-1]
    assert "returns" in str(disagreement(call))
    call = deepcopy(of(recorded, FIA)[0])
    call["results"][1]["dtype"] = "bfloat16"
    assert "returns" in str(disagreement(call))


def test_what_the_meta_functions_do_not_see(recorded: Recorded) -> None:
    """Wrong calls that the wheel lets through: the reason for a validator of our own."""
    lenient = {"key of another dtype": 0, "another head dim": 0, "five heads for two": 0}
    for call in of(recorded, FIA)[:20]:
        changes: dict[str, tuple[str, Any]] = {
            "key of another dtype": ("key", call["arguments"]["key"] | {"dtype": "float32"}),
            "five heads for two": ("num_heads", 5),
        }
        for name, (argument, value) in changes.items():
            attempt(FIA, call["arguments"] | {argument: value})
            lenient[name] += 1
    update = of(recorded, UPDATE)[0]["arguments"]
    attempt(UPDATE, update | {"update_type": 7})
    print("taken by the meta functions all the same:", lenient, "and update_type=7")
