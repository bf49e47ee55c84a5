"""Times of the vendor's whole call beside splitkv's, whole and split: same tensors, same device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from splitkv.backends.base import Backend
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.runtime import operators

H, K, D, P = 32, 8, 128, 128
SHAPES = ((1, 8192), (1, 65536), (16, 8192), (64, 4096))
QUICK = ((1, 256), (3, 128))


@dataclass(frozen=True, slots=True)
class Timing:
    """Median microseconds of one way to compute the same decode step."""

    requests: int
    keys: int
    way: str
    microseconds: float


def timings(backend: Backend, device: torch.device, *, quick: bool) -> list[Timing]:
    """Every way at every shape; bfloat16, 32 query heads on 8 kv heads of 128, pages of 128."""
    found = []
    for requests, keys in QUICK if quick else SHAPES:
        call = _call(requests, keys, device)
        for way, once in _ways(backend, call):
            microseconds = _median(once, device, repeats=3 if quick else 50)
            found.append(Timing(requests, keys, way, microseconds))
    return found


def _call(requests: int, keys: int, device: torch.device) -> DecodeCall:
    random = torch.Generator().manual_seed(0)
    pages = keys // P
    shape = (requests * pages, P, K, D)
    k, v = (torch.randn(shape, generator=random).bfloat16().to(device) for _ in "kv")
    table = torch.randperm(requests * pages, generator=random).int().view(requests, pages)
    lengths = torch.full((requests,), keys, dtype=torch.int32)
    q = torch.randn(requests, 1, H, D, generator=random).bfloat16().to(device)
    spec = DecodeSpec(num_q_heads=H, num_kv_heads=K, head_dim=D, layout=Layout.NHD, page_size=P)
    return DecodeCall(q, PagedCache(k, v, table.to(device), lengths), spec)


def _ways(backend: Backend, call: DecodeCall) -> Iterator[tuple[str, Callable[[], object]]]:
    """Planned before the clock starts, as a server does once a step."""
    yield "FIA v1, called as it is", _vendor(call)
    for way, splits in (("automatic", None), ("4 splits", 4), ("8 splits", 8)):
        plan = backend.plan_for(call, num_splits=splits)

        def once(plan: SplitPlan | None = plan) -> object:
            return backend.decode(call, plan)

        yield f"splitkv, {way}", once


def _vendor(call: DecodeCall) -> Callable[[], object]:
    cache = call.cache
    assert isinstance(cache, PagedCache)
    lengths = cache.seq_lens.tolist()
    fused = operators().npu_fused_infer_attention_score

    def once() -> object:
        return fused(
            call.q,
            cache.k.flatten(2),
            cache.v.flatten(2),
            input_layout="BSND",
            num_heads=H,
            num_key_value_heads=K,
            scale=call.spec.scale,
            actual_seq_lengths_kv=lengths,
            block_table=cache.block_table,
            block_size=P,
        )

    return once


def _median(once: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    synchronize = getattr(torch, device.type).synchronize
    once()
    times = []
    for _ in range(repeats):
        synchronize()
        start = perf_counter()
        once()
        synchronize()
        times.append(perf_counter() - start)
    return median(times) * 1e6
