"""Flags that describe a layer's decode attention, and the ``DecodeSpec`` they make."""

import argparse
from dataclasses import fields
from enum import Enum

import torch

from splitkv.common.spec import (
    FLOAT_DTYPES,
    INT4,
    QUANTISED_DTYPES,
    DecodeSpec,
    Layout,
    ScaleKind,
)
from splitkv.common.support import dtype_name

DTYPES = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES + QUANTISED_DTYPES}
KV_DTYPES = DTYPES | {"int4": INT4}
SCALE_KINDS = {kind.name.lower(): kind for kind in ScaleKind}
DEFAULT_PAGE_SIZE = 16


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of ``DecodeSpec``."""
    group = parser.add_argument_group("the layer")
    add = group.add_argument
    add("--heads", default="32:8", metavar="H:K", help="query heads and kv heads (default 32:8)")
    add("--head-dim", type=int, default=128, metavar="D", help="of q and k (default 128)")
    add("--head-dim-v", type=int, metavar="DV", help="of v (default: D)")
    add(
        "--layout", default="NHD", choices=[layout.value for layout in Layout], help="(default NHD)"
    )
    add(
        "--page-size",
        type=int,
        metavar="P",
        help=f"tokens of a page (default {DEFAULT_PAGE_SIZE} for NHD and HND)",
    )
    add("--dtype", default="bfloat16", choices=list(DTYPES), help="of q (default bfloat16)")
    add(
        "--kv-dtype",
        choices=list(KV_DTYPES),
        help="of the cache (default: q's); int4: two codes a byte of torch.uint8",
    )
    add("--queries", type=int, default=1, metavar="S", help="queries per request (default 1)")
    add("--packed-queries", action="store_true", help="ragged queries, at most S per request")
    add("--non-causal", action="store_true", help="no causal mask among the S queries")
    add("--sm-scale", type=float, help="of the scores (default D ** -0.5)")
    add("--window", type=int, metavar="W", help="sliding window, own position included")
    add("--window-block", type=int, default=1, metavar="B", help="it begins at a block of B")
    add("--anchors", type=int, default=0, metavar="A", help="first positions, always visible")
    add("--kv-start", action="store_true", help="each request with a first visible position")
    add("--soft-cap", type=float, help="logit soft cap")
    add("--alibi", action="store_true", help="with ALiBi slopes")
    add("--bias", action="store_true", help="with an additive bias")
    add("--mask", action="store_true", help="with a boolean mask")
    add("--sinks", action="store_true", help="with learned sinks")
    for name in ("k", "v"):
        add(f"--{name}-scale", choices=list(SCALE_KINDS), help=f"scales of a quantised {name}")
        add(f"--{name}-zero", action="store_true", help=f"zero points beside the scales of {name}")


def spec_from(args: argparse.Namespace) -> DecodeSpec:
    """The spec that the flags describe.

    Raises:
        ValueError: the flags contradict one another; the text names field, value and limit.
    """
    heads, kv_heads = _heads(args.heads)
    layout = Layout(args.layout)
    page_size = args.page_size
    if page_size is None and layout.paged:
        page_size = DEFAULT_PAGE_SIZE
    return DecodeSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim if args.head_dim_v is None else args.head_dim_v,
        layout=layout,
        dtype=DTYPES[args.dtype],
        kv_dtype=KV_DTYPES[args.kv_dtype or args.dtype],
        page_size=page_size,
        num_queries=args.queries,
        packed_queries=args.packed_queries,
        causal=not args.non_causal,
        sm_scale=args.sm_scale,
        sliding_window=args.window,
        window_block=args.window_block,
        anchor_tokens=args.anchors,
        kv_start=args.kv_start,
        logits_soft_cap=args.soft_cap,
        alibi=args.alibi,
        attn_bias=args.bias,
        attn_mask=args.mask,
        sinks=args.sinks,
        k_scale=SCALE_KINDS[args.k_scale] if args.k_scale else None,
        v_scale=SCALE_KINDS[args.v_scale] if args.v_scale else None,
        k_zero=args.k_zero,
        v_zero=args.v_zero,
    )


def spec_json(spec: DecodeSpec) -> dict[str, object]:
    """The spec's fields as JSON has them: names of enum members and dtypes."""
    return {
        entry.name: _plain(getattr(spec, entry.name)) for entry in fields(spec) if entry.compare
    }


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value.name if isinstance(value, Enum) else value


def _heads(text: str) -> tuple[int, int]:
    heads, _, kv_heads = text.partition(":")
    if not (heads.isdecimal() and kv_heads.isdecimal()):
        raise ValueError(f"--heads must be H:K, as in 32:8, got {text!r}")
    return int(heads), int(kv_heads)
