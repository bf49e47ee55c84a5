"""What operator calls splitkv makes: the case table on every route, merges and cache writes.

All of it runs on the stand-in.

A process of its own, because the stand-in and the real torch_npu both want device ``npu``:

    python -m tests_ascend.record_calls calls.json

Calls that differ in nothing but numbers are kept once. A tensor is written as its dtype, shape,
strides and device.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch

import splitkv
from splitkv.backends.ascend import AscendBackend
from splitkv.backends.base import Backend
from splitkv.common.cache import DenseCache, PackedCache, PagedCache
from splitkv.common.spec import Layout
from splitkv.kernels_ascend import standin
from splitkv.kernels_ascend.graphs import GraphDecode
from splitkv.kernels_ascend.routes import ROUTES
from splitkv.kernels_ascend.soc import Soc
from splitkv.kernels_ascend.standin import device
from splitkv.matrix import parity
from splitkv.matrix.case import Case, Size, make
from splitkv.matrix.cases import CASES
from splitkv.matrix.inputs import build

NPU = "npu"
LONGER = (300, 128, 70)
BESIDES = tuple(
    make(
        f"prefill-{layout.value}-{causal}", "", LONGER, num_queries=16, layout=layout, causal=causal
    )
    for layout in (Layout.BSND, Layout.BNSD)
    for causal in (True, False)
)
"""Requests that the table has with shorter histories than queries only."""


def main(path: Path) -> None:
    standin.install()
    results = _keep_results()
    found: dict[str, dict[str, Any]] = {}
    ran: dict[str, list[str]] = {}
    for name, work in _works():
        results.clear()
        with standin.recording() as calls:
            refused = _attempt(work)
        made = [call for call in calls if call.name in device.kernels]
        ran[name] = refused or sorted({call.name for call in made})
        for call, result in zip(made, results, strict=True):
            entry = {"operator": call.name, "arguments": _plain(call.arguments)}
            entry["results"] = _plain(result)
            found.setdefault(json.dumps(entry, sort_keys=True), {"by": name, **entry})
    path.write_text(json.dumps({"ran": ran, "calls": list(found.values())}))


def _attempt(work: Callable[[], list[str] | None]) -> list[str] | None:
    try:
        return work()
    except Exception as fault:  # noqa: BLE001 (the test that reads this fails for it; others still run)
        return [f"failed: {type(fault).__name__}: {fault}"]


def _keep_results() -> list[Any]:
    """Every operator's results from now on, as the device returns them."""
    results: list[Any] = []

    def kept(kernel: device.Kernel) -> device.Kernel:
        def run(given: Mapping[str, Any]) -> Any:
            results.append(None)  # what stays if it refuses
            results[-1] = kernel(given)
            return results[-1]

        return run

    device.kernels.update({name: kept(kernel) for name, kernel in device.kernels.items()})
    return results


def _works() -> Iterator[tuple[str, Callable[[], list[str] | None]]]:
    """Names and what to do; the answer is the refusal's lines, or None where it ran."""
    for name, backend in _backends().items():
        for case in (*CASES, *BESIDES):
            if case.size is Size.SMALL:
                yield f"{name}: {case.id}", partial(_case, backend, case)
    for case in CASES:
        if case.size is Size.SMALL and case.query_lens is None:
            yield f"graph: {case.id}", partial(_graph, case)
    for count, D in ((2, 64), (16, 512), (17, 64), (2, 12)):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"merge of {count}, D {D}, {dtype}", partial(_merge, count, D, dtype)
    for layout in ("BSND", "BNSD", "packed", "NHD", "HND"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            yield f"append to {layout}, {dtype}", partial(_append, layout, dtype)


def _backends() -> dict[str, Backend]:
    """As it comes, every route by its name, and the generation that reports no LSE."""
    named = {
        route.name: AscendBackend(route=route.name, strict=False, needs_lse=False)
        for route in ROUTES
    }
    return {
        "ascend": AscendBackend(),
        "loose": AscendBackend(strict=False),
        "310P": AscendBackend(soc=Soc.ATLAS_310P, needs_lse=False),
        **named,
    }


def _case(backend: Backend, case: Case) -> list[str] | None:
    if refused := parity.refusals(backend, case):
        return refused
    inputs = build(case, parity.SEED, NPU)
    plan = backend.plan_for(inputs.call, num_splits=case.num_splits, split_size=case.split_size)
    try:
        if case.returns_state:
            backend.partial(inputs.call, plan)
        else:
            backend.decode(inputs.call, plan, sinks=inputs.sinks)
    except splitkv.UnsupportedError as refusal:  # by the tensors, which no spec shows
        return str(refusal).splitlines()
    return None


def _graph(case: Case) -> list[str] | None:
    """The calls that a captured graph makes."""
    inputs = build(case, parity.SEED, NPU)
    cache, lengths = inputs.call.cache, list(case.seq_lens)
    try:
        graph = GraphDecode(
            case.spec, batch=len(lengths), max_len=max(lengths, default=0), device=NPU
        )
        graph.refresh(lengths, cache.block_table if isinstance(cache, PagedCache) else None)
        graph.partial(inputs.call.q, cache)
    except (splitkv.UnsupportedError, ValueError) as refusal:
        return str(refusal).splitlines()
    return None


def _merge(count: int, D: int, dtype: torch.dtype) -> None:
    lse = torch.randn(count, 3, 4, device=NPU)
    out = torch.randn(count, 3, 4, D, device=NPU).to(dtype)
    splitkv.merge_states(
        [splitkv.PartialState.from_lse(out[row], lse[row]) for row in range(count)]
    )


def _append(layout: str, dtype: torch.dtype) -> None:
    kind = Layout(layout)
    shape = [3, 2, 128, 64] if kind in (Layout.HND, Layout.BNSD) else [3, 128, 2, 64]
    k, v = (torch.zeros(shape, device=NPU).to(dtype) for _ in "kv")
    lengths = torch.tensor([2, 5, 128], dtype=torch.int32)
    cache: Any
    if kind is Layout.PACKED:
        offsets = torch.tensor([0, 2, 7, 3 * 128], dtype=torch.int32)
        cache = PackedCache(k.flatten(0, 1), v.flatten(0, 1), offsets)
    elif kind.paged:
        table = torch.arange(3, dtype=torch.int32, device=NPU)[:, None]
        cache = PagedCache(k, v, table, lengths, kind)
    else:
        cache = DenseCache(k, v, lengths, kind)
    new = torch.randn(2, 3, 1, 2, 64, device=NPU).bfloat16()
    splitkv.append_kv(cache, new[0], new[1])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "device": value.device.type,
        }
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
