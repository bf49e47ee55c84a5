"""A spec's operator call as plain Python that imports torch and torch_npu alone, to be copied into
another engine.

What is printed does what the route does for uncut requests: the reshapes, the host length lists,
the mask, the operator's own keywords, and the repair of its LSE.
"""

from collections.abc import Callable

from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.support import UnsupportedError
from splitkv.kernels_ascend.emit_fia import latent, packed, rows, tnd
from splitkv.kernels_ascend.emit_others import fusion, incre, paged_attention, prompt
from splitkv.kernels_ascend.routes import (
    FIA_MLA,
    FIA_ROWS,
    FIA_SINKS,
    FIA_TND,
    FUSION,
    INCRE,
    MLA_LATENT,
    MLA_ROPE,
    OWN,
    PAGED_ATTENTION,
    PROMPT,
    Route,
    Wants,
    choose,
)
from splitkv.kernels_ascend.soc import Soc

_HEAD = '''\
"""{title}

Written by `splitkv explain --emit torch_npu`, and checked against a stand-in on the CPU: no NPU has
run it. {shapes}
Lengths are lists of host integers. Returns out [B, S, H, Dv] and
{returns}.
"""

import math

import torch
import torch_npu

H, K, D, DV, S, SCALE = {heads}, {kv_heads}, {head_dim}, {head_dim_v}, {queries}, {scale!r}
'''


def emit(spec: DecodeSpec, wants: Wants) -> str:
    """Source text of a function ``decode`` for ``spec`` on the route that serves it.

    Raises:
        UnsupportedError: no route serves it, or one that this cannot print.
    """
    choice = choose(spec, wants)
    if choice.route is None:
        raise UnsupportedError(
            "\n".join(["no route serves this", *(f"    - {line}" for line in choice.refusals)])
        )
    route = choice.route
    if reasons := _unprinted(spec, route, wants):
        raise UnsupportedError("\n".join(["not printed", *(f"    - {line}" for line in reasons)]))
    parts = _WRITERS[route.name](spec)
    returns = "lse float32 [B, S, H], natural log, -inf where nothing was seen"
    if not route.state and route is not FIA_SINKS:
        returns = "None in place of an LSE, which the operator does not report"
    head = _HEAD.format(
        title=route.describe(spec) + ".",
        shapes=_shapes(spec, route),
        returns=returns,
        heads=spec.num_q_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        queries=spec.num_queries,
        scale=spec.scale,
    )
    return head + parts


def _unprinted(spec: DecodeSpec, route: Route, wants: Wants) -> list[str]:
    if route is OWN:
        return ["route own is a kernel of splitkv's, no operator that another engine could call"]
    found = []
    if route is PROMPT and wants.soc is Soc.ATLAS_310P:
        found.append("route prompt on 310P, which takes no length lists: printed for A2 and A3")
    if spec.packed_queries:
        found.append("ragged queries: print it for the same number of queries everywhere")
    if spec.sliding_window is not None and not (spec.layout.paged and route in _WINDOWED):
        found.append(
            f"sliding_window {spec.sliding_window} on route {route.name} over layout "
            f"{spec.layout.value}: windows are printed for pages only"
        )
    if spec.window_block > 1:
        found.append(f"window_block {spec.window_block}: windows are printed for window_block 1")
    if route is FIA_TND and spec.layout in (Layout.BSND, Layout.BNSD):
        found.append(
            f"layout {spec.layout.value} with several queries: layout TND sees a dense cache as "
            "pages of it; print it for pages"
        )
    if spec.anchor_tokens and spec.sliding_window is not None and spec.num_queries > 1:
        found.append("anchors with several queries: print it for one query")
    return found


_WINDOWED = (FIA_ROWS, FIA_TND)


def _shapes(spec: DecodeSpec, route: Route) -> str:
    keys = {
        Layout.NHD: "k [pages, P, K, D] and v [pages, P, K, Dv] with block_table int [B, blocks]",
        Layout.HND: "k [pages, K, P, D] and v [pages, K, P, Dv] with block_table int [B, blocks]",
        Layout.BSND: "k [B, T, K, D] and v [B, T, K, Dv]",
        Layout.BNSD: "k [B, K, T, D] and v [B, K, T, Dv]",
        Layout.PACKED: "k [tokens, K, D] and v [tokens, K, Dv], one request after the other",
    }[spec.layout]
    if route is FIA_MLA:
        keys = (
            f"latent [..., {MLA_LATENT}] and rope [..., {MLA_ROPE}] are pools (or dense caches) of "
            "their own, contiguous, with one kv head"
        )
    return f"q is [B, S, H, D], contiguous;\n{keys}."


_WRITERS: dict[str, Callable[[DecodeSpec], str]] = {
    FIA_ROWS.name: rows,
    FIA_TND.name: tnd,
    FIA_MLA.name: latent,
    FUSION.name: fusion,
    FIA_SINKS.name: lambda spec: packed(spec, hands_sinks=True),
    INCRE.name: incre,
    PAGED_ATTENTION.name: paged_attention,
    PROMPT.name: prompt,
}
