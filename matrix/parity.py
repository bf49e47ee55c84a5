"""Cases times backends: is it the reference's answer, or a refusal in the declared words?"""

import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.backends.cuda import CudaBackend, InterpretedCudaBackend
from splitkv.backends.decode import decode, partial
from splitkv.backends.registry import BACKENDS, backend_named
from splitkv.common.cache import PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import Feature
from splitkv.common.state import PartialState
from splitkv.common.support import UnsupportedError
from splitkv.common.validate import Validate, check_call
from splitkv.matrix.case import Case
from splitkv.matrix.closeness import Errors, bounds, errors
from splitkv.matrix.inputs import Inputs, build
from splitkv.matrix.reference import Answer, reference

SEED = 0


class Outcome(Enum):
    """What became of one case on one backend."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    """with the words of its declaration, which were compared"""
    MISSING = "missing"
    """this machine lacks the device or a library"""


@dataclass(frozen=True, slots=True)
class Result:
    """One case on one backend; ``why`` are the sentences of a failure, a refusal or an absence.

    errors, allowed: how far it was off, and might have been; None where nothing was computed.
    """

    case: str
    outcome: Outcome
    errors: Errors | None = None
    why: tuple[str, ...] = ()
    allowed: Errors | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """Host tensors of one run, requests in the case's order, and the most splits of one request."""

    out: Tensor
    lse: Tensor
    max_splits: int


def backends_for(
    name: str | None = None, *, interpreter: bool = False, standin: bool = False
) -> tuple[Backend, ...]:
    """The backends to measure: all, or the one called ``name``.

    interpreter: the CUDA kernels in Triton's interpreter on the CPU. standin: the Ascend backend on
    an imitation of its operators.
    """
    if standin:
        from splitkv.kernels_ascend.standin import install

        install()
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported
    chosen = BACKENDS if name is None else (backend_named(name),)
    return tuple(
        InterpretedCudaBackend() if interpreter and isinstance(backend, CudaBackend) else backend
        for backend in chosen
    )


def refusals(backend: Backend, case: Case) -> list[str]:
    """Every reason why ``backend`` does not take ``case``, from its declaration."""
    reasons = backend.refusals(case.spec)
    if case.returns_state and (no := backend.support.features[Feature.STATE]) is not None:
        reasons = [*reasons, f"{Feature.STATE.value}: {no}"]
    return reasons


def run_case(
    backend: Backend, case: Case, device: torch.device | str | None = None, seed: int = SEED
) -> Result:
    """Run one case; ``device`` None is the backend's own kind."""
    missing = backend.missing()
    # torch knows the name of an absent vendor's device only with that vendor's library
    device = torch.device("cpu" if missing else device or backend.device_type)
    try:
        if refusals(backend, case):
            return _refused(backend, case, device, seed)
        if missing is not None:
            return Result(case.id, Outcome.MISSING, why=(missing,))
        return _measured(backend, case, device, seed)
    except Exception as fault:  # noqa: BLE001 (whatever it raises the case has failed; others still run)
        return Result(case.id, Outcome.FAILED, why=(_where(fault),))


def run(
    backends: Sequence[Backend],
    cases: Sequence[Case],
    device: torch.device | str | None = None,
    seed: int = SEED,
) -> Iterator[tuple[Backend, Result]]:
    """Every case on every backend, cases in the table's order, backends in the order given."""
    for case in cases:
        for backend in backends:
            yield backend, run_case(backend, case, device, seed)


def _where(fault: Exception) -> str:
    place = traceback.extract_tb(fault.__traceback__)[-1]
    return f"{type(fault).__name__}: {fault} ({Path(place.filename).name}, line {place.lineno})"


def _refused(backend: Backend, case: Case, device: torch.device, seed: int) -> Result:
    """The public call must refuse, and its declaration must say what it says."""
    declared = refusals(backend, case)
    features = backend.support.features
    words = [f"{feature.value}: {no}" for feature in case.features if (no := features[feature])]
    if unsaid := [f"declared, but not a refusal: {line}" for line in words if line not in declared]:
        return Result(case.id, Outcome.FAILED, why=tuple(unsaid))
    inputs = build(case, seed, device)
    return _judged(case, declared, lambda: _public(backend, inputs, case))


def _judged(case: Case, declared: Sequence[str], attempt: Callable[[], object]) -> Result:
    """``attempt`` must be refused with every declared reason on a line of its own."""
    try:
        attempt()
    except UnsupportedError as refusal:
        said = str(refusal).splitlines()
        unsaid = [f"not in the refusal: {x}" for x in declared if f"    - {x}" not in said]
        if not unsaid:
            return Result(case.id, Outcome.REFUSED, why=tuple(declared))
        return Result(case.id, Outcome.FAILED, why=tuple(unsaid))
    return Result(case.id, Outcome.FAILED, why=("declared as refused, but it ran", *declared))


def _public(backend: Backend, inputs: Inputs, case: Case) -> None:
    call = inputs.call
    extras: dict[str, Any] = {
        "cu_seqlens_q": call.cu_seqlens_q,
        "alibi_slopes": call.alibi_slopes,
        "attn_bias": call.attn_bias,
        "attn_mask": call.attn_mask,
        "kv_start": call.kv_start,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "k_zero": call.k_zero,
        "v_zero": call.v_zero,
    }
    if case.returns_state:
        partial(call.q, call.cache, call.spec, backend=backend.name, **extras)
    else:
        decode(call.q, call.cache, call.spec, backend=backend.name, sinks=inputs.sinks, **extras)


def _measured(backend: Backend, case: Case, device: torch.device, seed: int) -> Result:
    inputs = build(case, seed, device)
    if reasons := backend.tensor_refusals(inputs.call, _plan(backend, inputs, case)):
        return _judged(case, reasons, lambda: _compute(backend, inputs, case))
    first = _compute(backend, inputs, case)
    again = _compute(backend, inputs, case)
    moved = case.fixes_splits and backend.batch_invariant
    hidden = build(case, seed, device, poisoned=True, moved=moved)
    elsewhere = _compute(backend, hidden, case)

    host, answer = _expected(case, seed)
    if case.nan is None and torch.isnan(answer.out).any():
        raise AssertionError(f"the reference of {case.id} is NaN")
    found = errors(first.out, first.lse, answer)
    splits = first.max_splits if backend.rounds_partials else 0
    allowed = _bounds(case, seed, splits)
    why = found.exceeds(allowed)
    why += _wrong_types(first, host.call, case)
    if not _same_bits(first, again):
        why.append("a second run gave other bits")
    if not _same_bits(first, elsewhere):
        place = ", or the place in the batch and pool," if moved else ""
        why.append(f"what unused slots hold{place} changes bits")
    outcome = Outcome.FAILED if why else Outcome.PASSED
    return Result(case.id, outcome, found, tuple(why), allowed)


def _compute(backend: Backend, inputs: Inputs, case: Case) -> Computed:
    call = inputs.call
    plan = _plan(backend, inputs, case)
    check_call(call, plan, Validate.FULL)
    if case.returns_state:
        state = (
            backend.partial(call, plan)
            if case.merged_at_block is None
            else _merged(backend, call, case.merged_at_block)
        )
        out, lse = state.out, state.lse
    else:
        out, lse = backend.decode(call, plan, sinks=inputs.sinks)
    order = inputs.order
    queries = [case.queries[index] for index in order]
    return Computed(
        _in_case_order(out.cpu(), order, queries, call),
        _in_case_order(lse.cpu(), order, queries, call),
        0 if plan is None else plan.max_splits,
    )


def _plan(backend: Backend, inputs: Inputs, case: Case) -> SplitPlan | None:
    splits = {"num_splits": case.num_splits, "split_size": case.split_size}
    if case.planned_lens is None:
        return backend.plan_for(inputs.call, **splits)
    lengths = [case.planned_lens[index] for index in inputs.order]
    return backend.plan(case.spec, lengths, **splits)


def _merged(backend: Backend, call: DecodeCall, block: int) -> PartialState:
    """The state of one query per request over pages before ``block``, merged with the rest's."""
    cache = call.cache
    assert isinstance(cache, PagedCache)
    cut = block * cache.page_size
    halves = (
        replace(
            cache, block_table=cache.block_table[:, :block], seq_lens=cache.seq_lens.clamp(max=cut)
        ),
        replace(
            cache,
            block_table=cache.block_table[:, block:],
            seq_lens=(cache.seq_lens - cut).clamp(min=0),
        ),
    )
    calls = [replace(call, cache=half) for half in halves]
    return backend.merge([backend.partial(half, backend.plan_for(half)) for half in calls])


def _in_case_order(
    rows: Tensor, order: tuple[int, ...], queries: list[int], call: DecodeCall
) -> Tensor:
    """Undo the order that requests stood in; packed queries are cut first."""
    parts = list(rows.split(queries)) if call.cu_seqlens_q is not None else list(rows)
    if not parts:
        return rows
    back = [parts[order.index(index)] for index in range(len(order))]
    return torch.cat(back) if call.cu_seqlens_q is not None else torch.stack(back)


@lru_cache(maxsize=2)
def _expected(case: Case, seed: int) -> tuple[Inputs, Answer]:
    inputs = build(case, seed)
    return inputs, reference(inputs.call, inputs.sinks)


@lru_cache(maxsize=2)
def _bounds(case: Case, seed: int, rounded_splits: int) -> Errors:
    inputs, answer = _expected(case, seed)
    return bounds(inputs.call, inputs.sinks, answer, rounded_splits)


def _wrong_types(computed: Computed, call: DecodeCall, case: Case) -> list[str]:
    state = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    wanted = {"out": state if case.returns_state else call.q.dtype, "lse": state}
    got = {"out": computed.out.dtype, "lse": computed.lse.dtype}
    return [
        f"{name} is {got[name]}, not {wanted[name]}" for name in wanted if got[name] != wanted[name]
    ]


def _same_bits(one: Computed, other: Computed) -> bool:
    pairs = ((one.out, other.out), (one.lse, other.lse))
    return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(values: Tensor) -> Tensor:
    """One NaN is like another: which sign it gets is nobody's promise."""
    return values.masked_fill(torch.isnan(values), math.nan).contiguous().view(torch.uint8)
