"""Small requests that launch every kernel of the CUDA backend, each compared with a reference.

A case runs as ``splitkv parity`` runs it: on the device's plan, twice with the same bits, once more
with poison in every slot that no query may see, against float64 attention on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import splitkv
from splitkv.backends.base import Backend
from splitkv.backends.cascade.calls import attend, queries_per_read
from splitkv.backends.cascade.plan import plan_groups
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.spec import Layout, ScaleKind
from splitkv.common.state import PartialState, finish, merge_states_torch
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.closeness import bounds, errors
from splitkv.matrix.inputs import build
from splitkv.matrix.parity import SEED, Outcome, run_case
from splitkv.matrix.reference import reference

FEW = (260, 1, 0, 77)
"""Tokens of each request: several tiles and pages, one token, nothing, a ragged rest."""
TWO = (150, 33)

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
HEAD, TOKEN = ScaleKind.HEAD, ScaleKind.TOKEN
MLA = {
    "num_kv_heads": 1,
    "head_dim": 576,
    "head_dim_v": 512,
    "page_size": 64,
    "memory": Memory.LATENT,
}

CASES: tuple[Case, ...] = (
    make("contiguous", "dense, D 64", FEW, layout=Layout.BSND),
    make("packed", "packed, D 128", FEW, layout=Layout.PACKED, head_dim=128, num_splits=2),
    make("paged-16", "splits and merge", FEW, page_size=16, head_dim=128, num_splits=3),
    make("paged-128", "automatic splits", FEW, page_size=128, head_dim=128),
    make("planned-on-host", "a host's plan", TWO, page_size=16, planned_lens=(160, 64)),
    make("split-size", "splits of 64 tokens", TWO, page_size=16, split_size=64, dtype=torch.half),
    make("wide", "D 256", TWO, page_size=16, head_dim=256, num_splits=2),
    make("float32", "no tensor cores", TWO, page_size=16, dtype=torch.float32, num_splits=2),
    make("group-1", "a kv head for each query head", TWO, num_q_heads=2, page_size=16),
    make("queries", "ragged queries", (70, 9, 150), query_lens=(1, 4, 2), page_size=16),
    make(
        "window",
        "window and anchors, two queries",
        TWO,
        sliding_window=40,
        anchor_tokens=4,
        num_queries=2,
        page_size=16,
        num_splits=2,
    ),
    make("tree", "a mask of 6 drafts", TWO, attn_mask=True, columns=6, num_queries=6, page_size=16),
    make(
        "scores",
        "bias, ALiBi, soft cap and sinks",
        TWO,
        attn_bias=True,
        columns=90,
        alibi=True,
        logits_soft_cap=20.0,
        sinks=True,
        num_splits=2,
        page_size=16,
    ),
    make("starts", "first positions", TWO, kv_start=True, num_splits=3, page_size=16),
    make("int8", "codes, a scale for each head", TWO, kv_dtype=INT8, scales=HEAD, num_splits=2),
    make("e4m3", "codes, a scale for each token", TWO, kv_dtype=E4M3, scales=TOKEN, head_dim=128),
    make("mla-16", "the kernel for any device", (150, 0, 33), num_q_heads=16, num_splits=2, **MLA),
    make("mla-128", "Hopper's where that is", (150, 0, 33), num_q_heads=128, num_splits=2, **MLA),
)
"""One of each kind that has a variant of a kernel."""


Probe = Callable[[Backend, torch.device], list[str]]
"""What is wrong, in sentences."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the grid. wrong: sentences by probe; kernels: names by probe."""

    wrong: dict[str, list[str]]
    kernels: dict[str, list[str]]


def run(backend: Backend, device: torch.device, names: list[str] | None = None) -> Outcomes:
    """All probes, or those named."""
    outcomes = Outcomes({}, {})
    for name, probe in PROBES.items():
        if names is None or name in names:
            with launched() as kernels:
                outcomes.wrong[name] = probe(backend, device)
            outcomes.kernels[name] = sorted(kernels)
    return outcomes


@contextmanager
def launched() -> Iterator[set[str]]:
    """Names of the kernels that are launched meanwhile."""
    from splitkv.kernels_cuda.launch import Launch

    names: set[str] = set()
    launch = Launch.run

    def noted(self: Launch, device: torch.device) -> object:
        if self.programs:
            names.add(str(self.kernel.fn.__name__))
        return launch(self, device)

    Launch.run = noted
    try:
        yield names
    finally:
        Launch.run = launch


def _case(case: Case) -> Probe:
    def probe(backend: Backend, device: torch.device) -> list[str]:
        result = run_case(backend, case, device)
        if result.outcome is Outcome.PASSED:
            return []
        return [result.outcome.value, *result.why]

    return probe


def refreshed(backend: Backend, device: torch.device) -> list[str]:
    """One host plan of fixed capacity, refreshed, and the device's planner, as requests grow."""
    case = make("refreshed", "grows", (128, 96), page_size=16, num_q_heads=4)
    call = build(case, SEED, device).call
    plan = backend.plan(call.spec, [128, 96], num_splits=4, capacity=16)
    wrong = []
    for lengths in ([16, 95], [100, 0], [128, 96]):
        plan.refresh(lengths)
        call.cache.seq_lens.copy_(torch.tensor(lengths))
        for one in (plan, backend.plan_for(call, num_splits=4)):
            out, lse = backend.decode(call, one)
            wrong += _unlike(call, out, lse)
    return wrong


def appended(backend: Backend, device: torch.device) -> list[str]:
    """Rows written by ``append_kv`` are the rows that are read back, and no others."""
    case = make("appended", "one page more", (33, 20), page_size=16)
    cache = build(case, SEED, device).call.cache
    assert isinstance(cache, PagedCache)
    k, v = (torch.randn(2, 3, 2, 64, device=device).bfloat16() for _ in range(2))
    before = cache.k.clone()
    splitkv.append_kv(cache, k, v)
    at = cache.seq_lens[:, None] - 3 + torch.arange(3, device=device)
    pages = torch.gather(cache.block_table, 1, at // 16).long()
    wrong = []
    for name, pool, rows in (("k", cache.k, k), ("v", cache.v, v)):
        if not torch.equal(pool[pages, at % 16], rows):
            wrong.append(f"{name} holds other rows than were appended")
    cache.k[pages, at % 16] = before[pages, at % 16]
    if not torch.equal(cache.k.view(torch.int16), before.view(torch.int16)):
        wrong.append("a row was written that was not appended to")
    return wrong


def merged(backend: Backend, device: torch.device) -> list[str]:
    """Nine states, one of them empty."""
    states = []
    for _ in range(8):
        lse = torch.randn(3, 4, device=device)
        states.append(PartialState(lse, lse.clone(), torch.randn(3, 4, 64, device=device)))
    states.append(PartialState.empty((3, 4), 64, device=device))
    found = backend.merge(states)
    on_host = [PartialState(s.max.cpu(), s.lse.cpu(), s.out.cpu()) for s in states]
    wanted = merge_states_torch(on_host)
    near = torch.allclose(found.out.cpu(), wanted.out, atol=1e-5)
    return [] if near and torch.allclose(found.lse.cpu(), wanted.lse) else ["merged otherwise"]


def cascade(backend: Backend, device: torch.device) -> list[str]:
    """Three requests that share two pages, read once."""
    case = make("cascade", "three of them", (37, 40, 33), page_size=16, num_queries=2)
    call = build(case, SEED, device).call
    cache = call.cache
    assert isinstance(cache, PagedCache)
    cache.block_table[1:, :2] = cache.block_table[0, :2]
    plan = plan_groups(
        call.spec,
        cache.block_table.cpu().numpy(),
        cache.seq_lens.cpu().numpy(),
        profile=backend.profile(),
        queries_per_read=queries_per_read(backend, call.spec),
        always=True,
    )
    if len(plan.groups) != 1:
        return [f"{len(plan.groups)} groups planned, not 1"]
    state = attend(backend, call, plan, plan.seq_lens)
    return _unlike(call, *finish(state, dtype=call.q.dtype))


PROBES: dict[str, Probe] = {case.id: _case(case) for case in CASES} | {
    probe.__name__: probe for probe in (refreshed, appended, merged, cascade)
}


def _unlike(call: DecodeCall, out: Tensor, lse: Tensor) -> list[str]:
    """Where an answer is not float64 attention's, computed on the CPU."""
    cache = call.cache
    assert isinstance(cache, PagedCache)
    host = replace(
        call,
        q=call.q.cpu(),
        cache=PagedCache(
            cache.k.cpu(), cache.v.cpu(), cache.block_table.cpu(), cache.seq_lens.cpu()
        ),
    )
    answer = reference(host)
    return errors(out.cpu(), lse.cpu(), answer).exceeds(bounds(host, None, answer))
