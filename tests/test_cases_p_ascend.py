"""Faults that users met on Ascend: masks instead of lengths, head dims, length lists, stale lists.

The Ascend backend runs on a stand-in here: what its host side hands over is checked, no device is.
"""

from typing import Any

import numpy as np
import pytest
import torch

from backends_in_reach import IN_REACH, INTERPRETED, InReach, backends, spec_of
from histories import (
    History,
    assert_near,
    assert_near_lse,
    attend,
    lengths32,
    random_history,
    random_queries,
)
from splitkv import UnsupportedError, decode_attention
from splitkv.kernels_ascend import standin

(ASCEND,) = (on for on in IN_REACH if on.backend.name == "ascend")
OPERATOR = "npu_fused_infer_attention_score"


def operator_calls(calls: list[standin.Call]) -> list[standin.Call]:
    return [call for call in calls if OPERATOR in call.name or "npu_fusion" in call.name]


@pytest.mark.parametrize("length", [137, 600, 1000, 3000, 4095])
def test_P01_lengths_reach_the_operator_as_lengths_not_as_a_mask(length: int) -> None:
    history = random_history([length], 12, 64, dtype=torch.bfloat16)
    q = random_queries(1, 12, 64, dtype=torch.bfloat16)
    with ASCEND.active(), standin.recording() as calls:
        out, lse = ASCEND.decode(q, **history.paged(128, width=32))
    (call,) = operator_calls(calls)
    assert call.arguments["atten_mask"] is None
    assert call.arguments["pse_shift"] is None
    wanted, wanted_lse = attend([q], history)
    assert_near(out, wanted[0], bound=4e-3)
    assert_near_lse(lse, wanted_lse[0])


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias"])
def test_P01_masks_and_biases_are_refused_before_the_operator(name: str) -> None:
    cache = random_history([600], 12, 64, dtype=torch.bfloat16).paged(128)
    shape = (1, 1, 600) if name == "attn_mask" else (1, 1, 1, 600)
    mask = torch.ones(shape, dtype=torch.bool if name == "attn_mask" else torch.float32)
    q = ASCEND.place(random_queries(1, 12, 64, dtype=torch.bfloat16))
    cache[name] = mask
    placed: dict[str, Any] = {
        key: ASCEND.place(x) if isinstance(x, torch.Tensor) else x for key, x in cache.items()
    }
    with (
        ASCEND.active(),
        standin.recording() as calls,
        pytest.raises(UnsupportedError, match="vllm-ascend issue 15503"),
    ):
        decode_attention(q, **placed)
    assert not operator_calls(calls)


@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (192, 192), (96, 96), (80, 80)])
def test_P03_head_dims_are_right_or_refused_before_the_operator(dims: tuple[int, int]) -> None:
    history = random_history([20], 4, dims[0], head_dim_v=dims[1], dtype=torch.float16)
    q = random_queries(1, 16, dims[0], dtype=torch.float16)
    cache = history.packed()
    declared = ASCEND.backend.refusals(spec_of(q, **cache))
    with ASCEND.active(), standin.recording() as calls:
        if declared:
            placed: dict[str, Any] = {key: ASCEND.place(x) for key, x in cache.items()}
            with pytest.raises(UnsupportedError) as refusal:
                decode_attention(ASCEND.place(q), **placed)
            assert all(reason in str(refusal.value) for reason in declared)
            assert not operator_calls(calls)
            return
        out, lse = ASCEND.decode(q, **cache)
    assert operator_calls(calls)
    wanted, wanted_lse = attend([q], history)
    assert_near(out, wanted[0])
    assert_near_lse(lse, wanted_lse[0])


@backends(slow=INTERPRETED)
def test_P04_list_of_lengths_must_have_one_for_each_row(on: InReach) -> None:
    history = random_history([200] * 16, 2, 128, dtype=torch.float16)
    q = random_queries(16, 8, 128, dtype=torch.float16)
    cache = history.paged(128)
    for count in (9, 0):
        cache["seq_lens"] = [200] * count
        with pytest.raises(ValueError, match=rf"seq_lens has {count} requests, block_table has 16"):
            on.decode(q, **cache)
    results = []
    for lengths in ([np.int64(200)] * 16, lengths32([200] * 16), [200] * 16):
        cache["seq_lens"] = lengths
        results.append(on.decode(q, **cache)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def shortened(history: History, lengths: list[int]) -> History:
    return History(
        [rows[:n] for rows, n in zip(history.k, lengths, strict=True)],
        [rows[:n] for rows, n in zip(history.v, lengths, strict=True)],
    )


@pytest.mark.parametrize("lengths_on_device", [False, True])
@backends(slow=INTERPRETED)
def test_G05_every_layer_and_step_uses_its_own_lengths_under_one_plan(
    on: InReach, lengths_on_device: bool
) -> None:
    # A graph that keeps the lists of its capture is not modelled; the plan and the tensors of
    # lengths are the same objects all along, as they would be there.
    first, second = [1000, 300, 129], [256, 256, 129]
    bound = [n + 3 for n in first]
    history = random_history(bound, 2, 128, dtype=torch.float16)
    q = random_queries(3, 8, 128, dtype=torch.float16)
    cache = history.paged(128)
    plan = on.plan(spec_of(q, **cache), bound, num_splits=2)
    # the device's tensor shares the memory of this one
    shared = [lengths32(first), lengths32(second)]
    layers = [on.place(lengths) if lengths_on_device else lengths for lengths in shared]
    for step in range(4):
        for layer, start in zip(layers, (first, second), strict=True):
            now = [n + step for n in start]
            cache["seq_lens"] = layer
            with on.active():
                layer.copy_(lengths32(now))
            out, lse = on.decode(q, **cache, plan=plan)
            wanted, wanted_lse = attend(q[:, None], shortened(history, now))
            assert_near(out, torch.cat(wanted))
            assert_near_lse(lse, torch.cat(wanted_lse))
