"""``append_kv`` on device npu: the vendor's write where it takes the cache, the CPU's bits
everywhere.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_calls import make_call, on_npu
from splitkv import DenseCache, PagedCache, RingCache, append_kv
from splitkv.common.spec import Layout
from splitkv.kernels_ascend import cache_write, standin
from splitkv.kernels_ascend.limits import Facts, limit, violations
from splitkv.kernels_ascend.soc import Soc
from splitkv.kernels_ascend.standin import device

SCATTER = "npu::npu_scatter_pa_kv_cache"
LAYOUTS = ("BSND", "BNSD", "packed", "NHD", "HND")
K, D = 2, 128
LENGTHS = [300, 0, 129, 2, 520]


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def new_rows(
    batch: int, steps: int, dtype: torch.dtype = torch.bfloat16, dim: int = D
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, batch, steps, K, dim, generator=random)
    return k.to(dtype), v.to(dtype)


def copied(cache: Any) -> Any:
    """The same strides over memory of its own."""

    def clone(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    return replace(cache, k=clone(cache.k), v=clone(cache.v))


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def both(cache: Any, k: Tensor, v: Tensor, **scales: Tensor) -> list[str]:
    """Append on the host and on the device; the device's operators. The bits must be the same."""
    host, here = copied(cache), on_npu(copied(cache))
    append_kv(host, k, v, **scales)
    assert not torch.equal(bits(host.k), bits(cache.k)), "nothing was written"
    with standin.recording() as calls:
        append_kv(here, on_npu(k), on_npu(v), **{n: on_npu(s) for n, s in scales.items()})
    assert torch.equal(bits(here.k), bits(host.k))
    assert torch.equal(bits(here.v), bits(host.v))
    assert not [call.name for call in calls if call.syncs], "it waits for the device"
    return [call.name for call in calls if call.name.startswith("npu::")]


def ring(lengths: list[int]) -> RingCache:
    table = torch.arange(3 * len(lengths), dtype=torch.int32).view(len(lengths), 3)
    k, v = torch.full((2, 3 * len(lengths), 16, K, D), math.nan, dtype=torch.bfloat16)
    return RingCache(k, v, table, torch.tensor(lengths), Layout.NHD, anchor_blocks=1)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_vendors_write_gives_the_cpus_bits(layout: str, steps: int) -> None:
    """Padding rows of length 0, and a request with fewer tokens than rows, are skipped in both."""
    cache = make_call(layout, LENGTHS).cache
    assert both(cache, *new_rows(5, steps)) == [SCATTER]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_negative_page_ids_are_skipped(layout: str) -> None:
    cache = make_call(layout, [300, 129, 20]).cache
    cache.block_table[1] = -1
    assert both(cache, *new_rows(3, 2)) == [SCATTER]


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_a_ring_evicts_as_on_the_cpu(steps: int) -> None:
    assert both(ring([300, 17, 41]), *new_rows(3, steps)) == [SCATTER]


def test_where_every_row_is_skipped_nothing_is_written() -> None:
    cache = make_call("NHD", [0, 0]).cache
    here = on_npu(copied(cache))
    append_kv(here, *(on_npu(part) for part in new_rows(2, 1)))
    assert torch.equal(bits(here.k), bits(cache.k))


def test_no_request_and_no_token_are_fine() -> None:
    for batch, steps in ((0, 1), (2, 0)):
        cache = on_npu(make_call("NHD", [9] * batch).cache)
        before = bits(cache.k)
        append_kv(cache, *(on_npu(part) for part in new_rows(batch, steps)))
        assert torch.equal(bits(cache.k), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_rounded_before_they_are_written(dtype: torch.dtype) -> None:
    cache = make_call("HND", [300, 9], dtype=dtype).cache
    assert both(cache, *new_rows(2, 1, torch.float32)) == [SCATTER]


def test_8_bit_codes_go_as_bytes() -> None:
    paged = make_call("NHD", [300, 9]).cache
    codes = {name: torch.zeros(paged.k.shape).to(torch.float8_e4m3fn) for name in "kv"}
    scale = torch.tensor([0.25])
    cache = replace(paged, **codes)
    assert both(cache, *new_rows(2, 2), k_scale=scale, v_scale=scale) == [SCATTER]


def test_keys_and_values_may_have_other_head_dims() -> None:
    paged = make_call("HND", [300, 9]).cache
    cache = replace(paged, v=paged.v[..., :64].contiguous())
    k, v = new_rows(2, 1)
    assert both(cache, k, v[..., :64]) == [SCATTER]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_k_and_v_in_one_pool(layout: str) -> None:
    apart = make_call(layout, [300, 129]).cache
    pool = torch.stack([apart.k, apart.v], 1)
    for k, v in ((pool[:, 0], pool[:, 1]),):
        together = PagedCache(k, v, apart.block_table, apart.seq_lens, apart.layout)
        host, here = copied(together), on_npu(replace(together, k=k, v=v))
        append_kv(host, *new_rows(2, 2))
        with standin.recording() as calls:
            append_kv(here, *(on_npu(part) for part in new_rows(2, 2)))
        assert [call.name for call in calls if call.name.startswith("npu::")] == [SCATTER]
        assert torch.equal(bits(here.k), bits(host.k))
        assert torch.equal(bits(here.v), bits(host.v))


# What the operator does not take goes through torch operators


def torn() -> PagedCache:
    paged = make_call("NHD", [300, 9]).cache
    wide = torch.zeros(*paged.k.shape[:-1], 2 * D, dtype=torch.bfloat16)
    return replace(paged, k=wide[..., :D], v=wide[..., D:])


def apart() -> PagedCache:
    """k alternates with something else in its pool, v does not."""
    paged = make_call("NHD", [300, 9]).cache
    return replace(paged, k=torch.stack([paged.k, paged.k], 1)[:, 0])


LEFT = {
    "float64": lambda: make_call("NHD", [300, 9], dtype=torch.float64).cache,
    "torn rows": torn,
    "pools of two steps": apart,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_it_does_not_take_is_left_to_torch(name: str) -> None:
    assert both(LEFT[name](), *new_rows(2, 2)) == []


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend950", "Ascend1"])
def test_generations_without_the_operator(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_write, "device_name", lambda: chip)
    assert both(make_call("NHD", [300, 9]).cache, *new_rows(2, 1)) == []


def test_a_release_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_write, "OPERATOR", "npu_of_a_later_release")
    assert both(make_call("NHD", [300, 9]).cache, *new_rows(2, 1)) == []


def test_the_limits_at_their_edge() -> None:
    most = limit("scatter_slots_max").number
    facts = Facts(
        operator=cache_write.OPERATOR, dtype="float16", kv_dtype="float16", cache_form=4, slots=most
    )
    assert violations(facts) == []
    for change, words in (
        ({"slots": most + 1}, "slots 2147483648: slots are int32 here"),
        ({"dtype": "float64", "kv_dtype": "float64"}, "dtype float64: rows and cache are"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype bfloat16: keys, values and both caches"),
        ({"cache_form": 3}, "cache_form 3: the cache is 4-D"),
        ({"soc": Soc.ATLAS_310P}, "Ascend 310P has no npu_scatter_pa_kv_cache"),
        ({"soc": Soc.A5}, "Ascend 950 has no npu_scatter_pa_kv_cache"),
    ):
        assert any(said.startswith(words) for said in violations(replace(facts, **change)))  # type: ignore[arg-type]


# Negative controls: a wrong call is seen


@pytest.fixture
def kernels() -> Iterator[dict[str, device.Kernel]]:
    """The stand-in's operators, put back as they were."""
    before = dict(device.kernels)
    yield device.kernels
    device.kernels.update(before)


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slot_beside_the_right_one_is_seen(
    layout: str, shift: int, kernels: dict[str, device.Kernel]
) -> None:
    right = kernels[SCATTER]

    def beside(given: Any) -> Any:
        slots = given["slot_mapping"]
        return right({**given, "slot_mapping": torch.where(slots < 0, slots, slots + shift)})

    kernels[SCATTER] = beside
    with pytest.raises((AssertionError, IndexError)):
        both(make_call(layout, [300, 20, 129]).cache, *new_rows(3, 1))


def test_skipped_rows_that_are_sent_to_slot_0_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cache_write._slots
    monkeypatch.setattr(cache_write, "_slots", lambda *given: right(*given).clamp(min=0))
    cache = make_call("NHD", [300, 0, 129, 20]).cache
    with pytest.raises(AssertionError):
        both(cache, *new_rows(4, 1))
    with pytest.raises(RuntimeError, match="slots repeat"):
        both(cache, *new_rows(4, 2))


def test_a_captured_append_is_replayed_with_other_rows() -> None:
    """Slots are worked out on the device, so that a graph follows lengths that are there."""
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    k, v = torch.zeros(2, 2, 16, K, D, dtype=torch.bfloat16)
    cache = DenseCache(on_npu(k), on_npu(v), on_npu(lengths), Layout.BSND)
    rows = on_npu(torch.ones(2, 1, K, D, dtype=torch.bfloat16))
    append_kv(cache, rows, rows)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        append_kv(cache, rows, rows)
    cache.seq_lens.add_(1)
    rows.mul_(3)
    graph.replay()
    assert cache.k.cpu()[:, :, 0, 0].nonzero().tolist() == [[0, 4], [0, 5], [1, 8], [1, 9]]
    assert cache.k.cpu()[0, 5, 0, 0] == 3
