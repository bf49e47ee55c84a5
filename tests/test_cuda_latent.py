"""Heads wider than 256, and absorbed MLA, whose values are a view of the first columns of its keys.

What the kernel for any device computes; the one for Hopper runs on a GPU alone, where the same
tests reach it.
"""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cuda_calls import BACKEND, DEVICE, assert_answers, call_of, decode
from histories import History, offsets32, random_history, random_queries, same_bits
from splitkv.common.cache import Cache, DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import Layout
from splitkv.kernels_cuda import attention, latent_hopper
from splitkv.kernels_cuda.latent import latent, shares_memory

ROOT = Path(__file__).resolve().parent.parent
BF16, FP32 = torch.bfloat16, torch.float32
DIM, LATENT = 576, 512


def keys(lengths: list[int], seed: int = 0) -> History:
    """Keys of absorbed MLA; ``in_one`` makes the values of them."""
    history = random_history(lengths, 1, DIM, head_dim_v=1, dtype=BF16, seed=seed)
    return History(history.k, [k[..., :LATENT].clone() for k in history.k])


def in_one(arguments: dict[str, Any], first: int = 0) -> Cache:
    """The cache of ``arguments``, but v is the view of LATENT columns of k that begins at
    ``first``.
    """
    k = arguments["k"].to(DEVICE)
    v = k[..., first : first + LATENT]
    if "cu_seqlens_k" in arguments:
        return PackedCache(k, v, arguments["cu_seqlens_k"].to(DEVICE))
    layout, seq_lens = Layout(arguments["layout"]), arguments["seq_lens"].to(DEVICE)
    if layout.paged:
        return PagedCache(k, v, arguments["block_table"].to(DEVICE), seq_lens, layout)
    return DenseCache(k, v, seq_lens, layout)


def queries(*shape: int, dim: int = DIM, dtype: torch.dtype = BF16) -> Tensor:
    return random_queries(*shape, dim, dtype=dtype)


def test_layouts_pages_and_splits_of_the_latent_and_of_a_copy_of_it() -> None:
    history = keys([150, 0, 33])
    q = queries(3, 1, 16)
    for splits in (1, 2):
        answers = []
        for arguments in (
            history.paged(64),
            history.paged(16, layout="HND"),
            history.dense(),
            history.packed(),
        ):
            call, apart = call_of(q, in_one(arguments)), call_of(q, arguments)
            assert shares_memory(call.spec, call.cache)
            assert not shares_memory(apart.spec, apart.cache)
            answers.append(decode(call, num_splits=splits))
            assert_answers(call, *answers[-1])
        assert all(same_bits(answers[0], answer) for answer in answers)
        assert_answers(apart, *decode(apart, num_splits=splits))
        assert torch.equal(answers[0][0][1], torch.zeros_like(answers[0][0][1]))
        assert torch.equal(answers[0][1][1], torch.full_like(answers[0][1][1], -math.inf))


def test_128_heads() -> None:
    call = call_of(queries(2, 1, 128), in_one(keys([70, 9]).paged(64)), sinks=True)
    sinks = torch.linspace(-2, 2, 128)
    assert_answers(call, *decode(call, sinks=sinks), sinks)


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [(576, 512, FP32), (320, 320, BF16), (300, 24, BF16), (40, 300, BF16), (512, 256, BF16)],
)
def test_other_wide_heads(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    history = random_history([50, 3], 2, dim, head_dim_v=dim_v, dtype=dtype)
    call = call_of(queries(2, 1, 6, dim=dim, dtype=dtype), history.paged(16))
    assert latent(call.spec)
    assert_answers(call, *decode(call))


@pytest.mark.parametrize("group", [5, 16, 64])
@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 40, "anchor_tokens": 5, "logits_soft_cap": 30.0}],
    ids=["causal", "window"],
)
def test_two_queries_see_what_they_may(group: int, settings: dict[str, Any]) -> None:
    slopes = torch.linspace(0.0, 0.1, group)
    cache = in_one(keys([97, 1]).paged(16))
    call = call_of(queries(2, 2, group), cache, alibi_slopes=slopes, **settings)
    assert_answers(call, *decode(call, num_splits=2))


def test_ragged_queries() -> None:
    counts = [2, 0, 3]
    cache = in_one(keys([40, 20, 66]).paged(16))
    call = call_of(queries(sum(counts), 5), cache, cu_seqlens_q=offsets32(counts))
    assert_answers(call, *decode(call))


@pytest.mark.parametrize("hide", ["attn_mask", "attn_bias"])
@pytest.mark.parametrize("group", [2, 16])
def test_a_hidden_nan_of_the_latent_stays_hidden(hide: str, group: int) -> None:
    history = keys([60])
    seen = torch.rand(1, 2, 60, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[:, :, [3, 50]] = False
    bias = torch.where(seen, 0.5, -math.inf)[:, None]
    settings = {"attn_mask": seen} if hide == "attn_mask" else {"attn_bias": bias}
    clean = call_of(queries(1, 2, group), in_one(history.dense()), **settings)
    answer = decode(clean, num_splits=1)
    assert_answers(clean, *answer)
    history.k[0][[3, 50]] = math.nan
    spoilt = call_of(queries(1, 2, group), in_one(history.dense()), **settings)
    assert same_bits(answer, decode(spoilt, num_splits=1))


@pytest.mark.parametrize("group", [2, 16])
def test_a_nan_that_one_query_sees_stays_with_it(group: int) -> None:
    history = keys([60])
    clean = decode(call_of(queries(1, 2, group), in_one(history.dense())), num_splits=1)
    history.k[0][59] = math.nan
    out, lse = decode(call_of(queries(1, 2, group), in_one(history.dense())), num_splits=1)
    assert same_bits((clean[0][:, 0], clean[1][:, 0]), (out[:, 0], lse[:, 0]))
    assert torch.isnan(out[:, 1]).all()


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 20}])
def test_what_no_query_sees_changes_no_bit(settings: dict[str, int]) -> None:
    clean, spoilt = keys([75, 17]), keys([75, 17])
    if settings:
        for k in spoilt.k:
            k[: max(len(k) - 2 - 20 + 1, 0)] = math.nan
    calls = [
        call_of(queries(2, 2, 16), in_one(history.paged(16, fill=fill, unused=unused)), **settings)
        for history, fill, unused in ((clean, 0.0, 0), (spoilt, math.nan, -1))
    ]
    answer = decode(calls[0], num_splits=2)
    assert_answers(calls[0], *answer)
    assert same_bits(answer, decode(calls[1], num_splits=2))


@pytest.mark.parametrize("fault", ["shared", "page"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are not the latent, taken for it; pages one off."""
    right = attention.latent_launch

    def wrong(*given: Any) -> Any:
        launch = right(*given)
        arguments: dict[str, Any] = dict(launch.arguments)
        if fault == "shared":
            arguments["SHARED"] = True
        else:
            table = arguments["block_table"]
            arguments["block_table"] = (table + 1) % arguments["k"].shape[0]
        return replace(launch, arguments=arguments)

    call = call_of(queries(2, 1, 16), in_one(keys([70, 30]).paged(16, fill=0.0), first=64))
    assert not shares_memory(call.spec, call.cache)
    assert_answers(call, *decode(call))
    monkeypatch.setattr(attention, "latent_launch", wrong)
    answer = decode(call)
    with pytest.raises(AssertionError):
        assert_answers(call, *answer)


def test_which_calls_the_kernel_for_hopper_takes() -> None:
    def taken(call: DecodeCall) -> bool:
        return latent_hopper.takes(call, shared=shares_memory(call.spec, call.cache))

    history = keys([9])
    paged, view = history.paged(16), in_one(history.paged(16))
    assert taken(call_of(queries(1, 1, 64), view))
    assert taken(call_of(queries(1, 3, 128), view, sliding_window=4))
    assert not taken(call_of(queries(1, 1, 32), view))
    assert not taken(call_of(queries(1, 1, 96), view))
    assert not taken(call_of(queries(1, 1, 64), paged))
    mask = torch.ones(1, 1, 9, dtype=torch.bool)
    assert not taken(call_of(queries(1, 1, 64), view, attn_mask=mask))
    shifted = torch.zeros(9 * DIM + 1, dtype=BF16, device=DEVICE)[1:].view(1, 9, 1, DIM)
    odd = DenseCache(shifted, shifted[..., :LATENT], torch.tensor([9]).to(DEVICE), Layout.BSND)
    assert not taken(call_of(queries(1, 1, 64), odd))


def test_limits_are_said() -> None:
    spec = call_of(queries(1, 1, 128), in_one(keys([9]).paged(16))).spec
    assert BACKEND.refusals(spec) == []
    for field, value in (("head_dim", 577), ("head_dim_v", 513), ("num_q_heads", 129)):
        (reason,) = BACKEND.refusals(replace(spec, **{field: value}))
        assert str(value) in reason


COMPILE_FOR_HOPPER = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from benchmarks.aot import SHARED_LIMIT, specialised
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import plan_splits
from splitkv.common.profile import H200
from splitkv.common.spec import DecodeSpec
from splitkv.kernels_cuda import latent, latent_hopper
from splitkv.kernels_cuda.plan import bind
from splitkv.kernels_cuda.states import Destination, Workspace

spec = DecodeSpec(
    num_q_heads=128, num_kv_heads=1, head_dim=576, head_dim_v=512, layout="NHD", page_size=64
)
k = torch.zeros(4, 64, 1, 576, dtype=spec.dtype)
table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.full((2,), 200, dtype=torch.int32)
cache = PagedCache(k, k[..., :512], table, lengths)
call = DecodeCall(torch.zeros(2, 1, 128, 576, dtype=spec.dtype), cache, spec)
plan = bind(plan_splits(spec, [200, 200], profile=H200, num_splits=2), k.device)
out = torch.empty(2, 1, 128, 512, dtype=spec.dtype)
workspace = Workspace.empty(spec, plan.num_slots, k.device)
launch = latent.launch_for_hopper(
    call, plan, workspace, Destination(out, torch.empty(2, 1, 128)), None
)
options, *rest = specialised(launch, 90)
source = GluonASTSource(launch.kernel, *rest)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options.__dict__)
assert "wgmma.mma_async" in compiled.asm["ptx"]
assert 128 << 10 < compiled.metadata.shared <= SHARED_LIMIT[90], compiled.metadata.shared
print("compiled")
"""


def test_the_kernel_for_hopper_compiles_and_fits() -> None:
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_HOPPER],
        cwd=ROOT,
        env=compiled,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr
