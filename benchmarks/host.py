"""What a call with a bound plan costs the host besides its backend: ``python -m benchmarks.host``.

Timed with a backend that hands back tensors made beforehand. "checking" is what the default adds to
``validate="none"``; "again" what ``validate="full"`` adds. Microseconds per call, best of rounds.

On a GPU also what an eager call with a bound plan costs the host from end to end, the kernels'
start included and their run not: medians; and a step of 32 layers by one plan.
"""

import sys
import timeit
from collections.abc import Callable
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch

import splitkv
from splitkv.backends.cpu import CpuBackend
from splitkv.cli.output import print_table
from splitkv.common.spec import DecodeSpec, Layout

Q_HEADS, KV_HEADS, DIM, PAGE, BLOCKS = 32, 8, 128, 16, 64
CALLS, ROUNDS = 4000, 9
GPU_CALLS, GPU_STEPS, LAYERS, TOKENS = 300, 30, 32, 8192


def main() -> int:
    rows = [_measure(batch) for batch in (1, 8, 64)]
    title = f"microseconds per call, block table of {BLOCKS} columns"
    print_table(("requests", "whole call", "checking", "again"), rows, title=title)
    if torch.cuda.is_available():
        title = f"{torch.cuda.get_device_name()}: microseconds of the host, {TOKENS} tokens"
        columns = ("requests", "decode", "out= and lse=", "no fast start", f"{LAYERS} layers")
        print_table(columns, [_measure_gpu(batch) for batch in (1, 8, 64)], title=title)
    return 0


@torch.no_grad()
def _measure(batch: int) -> tuple[object, ...]:
    q = torch.randn(batch, Q_HEADS, DIM)
    pages = torch.randn(8, PAGE, KV_HEADS, DIM)
    table = (torch.arange(batch * BLOCKS) % len(pages)).view(batch, BLOCKS).int()
    lengths = torch.full((batch,), PAGE * BLOCKS - 3).int()
    cache = splitkv.PagedCache(pages, pages, table, lengths, Layout.NHD)
    spec = DecodeSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        layout=Layout.NHD,
        dtype=q.dtype,
        page_size=PAGE,
    )
    plan = splitkv.select(spec, q.device).plan(spec, lengths.tolist())
    result = q[:, None].clone(), q.new_empty(batch, 1, Q_HEADS)
    with patch.object(CpuBackend, "decode", lambda *_, **__: result):
        none, usual, full = (
            _micro(lambda how=how: splitkv.decode(q, cache, spec, plan=plan, validate=how))
            for how in ("none", None, "full")
        )
    return batch, f"{usual:.1f}", f"{usual - none:.1f}", f"{full - none:.1f}"


@torch.no_grad()
def _measure_gpu(batch: int) -> tuple[object, ...]:
    """Medians: of a call, of one that is given its outputs, of one that triton launches the
    ordinary way, and of a step.
    """
    from splitkv.kernels_cuda import attention

    columns = TOKENS // PAGE
    bfloat16 = {"dtype": torch.bfloat16, "device": "cuda"}
    layers = [
        (
            torch.randn(batch, Q_HEADS, DIM, **bfloat16),
            torch.randn(64, PAGE, KV_HEADS, DIM, **bfloat16),
        )
        for _ in range(LAYERS)
    ]
    table = (torch.arange(batch * columns) % 64).view(batch, columns).int().cuda()
    lengths = torch.full((batch,), TOKENS).int().cuda()
    caches = [
        splitkv.PagedCache(pages, pages.clone(), table, lengths, Layout.NHD) for _, pages in layers
    ]
    spec = DecodeSpec(
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        layout=Layout.NHD,
        dtype=torch.bfloat16,
        page_size=PAGE,
    )
    plan = splitkv.select(spec, lengths.device).plan(spec, [TOKENS] * batch)
    q, cache = layers[0][0], caches[0]
    out, lse = splitkv.decode(q, cache, spec, plan=plan)

    def call() -> None:
        splitkv.decode(q, cache, spec, plan=plan)

    def call_into() -> None:
        splitkv.decode(q, cache, spec, plan=plan, out=out, lse=lse)

    def step() -> None:
        for (queries, _), own in zip(layers, caches, strict=True):
            splitkv.decode(queries, own, spec, plan=plan)

    usual, given = _host_median(call, GPU_CALLS), _host_median(call_into, GPU_CALLS)
    whole = _host_median(step, GPU_STEPS)
    with patch.object(attention, "can_start", lambda device: False):
        plan.bound.clear()  # nothing kept is then found above either
        ordinary = _host_median(call, GPU_CALLS)
    return batch, *(f"{micro:.1f}" for micro in (usual, given, ordinary, whole))


def _host_median(call: Callable[[], object], calls: int) -> float:
    """Microseconds until ``call`` returns, the device idle before each: no queue is ever full."""
    times = []
    for _ in range(calls + 20):
        torch.cuda.synchronize()
        begin = perf_counter()
        call()
        times.append((perf_counter() - begin) * 1e6)
    return median(times[20:])


def _micro(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e6


if __name__ == "__main__":
    sys.exit(main())
