"""What somebody with fresh eyes broke on the stand-in, kept with the right answers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from ascend_calls import complaints, make_call, on_npu
from splitkv.backends.ascend import AscendBackend
from splitkv.common.cache import DenseCache, PackedCache, PagedCache
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.emit import emit
from splitkv.kernels_ascend.graphs import GraphDecode
from splitkv.kernels_ascend.routes import Wants

pytestmark = pytest.mark.filterwarnings("ignore:page size")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def spec_of(layout: Layout, *, K: int = 2, D: int = 128, **more: Any) -> DecodeSpec:
    settings: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": K, "head_dim": D, "dtype": BF16}
    return DecodeSpec(**settings | {"layout": layout} | more)


@pytest.mark.parametrize("layout", ["NHD", "HND", "BSND", "BNSD", "packed"])
@pytest.mark.parametrize("lengths", [[10, 300], [300, 10], [130], [2]])
@pytest.mark.parametrize("queries", [1, 2])
def test_a_window_whose_ranges_come_back_in_order(
    layout: str, lengths: list[int], queries: int
) -> None:
    for window in (1, 100):
        call = make_call(layout, lengths, queries=queries, sliding_window=window)
        assert complaints(call) == []


def test_two_views_of_the_lengths_at_one_address_are_told_apart() -> None:
    k, v = (torch.randn(2, 128, 2, 128).to(BF16) for _ in range(2))
    q = torch.randn(2, 4, 128).to(BF16)
    lengths = torch.tensor([[10, 120], [77, 5]], dtype=torch.int32)
    spec = spec_of(Layout.BSND)
    plan = AscendBackend().plan(spec, [128, 128])
    on_device = on_npu(lengths)
    for pick in (lambda x: x[0], lambda x: x[:, 0], lambda x: x[1]):
        cache = DenseCache(on_npu(k), on_npu(v), pick(on_device), Layout.BSND)
        out, _ = splitkv.decode(on_npu(q), cache, spec, plan=plan)
        wanted, _ = splitkv.decode(q, DenseCache(k, v, pick(lengths), Layout.BSND), spec)
        assert torch.linalg.norm((out.cpu() - wanted).float()) < 0.02 * wanted.float().norm()


@pytest.mark.parametrize("layout", ["packed", "NHD", "BSND"])
def test_a_plan_for_shorter_lengths_is_not_believed(layout: str) -> None:
    call = make_call(layout, [60])
    cache: Any = call.cache
    on_device = [on_npu(x) for x in (cache.k, cache.v)]
    plan = AscendBackend().plan(call.spec, [30])
    lengths = cache.cu_seqlens_k if isinstance(cache, PackedCache) else cache.seq_lens
    for given in (lengths, on_npu(lengths)):
        if isinstance(cache, PackedCache):
            placed: Any = PackedCache(*on_device, given)
        elif isinstance(cache, PagedCache):
            placed = PagedCache(*on_device, on_npu(cache.block_table), given, cache.layout)
        else:
            placed = DenseCache(*on_device, given, cache.layout)
        with pytest.raises(ValueError, match="60, the plan was made for 30"):
            splitkv.decode(on_npu(call.q), placed, call.spec, plan=plan)


def test_a_bound_plan_looks_at_each_layers_strides() -> None:
    spec = spec_of(Layout.NHD, page_size=128)
    k, v = (on_npu(torch.randn(3, 128, 2, 128).to(BF16)) for _ in range(2))
    torn = on_npu(torch.randn(3, 128, 2, 256).to(BF16))[..., :128]
    table = on_npu(torch.tensor([[2, 0]], dtype=torch.int32))
    lengths = torch.tensor([200], dtype=torch.int32)
    q = on_npu(torch.randn(1, 4, 128).to(BF16))
    plan = AscendBackend().plan(spec, [200])
    splitkv.decode(q, PagedCache(k, v, table, lengths), spec, plan=plan)
    for pools in ((torn, v), (k, torn)):
        with pytest.raises(splitkv.UnsupportedError):
            splitkv.decode(q, PagedCache(*pools, table, lengths), spec, plan=plan)


def test_a_bound_plan_sees_that_v_is_no_longer_the_latent_part_of_k() -> None:
    backend = AscendBackend(strict=False)
    spec = spec_of(Layout.NHD, K=1, D=576, head_dim_v=512, page_size=128)
    k = on_npu(torch.randn(2, 128, 1, 576).to(BF16))
    other = on_npu(torch.randn(2, 128, 1, 512).to(BF16))
    table = on_npu(torch.tensor([[1, 0]], dtype=torch.int32))
    lengths = torch.tensor([200], dtype=torch.int32)
    q = on_npu(torch.randn(1, 1, 4, 576).to(BF16))
    plan = backend.plan(spec, [200])

    def partial(v: Tensor) -> object:
        cache = PagedCache(k, v, table, lengths)
        return backend.partial(splitkv.common.call.DecodeCall(q, cache, spec), plan)

    partial(k[..., :512])
    with pytest.raises(splitkv.UnsupportedError, match="512"):
        partial(other)


def test_a_captured_call_checks_what_it_is_refreshed_with() -> None:
    spec = spec_of(Layout.NHD, page_size=128)
    step = GraphDecode(spec, batch=1, max_len=512, device="npu")
    table = on_npu(torch.tensor([[2, 0]], dtype=torch.int32))
    for lengths, wrong, message in (
        ([-1], table, r"seq_lens\[0\] is -1"),
        ([300], table, "2 columns, a length of 300 with pages of 128 needs 3"),
        ([100], table[:0], r"must be \[1, blocks\]"),
    ):
        with pytest.raises(ValueError, match=message):
            step.refresh(lengths, wrong)
    step.refresh(torch.tensor([200]), table)
    (entry,) = step.updates()
    assert all(type(length) is int for values in entry.values() for length in values)
    k, v = (on_npu(torch.randn(3, 128, 2, 128).to(BF16)) for _ in range(2))
    q = on_npu(torch.randn(1, 1, 4, 128).to(BF16))
    lengths = torch.tensor([200], dtype=torch.int32)
    step.partial(q, PagedCache(k, v, table, lengths))
    torn = on_npu(torch.randn(3, 128, 2, 256).to(BF16))[..., :128]
    with pytest.raises(splitkv.UnsupportedError):
        step.partial(q, PagedCache(k, torn, table, lengths))
    dense = GraphDecode(spec_of(Layout.BSND), batch=1, max_len=512, device="npu")
    dense.refresh([300])
    short = DenseCache(*(on_npu(torch.randn(1, 256, 2, 128).to(BF16)),) * 2, lengths, Layout.BSND)
    with pytest.raises(ValueError, match="a length is 300, the cache's capacity is 256"):
        dense.partial(q, short)


def run_printed(spec: DecodeSpec, wants: Wants, *arguments: object) -> tuple[Tensor, Tensor]:
    """What the printed ``decode`` returns, on the host."""
    names: dict[str, Any] = {}
    exec(compile(emit(spec, wants), "printed", "exec"), names)  # noqa: S102 (it is what we print)
    out, lse = names["decode"](*arguments)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.BSND])
def test_printed_fusion_calls_know_short_and_empty_requests(layout: Layout) -> None:
    spec = spec_of(layout, D=64, num_queries=2, dtype=torch.float32)
    wants = Wants(route="fusion")
    shape = (0, 2, 64) if layout is Layout.PACKED else (2, 8, 2, 64)
    k, v = (on_npu(torch.randn(shape)) for _ in range(2))
    q = on_npu(torch.randn(2, 2, 4, 64))
    out, lse = run_printed(spec, wants, q, k, v, [0, 0])
    assert torch.equal(out, torch.zeros(2, 2, 4, 64))
    assert torch.equal(lse, torch.full((2, 2, 4), -torch.inf))
    with pytest.raises(ValueError, match="2 queries in front of the first key"):
        run_printed(spec, wants, q, k, v, [1, 0])


def test_dense_caches_in_layout_tnd_are_not_printed() -> None:
    spec = spec_of(Layout.BSND, D=192, num_queries=3)
    with pytest.raises(splitkv.UnsupportedError, match="print it for pages"):
        emit(spec, Wants(route="fia-tnd"))
