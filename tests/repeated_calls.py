"""Whole decodes that a plan repeats, seen with no GPU; run by ``test_cuda_repeated``.

Prints JSON: pairs of decodes the second of which starts or returns what it would not alone, how
many were repeated, and what was said of calls that a check refuses, after one that it lets pass.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch

import splitkv
from splitkv.backends import repeated
from splitkv.backends.cuda import CudaBackend
from splitkv.common.cache import PagedCache
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import H200
from splitkv.kernels_cuda import bound
from tests.bound_calls import BATCH, KINDS, PLAIN, Asked, Device, new, pretended, without

_LEFT_OUT = ("out of float32", "state", "half", "sinks of bfloat16", "scaled alike")
_EVERY_TIME = ("plain", "q off", "k padded", "v off", "int64 table", "k is v", "lse off")
_NAMES = ("cu_seqlens_q", "alibi_slopes", "attn_bias", "attn_mask", "k_scale", "v_scale")


def decoded(asked: Asked, plan: SplitPlan, *, flat: bool, given: bool) -> Any:
    """flat: as [B, H, D]. given: into the call's destination."""
    call = asked.call
    q, out, lse = call.q, asked.destination.out, asked.destination.lse
    if flat:
        q, out, lse = q[:, 0], out[:, 0], lse[:, 0]
    more: dict[str, Any] = {name: getattr(call, name) for name in _NAMES}
    if given:
        more |= {"out": out, "lse": lse}
    return splitkv.decode(
        q, call.cache, call.spec, plan=plan, validate="shapes", sinks=asked.sinks, **more
    )


@contextmanager
def counted() -> Iterator[list[object]]:
    """The decodes that were repeated."""
    start = bound.RepeatedDecode.__call__
    answers: list[object] = []

    def noted(kept: bound.RepeatedDecode, *arguments: Any) -> Any:
        answer = start(kept, *arguments)
        if answer is not None:
            answers.append(answer)
        return answer

    with patch.object(bound.RepeatedDecode, "__call__", noted):
        yield answers


def seen(device: Device, asked: Asked, plan: SplitPlan, **how: bool) -> list[object]:
    """What a decode starts and returns, but for where what it makes lies."""
    device.log.clear()
    results = decoded(asked, plan, **how)
    plain = [[str(value) for value in _placed(entry, asked)] for entry in device.log]
    return [plain, [(x.shape, x.stride(), x.dtype) for x in results]]


def _placed(entry: Any, asked: Asked) -> list[object]:
    """Places of new tensors in the order in which they are met."""
    tensors = bound.tensors_of(asked.call, asked.destination, asked.sinks)
    old = {tensor.data_ptr() for tensor in tensors if tensor is not None}
    met: dict[int, str] = {}
    return [
        met.setdefault(value, f"new {len(met)}")
        if isinstance(value, int) and value >= 2**32 and value not in old
        else value
        for value in entry
    ]


def wrong_pairs(device: Device, kinds: tuple[str, ...]) -> tuple[list[object], int]:
    first, second = ({name: KINDS[name]() for name in kinds} for _ in range(2))
    hows = ({"flat": True, "given": False}, {"flat": False, "given": True})
    wrong, count = [], 0
    for before, earlier in first.items():
        for how in hows:
            if how["flat"] and earlier.call.spec.packed_queries:
                continue
            plan = _plan(earlier)
            decoded(earlier, plan, **how)
            kept = dict(plan.bound)
            for name in {before, *_EVERY_TIME}:
                later = second[name]
                if later.call.spec.plan_key != earlier.call.spec.plan_key:
                    continue
                with counted() as answers:
                    found = seen(device, later, plan, **how)
                count += len(answers)
                plan.bound.clear()
                if found != seen(device, later, plan, **how):
                    wrong.append([before, name, how])
                plan.bound.update(kept)
    return wrong, count


def _plan(asked: Asked) -> SplitPlan:
    return plan_splits(asked.call.spec, [128] * BATCH, profile=H200, num_splits=2)


def held_places() -> list[int]:
    """Where the results of one call, made again and again, lie while all are held."""
    asked = KINDS["plain"]()
    plan = _plan(asked)
    with counted() as answers:
        held = [decoded(asked, plan, flat=True, given=False) for _ in range(4)]
    assert len(answers) == 3
    return [tensor.data_ptr() for results in held for tensor in results]


def refused() -> dict[str, str]:
    """By what is wrong: what is said, after the plan has served a call without the mistake."""
    q, pages = new(BATCH, 4, 16), KINDS["plain"]().call.cache
    assert isinstance(pages, PagedCache)
    plan = plan_splits(PLAIN, [128] * BATCH, profile=H200, num_splits=2)
    memory = torch.empty(BATCH * 4 * 16, dtype=torch.bfloat16)
    apart = {"out": new(BATCH, 4, 16), "lse": torch.empty(BATCH, 4)}
    meeting = {
        "out": memory.view(BATCH, 4, 16),
        "lse": memory.view(torch.float32)[8 : 8 + BATCH * 4].view(BATCH, 4),
    }

    def call(q: Any = q, spec: Any = PLAIN, **more: Any) -> object:
        return splitkv.decode(q, pages, spec, **{"plan": plan, "validate": "shapes"} | more)

    def right() -> None:
        call()
        call(**apart)

    calls: dict[str, Callable[[], object]] = {
        "nothing": right,
        "shape of q": lambda: call(q[:1]),
        "dtype of q": lambda: call(q.half()),
        "sinks": lambda: call(sinks=torch.ones(4)),
        "shape of out": lambda: call(out=new(BATCH, 4, 8)),
        "expanded out": lambda: call(out=new(BATCH, 4, 1).expand(-1, -1, 16)),
        "out of grad": lambda: call(out=new(BATCH, 4, 16).requires_grad_()),
        "out meets lse": lambda: call(**meeting),
        "grad": lambda: call(q.detach().requires_grad_()),
        "spec": lambda: call(spec=replace(PLAIN, sliding_window=9)),
        "validate": lambda: call(validate="some"),
        "list for validate": lambda: call(validate=[]),
        "backend": lambda: call(backend="none such"),
        "values": lambda: call(validate="full"),
        "two ways to split": lambda: call(num_splits=2),
        "no tensor": lambda: call(None),
        "no plan": lambda: call(plan=7),
    }
    said = {}
    for name, mistaken in calls.items():
        right()
        if name == "values":
            pages.block_table[0, 0] = 99
        try:
            mistaken()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)
        pages.block_table[0, 0] = 1
    return said


def forgetful(forget: Callable[[Any], tuple[object, ...]]) -> Any:
    """``request`` without some of the facts."""
    whole = repeated.request

    def fewer(*arguments: Any) -> Any:
        found = whole(*arguments)
        return found and (forget(found[0]), found[1])

    return patch("splitkv.backends.decode.request", fewer)


def _chosen(spec: object, device: object, backend: str | None) -> CudaBackend:
    if backend is not None:
        raise ValueError(f"unknown backend {backend!r}")
    return CudaBackend()


def main() -> None:
    device = Device()
    every = tuple(name for name in KINDS if name not in _LEFT_OUT)
    with (
        pretended(device),
        patch.object(repeated, "_there", attrgetter("is_cpu")),
        patch.object(bound, "can_start", lambda where: True),
        patch.object(bound, "_free", lambda index: True),
        patch("splitkv.backends.decode.select", _chosen),
    ):
        wrong, count = wrong_pairs(device, every)
        found = {"wrong": wrong, "repeated": count, "refused": refused(), "held": held_places()}
        with forgetful(without(lambda fact: type(fact) is tuple)):
            found["without strides"] = wrong_pairs(device, _EVERY_TIME)[0]
        with forgetful(without(lambda fact: type(fact) is int)):
            found["without alignments"] = wrong_pairs(device, _EVERY_TIME)[0]
        with forgetful(lambda key: key[:6] + key[7:]):
            found["without whether k is v"] = wrong_pairs(device, _EVERY_TIME)[0]
        with forgetful(without(lambda fact: type(fact) is bool)):
            found["without grad"] = refused()["grad"]
        with patch.object(bound, "_reach", lambda tensor: 0):
            found["without reach"] = refused()["out meets lse"]
        with patch.object(
            torch,
            "empty_like",
            cache(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype)),
        ):
            found["held without new memory"] = held_places()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
