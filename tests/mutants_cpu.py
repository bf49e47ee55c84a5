"""Bugs to plant in the CPU backend."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutants import Mutant, Patch, averaged, interleaved, sink_per_split, widen_plans, wider
from splitkv.backends import cpu, cpu_attention, cpu_scores, cpu_work
from splitkv.backends.cpu import CpuBackend
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState


def plain_average(patch: Patch) -> None:
    patch.setattr(cpu_attention, "merge_states_torch", averaged)


def window_one_wider(patch: Patch) -> None:
    widen_plans(patch)
    bounds = cpu_work.visible_bounds
    patch.setattr(cpu_work, "visible_bounds", lambda x, s, spec: bounds(x, s, wider(spec)))
    mask = cpu_scores.visible_mask
    patch.setattr(cpu_scores, "visible_mask", lambda q, k, spec: mask(q, k, wider(spec)))


def window_of_tokens(patch: Patch) -> None:
    def tokens(spec: DecodeSpec) -> DecodeSpec:
        return replace(spec, window_block=1)

    bounds, start, mask = (
        cpu_work.visible_bounds,
        cpu_work.window_start,
        cpu_scores.visible_mask,
    )
    patch.setattr(cpu_work, "visible_bounds", lambda x, s, spec: bounds(x, s, tokens(spec)))
    for module in (cpu_work, cpu_scores):
        patch.setattr(module, "window_start", lambda x, spec: start(x, tokens(spec)))
    patch.setattr(cpu_scores, "visible_mask", lambda q, k, spec: mask(q, k, tokens(spec)))


def _changed_calls(change: Callable[[DecodeCall], DecodeCall]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.setattr(cpu, "attend", lambda call, plan: cpu_attention.attend(change(call), plan))

    plant.__name__ = change.__name__
    return plant


def next_page(call: DecodeCall) -> DecodeCall:
    if not isinstance(call.cache, PagedCache):
        return call
    table = (call.cache.block_table + 1) % call.cache.num_pages
    return replace(call, cache=replace(call.cache, block_table=table))


def interleaved_heads(call: DecodeCall) -> DecodeCall:
    return replace(call, q=interleaved(call.q, call.spec.num_kv_heads))


def unseen_times_zero(patch: Patch) -> None:
    for name in ("_clear_unseen", "_keep_apart"):
        patch.setattr(cpu_attention, name, lambda *_: None)


def noise(patch: Patch) -> None:
    right, turn = CpuBackend.partial, itertools.count()

    def partial(self: CpuBackend, *args: Any) -> PartialState:
        state = right(self, *args)  # every other one: by chance, two runs could agree
        return replace(state, out=state.out * (1 + 1e-6 * (next(turn) % 2)))

    patch.setattr(CpuBackend, "partial", partial)


MUTANTS = (
    Mutant(
        plain_average,
        touched=("splits-many-fp32", "sinks-fp32", "anchors"),
        broken=("learned sinks", "anchor tokens with a window"),
        spared=("soft-cap", "layout-bsnd"),
        whole=("logit soft cap", "dense cache (BSND, BNSD)"),
    ),
    Mutant(
        window_one_wider,
        touched=("window-1", "window-fp32", "window-queries", "anchors-fp32"),
        broken=("sliding window", "anchor tokens with a window"),
        spared=("soft-cap", "sinks", "alibi"),
        whole=("logit soft cap", "learned sinks", "ALiBi slopes"),
    ),
    Mutant(
        window_of_tokens,
        touched=("chunks", "blocks-fp32"),
        broken=("window that begins at blocks (chunked attention)",),
        spared=("window-128", "anchors"),
        whole=("anchor tokens with a window",),
    ),
    Mutant(
        _changed_calls(next_page),
        touched=("page-16", "layout-hnd", "sinks"),
        broken=("paged cache (NHD, HND)", "learned sinks"),
        spared=("layout-bsnd", "layout-packed"),
        whole=("dense cache (BSND, BNSD)", "packed cache (cu_seqlens_k)"),
    ),
    Mutant(
        _changed_calls(interleaved_heads),
        touched=("group-3", "sinks", "queries-4"),
        broken=("learned sinks", "several queries per request (S > 1)"),
        spared=("group-1",),
    ),
    Mutant(
        sink_per_split(CpuBackend),
        touched=("sinks-fp32", "sinks-queries"),
        broken=("learned sinks",),
        spared=("splits-many-fp32", "state-fp32"),
        whole=("partial state (max, lse, out) returned",),
    ),
    Mutant(
        unseen_times_zero,
        touched=("mask-one", "layout-bsnd"),
        broken=("boolean mask (trees)", "dense cache (BSND, BNSD)"),
        spared=("lengths-zero",),
    ),
    Mutant(
        noise,
        touched=("soft-cap-tight", "state-fp32"),
        broken=("logit soft cap", "partial state (max, lse, out) returned"),
        spared=("lengths-zero",),
    ),
)
