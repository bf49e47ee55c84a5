"""Bugs to plant in the Ascend backend's host code, seen through the stand-in."""

from typing import Any

from torch import Tensor

from mutants import Mutant, Patch, averaged, interleaved, sink_per_split, widen_plans, wider
from splitkv.backends.ascend import AscendBackend
from splitkv.kernels_ascend import attention, pieces
from splitkv.kernels_ascend.fused_infer import Pages
from splitkv.kernels_ascend.launches import Launch


def plain_average(patch: Patch) -> None:
    patch.setattr(attention, "merge", averaged)


def window_one_wider(patch: Patch) -> None:
    widen_plans(patch)
    visible = pieces._visible
    patch.setattr(pieces, "_visible", lambda spec, *rest: visible(wider(spec), *rest))


def next_page(patch: Patch) -> None:
    keywords = Pages.keywords

    def shifted(self: Pages) -> dict[str, Any]:
        found = keywords(self)
        found["block_table"] = (found["block_table"] + 1) % self.k.shape[0]
        return found

    patch.setattr(Pages, "keywords", shifted)


def interleaved_heads(patch: Patch) -> None:
    right = Launch.queries

    def queries(self: Launch, q: Tensor) -> Tensor:
        return interleaved(right(self, q), self.heads.num_kv_heads).contiguous()

    patch.setattr(Launch, "queries", queries)


MUTANTS = (
    Mutant(
        plain_average,
        touched=("splits-2", "anchors"),
        broken=("paged cache (NHD, HND)", "anchor tokens with a window"),
        spared=("layout-bsnd", "sinks"),
        whole=("dense cache (BSND, BNSD)", "learned sinks"),
    ),
    Mutant(
        window_one_wider,
        touched=("window-1", "window-queries", "anchors"),
        broken=("sliding window", "anchor tokens with a window"),
        spared=("sinks", "queries-4"),
        whole=("learned sinks",),
    ),
    Mutant(
        next_page,
        touched=("page-64", "layout-hnd", "sinks", "queries-d128"),
        broken=("paged cache (NHD, HND)", "learned sinks"),
        spared=("layout-bsnd", "queries-d128-packed"),
        whole=("dense cache (BSND, BNSD)", "packed cache (cu_seqlens_k)"),
    ),
    Mutant(
        interleaved_heads,
        touched=("group-3", "sinks", "queries-4"),
        broken=("learned sinks", "several queries per request (S > 1)"),
        spared=("group-1",),
    ),
    Mutant(
        sink_per_split(AscendBackend),
        touched=("sinks", "sinks-queries"),
        broken=("learned sinks",),
        spared=("splits-2", "state"),
        whole=("partial state (max, lse, out) returned",),
    ),
)
