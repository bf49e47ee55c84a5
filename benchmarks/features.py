"""What features cost on a GPU: ``python -m benchmarks.features [--only WORD,WORD]``.

quantised: caches of 8 bits beside bfloat16, 64 requests of 8k. int4: such caches beside bfloat16,
too. latent: absorbed MLA of 128 heads,
64 requests of 8k, beside a matrix product of torch. window: a window of 4k at 128k beside a history
of 4k. tree: a tree of 64 draft nodes beside 64 causal queries. Each part replaces itself in the
results file of its device.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.parts import Part, Where, micro, run_parts, turns_of
from splitkv.backends.decode import decode
from splitkv.backends.registry import select
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import PagedCache
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind

_PAGE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    return run_parts("features", __doc__, PARTS, arguments, turns=7)


def quantised(where: Where) -> Mapping[str, object]:
    """bfloat16, int8 and both 8-bit floats, a scale for each kv head."""
    batch, length = (2, 256) if where.quick else (64, 8192)
    ways = {}
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        kind = None if dtype is torch.bfloat16 else ScaleKind.HEAD
        spec = _spec(kv_dtype=dtype, k_scale=kind, v_scale=kind)
        scale = None if kind is None else torch.rand(8, device=where.device) + 0.5
        ways[str(dtype).removeprefix("torch.")] = _way(
            where, spec, batch, length, k_scale=scale, v_scale=scale
        )
    found = _microseconds(where, ways, batch * length * _spec().kv_bytes_per_token)
    base = found["bfloat16_us"]
    rates = {name.replace("_us", "_speed"): round(base / us, 3) for name, us in found.items()}
    return {"batch": batch, "length": length} | found | rates


def int4(where: Where) -> Mapping[str, object]:
    """Groups of 32 and 128 elements, scales in bfloat16."""
    batch, length = (2, 256) if where.quick else (64, 8192)
    ways = {"bfloat16": _way(where, _spec(), batch, length)}
    for group in (32, 128):
        spec = _spec(kv_dtype=torch.uint8, k_scale=ScaleKind.GROUP, v_scale=ScaleKind.GROUP)
        shape = (batch * length // _PAGE, _PAGE, 8, 128 // group)
        scale = _random(shape, torch.bfloat16, where.device).abs() + 0.5
        ways[f"group_{group}"] = _way(where, spec, batch, length, k_scale=scale, v_scale=scale)
    found = _microseconds(where, ways, batch * length * _spec().kv_bytes_per_token)
    base = found["bfloat16_us"]
    rates = {name.replace("_us", "_speed"): round(base / us, 3) for name, us in found.items()}
    return {"batch": batch, "length": length} | found | rates


def latent(where: Where) -> Mapping[str, object]:
    """K of 576 columns, V the first 512 of them."""
    batch, length, heads = (2, 256, 16) if where.quick else (64, 8192, 128)
    spec = DecodeSpec(
        num_q_heads=heads,
        num_kv_heads=1,
        head_dim=576,
        head_dim_v=512,
        layout=Layout.NHD,
        page_size=_PAGE,
    )
    size = 256 if where.quick else 8192
    a, b = (torch.randn(size, size, device=where.device).bfloat16() for _ in range(2))
    ways = {
        "splitkv": _way(where, spec, batch, length),
        "product": Candidate([partial(torch.matmul, a, b)]),
    }
    # turns of 80 ms and more: at the clock that the power limit leaves, not at the one that it
    # takes away some milliseconds later, at which a product of 8192 x 8192 ran a fifth faster
    found = _microseconds(where, ways, batch * length * 576 * 2, 1 if where.quick else 256)
    operations = 2 * batch * length * heads * (576 + 512)
    rate = operations / found["splitkv_us"] / 1e6
    product_rate = 2 * size**3 / found["product_us"] / 1e6
    return found | {
        "tflops": round(rate, 1),
        "product_tflops": round(product_rate, 1),
        "share_of_product": round(rate / product_rate, 3),
    }


def window(where: Where) -> Mapping[str, object]:
    """16 requests."""
    batch, length, seen = (2, 512, 64) if where.quick else (16, 131072, 4096)
    ways = {
        "window": _way(where, _spec(sliding_window=seen), batch, length),
        "short": _way(where, _spec(), batch, seen),
    }
    found = _microseconds(where, ways, batch * seen * _spec().kv_bytes_per_token)
    return found | {"over_short": round(found["window_us"] / found["short_us"], 3)}


def tree(where: Where) -> Mapping[str, object]:
    """8 requests of 8k, each with 64 queries; the mask shows a node its ancestors and itself."""
    batch, length, nodes = (2, 256, 8) if where.quick else (8, 8192, 64)
    parents = [(node - 1) // 2 for node in range(nodes)]
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[parents[node]]
    mask = mask.expand(batch, nodes, nodes).to(where.device).contiguous()
    ways = {
        "tree": _way(
            where, _spec(num_queries=nodes, attn_mask=True), batch, length, attn_mask=mask
        ),
        "causal": _way(where, _spec(num_queries=nodes), batch, length),
    }
    found = _microseconds(where, ways, batch * length * _spec().kv_bytes_per_token)
    return found | {"over_causal": round(found["tree_us"] / found["causal_us"], 3)}


PARTS: dict[str, Part] = {
    "quantised": quantised,
    "int4": int4,
    "latent": latent,
    "window": window,
    "tree": tree,
}


def _spec(**given: object) -> DecodeSpec:
    facts: dict[str, object] = {
        "num_q_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "layout": Layout.NHD,
        "page_size": _PAGE,
    }
    return DecodeSpec(**(facts | given))  # type: ignore[arg-type]


def _way(
    where: Where, spec: DecodeSpec, batch: int, length: int, **tensors: Tensor | None
) -> Candidate:
    """One call on random pages; the cache is larger than any cache of the device."""
    device, pages = where.device, batch * length // _PAGE
    at = device if device.type == "cuda" else torch.device("cpu")
    stored = spec.head_dim // 2 if spec.cache_dtype is torch.uint8 else spec.head_dim
    shape = (pages, _PAGE, spec.num_kv_heads, stored)
    keys = _random(shape, spec.cache_dtype, device)
    if spec.head_dim_v < spec.head_dim:
        values = keys[..., : spec.head_dim_v]
    else:
        values = _random(shape, spec.cache_dtype, device)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
    table = order.int().view(batch, -1).to(device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=at)
    cache = PagedCache(keys, values, table, lengths)
    queries = (spec.num_queries,) if spec.num_queries > 1 else ()
    q = _random((batch, *queries, spec.num_q_heads, spec.head_dim), spec.dtype, device)
    backend = select(spec, device)
    plan = backend.plan(spec, [length] * batch)
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Candidate(
        [partial(decode, q, cache, spec, plan=plan, backend=backend.name, **given)]  # type: ignore[arg-type]
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype is torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    if dtype is torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)


def _microseconds(
    where: Where, ways: dict[str, Candidate], kv_bytes: int, at_least: int = 1
) -> dict[str, float]:
    timings = turns_of(where, ways, kv_bytes, at_least)
    return {f"{name}_us": micro(timing.median) for name, timing in timings.items()}


if __name__ == "__main__":
    sys.exit(main())
