"""The kernel variants that are lowered: every combination that a launch can ask for and that the
compiler could see differently. Shapes other than the constants do not reach it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from own_kernel import OwnKernel
from own_merge import Merge, launched
from splitkv.common.spec import Layout
from splitkv.common.support import dtype_name
from splitkv.kernels_ascend.kernels.budget import Cores
from splitkv.kernels_ascend.kernels.decode import split_launch, split_states
from splitkv.kernels_ascend.kernels.launch import Launch
from splitkv.matrix.case import make
from splitkv.matrix.inputs import build

CORES = Cores(20)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
_EVERYTHING: dict[str, Any] = {
    "sliding_window": 100,
    "anchor_tokens": 4,
    "logits_soft_cap": 20.0,
    "alibi": True,
    "attn_bias": True,
    "columns": 8,
}
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100, "anchor_tokens": 4},
    "soft-cap": {"logits_soft_cap": 20.0},
    "alibi": {"alibi": True},
    "bias": {"attn_bias": True, "columns": 8},
    "tree": {"attn_mask": True, "columns": 4, "num_queries": 4},
    "all": _EVERYTHING,
    "all-tree": _EVERYTHING | {"attn_mask": True, "num_queries": 8},
}


@dataclass(frozen=True)
class Variant:
    """A launch whose kernel and constants are to be lowered."""

    id: str
    launch: Launch


def merge_variants() -> Iterator[Variant]:
    """Dv of every padding in every dtype, with its largest tile and with that of few rows."""
    dtypes = ((FP32, FP32), (FP32, FP16), (FP32, BF16), (FP16, FP16), (BF16, BF16))
    for dim, (stored, dtype) in product((1, 16, 64, 80, 128, 192, 256, 512), dtypes):
        launches = [
            launched(Merge("variant", (2,), rows, dim, stored=stored, dtype=dtype), CORES)[0]
            for rows in (8, 5000)
        ]
        for tile, launch in {one.arguments["BLOCK_ROWS"]: one for one in launches}.items():
            yield Variant(
                f"merge-d{dim}-rows{tile}-{dtype_name(stored)}-{dtype_name(dtype)}", launch
            )


def split_variants() -> Iterator[Variant]:
    """Masks alone and together over pages and dense caches, every head dim, rows of both sizes."""
    places: dict[str, dict[str, Any]] = {
        "page-128": {"page_size": 128},
        "page-16": {"page_size": 16},
        "page-20": {"page_size": 20},
        "dense": {"layout": Layout.BSND},
    }
    for (place, lies), (masks, semantics), dim, dtype in product(
        places.items(), MASKS.items(), (64, 128, 256), (FP16, BF16)
    ):
        other_code = dtype is BF16 and place in ("page-128", "dense")
        if masks not in ("plain", "all-tree") and not other_code:
            continue  # the tile or the dtype differs, the code does not
        yield _split(
            f"split-{place}-{masks}-d{dim}-{dtype_name(dtype)}",
            dtype=dtype,
            head_dim=dim,
            **lies,
            **semantics,
        )
    for dim, dim_v in ((128, 64), (64, 256)):
        yield _split(
            f"split-page-128-all-tree-d{dim}-{dim_v}-bfloat16",
            head_dim=dim,
            head_dim_v=dim_v,
            **MASKS["all-tree"],
        )


def _split(name: str, **settings: Any) -> Variant:
    call = build(make("variant", "a variant", (3,), **settings), seed=0).call
    plan = OwnKernel().plan_for(call)
    assert plan is not None
    return Variant(name, split_launch(call, plan, split_states(call, plan), CORES))
