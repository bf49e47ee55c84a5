"""Adapters with a mistake planted in them: the parity check must find each one.

A mistake changes what reaches the operator or what is made of its answer. The battery of calls
finds nothing wrong with the backend as it is, and something with every mistake.
"""

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from ascend_calls import complaints, make_call
from splitkv.common.state import PartialState, merge_states_torch
from splitkv.kernels_ascend import attention, fused_infer, merge, pieces, standin

Operator = Callable[..., tuple[Tensor, Tensor]]

V2_NAMES = {
    "scale": "softmax_scale",
    "num_heads": "num_query_heads",
    "softmax_lse_flag": "return_softmax_lse",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
}


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    with standin.installed():
        yield


def battery() -> list[str]:
    """Everything that is wrong with a few calls that touch all routes."""
    found = []
    for layout, lengths, fields, arguments in (
        ("NHD", [300, 0, 129], {}, {}),
        ("NHD", [300, 0, 520], {}, {"num_splits": 3}),
        ("NHD", [300, 0, 520], {"sliding_window": 100}, {}),
        ("NHD", [300, 129, 520], {"queries": 3}, {}),
        ("HND", [300, 129, 520], {"queries": 3}, {"num_splits": 2}),
        ("HND", [300, 0], {"D": 96}, {}),
        ("BNSD", [300, 0, 520], {}, {}),
        ("BNSD", [300, 0, 520], {}, {"num_splits": 2}),
        ("packed", [300, 0, 520], {"sliding_window": 100, "queries": 2}, {}),
        ("packed", [300, 0, 520], {"D": 64, "queries": 2}, {}),
    ):
        call = make_call(layout, lengths, **fields)
        try:
            found += complaints(call, **arguments)
        except (RuntimeError, IndexError, ValueError) as fault:
            found.append(str(fault))
    return found


def test_the_backend_as_it_is_passes() -> None:
    assert battery() == []


def _without(*names: str) -> Callable[[Operator], Operator]:
    def plant(operator: Operator) -> Operator:
        return lambda *args, **kwargs: operator(
            *args, **{name: value for name, value in kwargs.items() if name not in names}
        )

    return plant


def _changed(**changes: Callable[[Any], Any]) -> Callable[[Operator], Operator]:
    def plant(operator: Operator) -> Operator:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            for name, change in changes.items():
                if kwargs.get(name) is not None:
                    kwargs[name] = change(kwargs[name])
            return operator(*args, **kwargs)

        return call

    return plant


def _answered(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]):
    def plant(operator: Operator) -> Operator:
        return lambda *args, **kwargs: change(*operator(*args, **kwargs))

    return plant


def _window_by_band(operator: Operator) -> Operator:
    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        mask = fused_infer.compressed_mask(args[0].device)
        band = {"sparse_mode": 4, "pre_tokens": 100, "next_tokens": 0, "atten_mask": mask}
        return operator(*args, **{**kwargs, **band})

    return call


def _switched_kv(operator: Operator) -> Operator:
    return lambda q, k, v, **kwargs: operator(q, v, k, **kwargs)


AT_THE_OPERATOR = {
    "scale left out": _without("scale"),
    "kv head count left out": _without("num_key_value_heads"),
    "head count left out": _without("num_heads"),
    "LSE flag left out": _without("softmax_lse_flag"),
    "layout left out": _without("input_layout"),
    "block size left out": _without("block_size"),
    "lengths left out": _without("actual_seq_lengths_kv"),
    "mask mode left out": _without("sparse_mode"),
    "causal mask left-aligned": _changed(sparse_mode=lambda mode: 2 if mode == 3 else mode),
    "mask for true means visible": _changed(atten_mask=torch.Tensor.logical_not),
    "running sums of key lengths though paged": _changed(
        actual_seq_lengths_kv=lambda lengths: list(accumulate(lengths))
    ),
    "query lengths with a leading zero": _changed(actual_seq_lengths=lambda ends: [0, *ends]),
    "query lengths one by one": _changed(
        actual_seq_lengths=lambda ends: [b - a for a, b in zip([0, *ends], ends, strict=False)]
    ),
    "one key too many": _changed(actual_seq_lengths_kv=lambda lengths: [n + 1 for n in lengths]),
    "one key too few": _changed(
        actual_seq_lengths_kv=lambda lengths: [max(n - 1, 0) for n in lengths]
    ),
    "a neighbour's pages": _changed(block_table=lambda table: table.flip(0).contiguous()),
    "a table of int64": _changed(block_table=torch.Tensor.long),
    "a band one too wide on every row": _window_by_band,
    "k and v switched": _switched_kv,
    "LSE taken for base 2": _answered(lambda out, lse: (out, lse * math.log(2))),
    "LSE flattened by query, not by head": _answered(
        lambda out, lse: (out, lse.reshape(*lse.shape[:-3], lse.shape[-2], lse.shape[-3], 1))
    ),
    "out unnormalised": _answered(lambda out, lse: (out * 2, lse)),
}


@pytest.mark.parametrize("mistake", AT_THE_OPERATOR)
def test_a_mistake_at_the_operator_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu = standin.install()
    for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
        operator = getattr(torch_npu, name)
        operator = _renamed(operator, V2_NAMES) if name.endswith("v2") else operator
        planted = AT_THE_OPERATOR[mistake](operator)
        back = {new: old for old, new in V2_NAMES.items()}
        planted = _renamed(planted, back) if name.endswith("v2") else planted
        monkeypatch.setattr(torch_npu, name, planted)
    assert battery()


def _renamed(operator: Operator, names: dict[str, str]) -> Operator:
    """``operator`` under other keywords: mistakes are planted in v1's words."""
    return lambda *args, **kwargs: operator(
        *args, **{names.get(name, name): value for name, value in kwargs.items()}
    )


def _mean(states: list[PartialState]) -> PartialState:
    out = torch.stack([state.out for state in states]).mean(0)
    return PartialState(states[0].max, states[0].lse, out)


def _finite_lse(states: list[PartialState]) -> PartialState:
    clamped = [
        PartialState(state.max, torch.where(state.lse == -math.inf, 0.0, state.lse), state.out)
        for state in states
    ]
    return merge_states_torch(clamped)


def _no_guard(parts: list[PartialState]) -> PartialState:
    shape = parts[0].lse.shape
    out, lse = standin.install().npu_attention_update(
        [part.lse.reshape(-1) for part in parts],
        [part.out.reshape(-1, part.out.shape[-1]) for part in parts],
        1,
    )
    return PartialState(parts[0].max, lse.view(shape), out.view(*shape, -1))


def _off_by_one(window: int):
    visible = pieces._visible

    def planted(spec: splitkv.DecodeSpec, length: int, queries: Any) -> Any:
        return [(low + (low > 0) * window, high) for low, high in visible(spec, length, queries)]

    return planted


def _not_causal(spec: splitkv.DecodeSpec, length: int, queries: Any) -> Any:
    return [(low, high * 0 + length) for low, high in _VISIBLE(spec, length, queries)]


_VISIBLE = pieces._visible

IN_OUR_CODE = {
    "sentinels taken for states": (attention, "normalise", lambda out, lse: (out.float(), lse)),
    "only infinities normalised": (
        attention,
        "normalise",
        lambda out, lse: (out.float(), torch.where(torch.isinf(lse), -math.inf, lse)),
    ),
    "plain average of the splits": (attention, "merge", _mean),
    "empty splits count as lse 0": (attention, "merge", _finite_lse),
    "NaN for rows nobody saw": (merge, "_fused", _no_guard),
    "window one key too wide": (pieces, "_visible", _off_by_one(-1)),
    "window one key too narrow": (pieces, "_visible", _off_by_one(1)),
    "causality forgotten in cuts": (pieces, "_visible", _not_causal),
}


@pytest.mark.parametrize("mistake", IN_OUR_CODE)
def test_a_mistake_in_our_code_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, planted = IN_OUR_CODE[mistake]
    monkeypatch.setattr(module, name, planted)
    assert battery()
