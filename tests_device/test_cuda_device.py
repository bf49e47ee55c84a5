"""The CUDA kernels on a GPU, at real sizes. Not part of ``make test``. From the root:

    python -m pytest tests_device tests/test_cuda_*.py

The interpreter's tests run the same kernels on the GPU where there is one. Without a GPU the tests
of this folder fail, they are never skipped. They want 40 GB of its memory and a few minutes.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

import splitkv
from cuda_calls import BACKEND, call_of, decode, host_plan
from histories import same_bits
from splitkv.backends.cuda import CudaBackend
from splitkv.common.cache import DenseCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_cuda.plan import bind
from splitkv.matrix.case import Case
from splitkv.matrix.cases import CASES
from splitkv.matrix.parity import Outcome, refusals, run_case

BF16 = torch.bfloat16
HEADS = ((32, 8), (28, 4), (8, 1), (32, 32))
RAGGED = [131072] + [1024] * 63
DEVICES = range(max(torch.cuda.device_count(), 1))


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    assert CudaBackend().missing() is None, CudaBackend().missing()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_case_table(case: Case) -> None:
    result = run_case(BACKEND, case)
    wanted = Outcome.REFUSED if refusals(BACKEND, case) else Outcome.PASSED
    assert result.outcome is wanted, result.why


def normal(*shape: int, seed: int = 0, device: int = 0) -> Tensor:
    random = torch.Generator(f"cuda:{device}").manual_seed(seed)
    return torch.randn(shape, dtype=BF16, device=f"cuda:{device}", generator=random)


def pool(
    lengths: list[int], kv_heads: int, page: int, seed: int = 0, device: int = 0
) -> PagedCache:
    """Requests on pages in random order; spare pages and slots hold NaN, spare table entries -1."""
    counts = [-(-length // page) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts) + 3)
    table = np.full((len(lengths), max(counts) + 2), -1, np.int32)
    taken = np.cumsum([0, *counts])
    for row, count in enumerate(counts):
        table[row, :count] = order[taken[row] : taken[row + 1]]
    k, v = (normal(len(order), page, kv_heads, 128, seed=seed + i, device=device) for i in range(2))
    for tensor in (k, v):
        tensor[order[taken[-1] :].tolist()] = math.nan
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            if rest := length % page:
                tensor[int(table[row, count - 1]), rest:] = math.nan
    at = f"cuda:{device}"
    return PagedCache(
        k, v, torch.from_numpy(table).to(at), torch.tensor(lengths, dtype=torch.int32, device=at)
    )


def rows(cache: PagedCache, request: int) -> tuple[Tensor, Tensor]:
    """K and V of one request, [L, K, D]."""
    length = int(cache.seq_lens[request])
    pages = cache.block_table[request, : -(-length // cache.page_size)].long()
    k, v = (tensor[pages].flatten(0, 1)[:length] for tensor in cache.nhd())
    return k, v


def dense(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Attention of q [S, H, D] computed in ``dtype``, causal from the bottom right."""
    steps, heads, dim = q.shape
    group = heads // k.shape[1]
    grouped = q.to(dtype).unflatten(1, (-1, group))
    scores = torch.einsum("skgd,tkd->kgst", grouped, k.to(dtype))
    scores = scores.to(torch.promote_types(dtype, torch.float32)) * dim**-0.5
    i = torch.arange(len(k) - steps, len(k), device=q.device)[:, None]
    scores = scores.masked_fill(torch.arange(len(k), device=q.device) > i, -math.inf)
    weights = torch.softmax(scores, -1).to(dtype)
    return torch.einsum("kgst,tkd->skgd", weights, v.to(dtype)).flatten(1, 2).double()


def assert_as_good_as_eager(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Within twice the error of eager PyTorch in the same dtype."""
    exact = dense(q, k, v, torch.float64)
    eager = (dense(q, k, v, q.dtype) - exact).norm()
    assert (out.double() - exact).norm() <= 2 * eager


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("lengths", [[1024], [8192], [131072], [8192] * 8, RAGGED], ids=len)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_real_sizes(heads: int, kv_heads: int, lengths: list[int], page: int) -> None:
    cache = pool(lengths, kv_heads, page)
    q = normal(len(lengths), 2, heads, 128, seed=9)
    call = call_of(q, cache)
    for splits in ({}, {"num_splits": 1}, {"split_size": 2048}):
        out, lse = decode(call, **splits)
        assert torch.isfinite(lse).all()
        for request in {0, len(lengths) - 1}:
            assert_as_good_as_eager(out[request].cuda(), q[request], *rows(cache, request))


@pytest.mark.parametrize("splits", [{"num_splits": 16}, {"split_size": 2048}])
def test_a_request_has_the_same_bits_in_every_batch(splits: dict[str, int]) -> None:
    lengths = [4099] + [(577 * index) % 9000 for index in range(63)]
    cache = pool(lengths, 8, 16)
    q = normal(64, 1, 32, 128, seed=9)
    alone = decode(call_of(q[:1], few(cache, [0])), **splits)
    for batch in (2, 7, 16, 64):
        order = [*range(1, batch), 0]
        answer = decode(call_of(q[order], few(cache, order)), **splits)
        assert same_bits(alone, tuple(tensor[-1:] for tensor in answer))
    moved = PagedCache(
        cache.k.flip(0), cache.v.flip(0), len(cache.k) - 1 - cache.block_table, cache.seq_lens
    )
    assert same_bits(decode(call_of(q, moved), **splits), decode(call_of(q, cache), **splits))


def few(cache: PagedCache, requests: list[int]) -> PagedCache:
    return PagedCache(
        cache.k, cache.v, cache.block_table[requests], cache.seq_lens[requests], cache.layout
    )


def test_a_dense_cache_of_more_than_2_to_the_31_elements() -> None:
    tokens, kv_heads = 1_100_000, 8
    k, v = (normal(2, tokens, kv_heads, 128, seed=seed) for seed in (0, 1))
    assert k.numel() > 2**31
    lengths = torch.tensor([5, tokens], dtype=torch.int32, device="cuda")
    q = normal(2, 1, 8, 128, seed=9)
    out, _ = decode(call_of(q, DenseCache(k, v, lengths, Layout.BSND)))
    for head in range(kv_heads):
        one = slice(head, head + 1)
        assert_as_good_as_eager(out[1][:, one].cuda(), q[1][:, one], k[1][:, one], v[1][:, one])


def test_query_rows_past_2_to_the_31_elements() -> None:
    batch, heads = 262_145, 64
    q = normal(batch, 1, heads, 128)
    assert q.numel() > 2**31
    page = normal(1, 16, 8, 128, seed=3)
    table = torch.zeros(batch, 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((batch,), 16, dtype=torch.int32, device="cuda")
    cache = PagedCache(page, page, table, lengths)
    call = call_of(q, cache)
    out, lse = BACKEND.decode(call, BACKEND.plan_for(call, num_splits=1))
    last = call_of(q[-1:], few(cache, [batch - 1]))
    assert same_bits((out[-1:].cpu(), lse[-1:].cpu()), decode(last, num_splits=1))
    by_host, _ = BACKEND.decode(call, host_plan(call, [16] * batch, num_splits=1))
    assert torch.equal(out, by_host)


def test_more_programs_than_a_small_grid_axis_holds() -> None:
    lengths = [3] * 2050
    cache = pool(lengths, 32, 16)
    q = normal(2050, 1, 32, 128, seed=9)
    out, _ = decode(call_of(q, cache), num_splits=2)
    assert_as_good_as_eager(out[2049].cuda(), q[2049], *rows(cache, 2049))


@pytest.mark.parametrize("splits", [{}, {"num_splits": 8}, {"split_size": 1024}])
@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("planned", ["on the host", "in the graph"])
def test_a_graph_replayed_with_other_lengths(
    planned: str, window: int | None, splits: dict[str, int]
) -> None:
    """Its plan is for the longest lengths, or made anew by every replay."""
    longest = [9000, 9000, 4000, 4000]
    cache = pool(longest, 8, 16)
    q = normal(4, 2, 32, 128, seed=9)
    call = call_of(q, cache, sliding_window=window, anchor_tokens=4)
    plan = host_plan(call, longest, **splits) if planned == "on the host" else None
    graph, out, lse = captured(call, plan, splits)
    for lengths in (longest, [1, 8999, 0, 1234], [4000, 17, 3999, 4000]):
        cache.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(math.nan)
        graph.replay()
        eager = BACKEND.decode(call, plan or BACKEND.plan_for(call, **splits))
        assert same_bits((out, lse), eager)
        assert torch.isfinite(out).all()
        for request, length in enumerate(lengths):
            if window is None and length >= 2:
                k, v = rows(cache, request)
                assert_as_good_as_eager(out[request], q[request], k, v)


def test_a_graph_follows_a_refreshed_plan() -> None:
    cache = pool([9000, 9000], 8, 16)
    call = call_of(normal(2, 1, 32, 128, seed=9), cache)
    plan = BACKEND.plan(call.spec, [9000, 9000], num_splits=8, capacity=20)
    graph, out, lse = captured(call, plan, {})
    for lengths in ([100, 9000], [8000, 0], [9000, 9000]):
        cache.seq_lens.copy_(torch.tensor(lengths))
        plan.refresh(lengths)
        bind(plan, call.q.device)
        graph.replay()
        assert same_bits((out, lse), BACKEND.decode(call, host_plan(call, lengths, num_splits=8)))


def captured(
    call: DecodeCall, plan: splitkv.SplitPlan | None, splits: dict[str, int]
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    def run() -> tuple[Tensor, Tensor]:
        return BACKEND.decode(call, plan or BACKEND.plan_for(call, **splits))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    return graph, out, lse


def test_the_first_use_of_a_plan_is_not_captured() -> None:
    cache = pool([100], 8, 16)
    call = call_of(normal(1, 1, 32, 128), cache)
    decode(call, num_splits=1)
    plan = host_plan(call, [100])
    with (
        pytest.raises(RuntimeError, match="decode once before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        BACKEND.decode(call, plan)


@pytest.mark.parametrize("lengths_at", ["cuda", "cpu"])
def test_nobody_waits_for_the_device(lengths_at: str) -> None:
    cache = pool([5000, 300], 8, 16)
    q = normal(2, 1, 32, 128)
    lengths = cache.seq_lens.to(lengths_at)
    moved = PagedCache(cache.k, cache.v, cache.block_table, lengths, cache.layout)
    spec = DecodeSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.NHD, page_size=16)
    expected = splitkv.decode(q, moved, spec)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        answers = [splitkv.decode(q, moved, spec, **splits) for splits in ({}, {"num_splits": 4})]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(expected, answers[0])


@pytest.mark.parametrize("index", DEVICES)
def test_a_device_that_is_not_the_current_one(index: int) -> None:
    cache = pool([5000, 300], 8, 16, device=index)
    q = normal(2, 1, 32, 128, seed=9, device=index)
    call = uncopied(q, cache)
    with torch.cuda.device(0):
        out, _ = BACKEND.decode(call, BACKEND.plan_for(call, num_splits=4))
        torch.cuda.synchronize(index)
    assert out.device.index == index
    assert_as_good_as_eager(out[0], q[0], *rows(cache, 0))


def uncopied(q: Tensor, cache: PagedCache) -> DecodeCall:
    """``call_of`` moves tensors to device 0; this call stays where it is."""
    spec = DecodeSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, layout=Layout.NHD, page_size=16)
    return DecodeCall(q, cache, spec)


def test_a_merge_keeps_the_sign_of_zero() -> None:
    out = torch.full((3, 64), -0.0, device="cuda")
    one = splitkv.PartialState(*(torch.zeros(3, device="cuda") for _ in range(2)), out)
    nothing = splitkv.PartialState.empty((3,), 64, device="cuda")
    merged = BACKEND.merge([nothing, one, nothing])
    assert same_bits((merged.out,), (out,))
