"""Calls of the real torch_npu's operators on tensors without numbers, and what comes back."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any
from unittest.mock import patch

import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils import _pytree as pytree


class Seen(Enum):
    """How far the real library looked at a call."""

    SHAPES = "bound to the schema, results from the meta function"
    NAMES = "bound to the schema; no meta function"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors without numbers; what is made of host numbers becomes one too."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = torch.from_numpy  # not an operator, so that no mode sees it
    made = patch.object(torch, "from_numpy", lambda array: mode.from_tensor(real(array)))
    with made, mode:
        yield


def operator_of(name: str) -> Any:
    """The overload ``npu::x`` or ``npu::x.out``; ATB's operators are ``npu::`` here too."""
    bare, _, overload = name.removeprefix("npu::").partition(".")
    packet = getattr(torch.ops.npu if hasattr(torch.ops.npu, bare) else torch.ops.atb, bare)
    return getattr(packet, overload or "default")


def has_meta(name: str) -> bool:
    """Whether the library says what shapes come back."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator_of(name).name(), "Meta"))


def attempt(name: str, arguments: Mapping[str, Any]) -> tuple[Seen, list[dict[str, Any]]]:
    """Call the operator with recorded ``arguments``; the results as they are recorded.

    Raises:
        whatever torch or the meta function raises at a call that it does not take.
    """
    with FakeTensorMode():
        bare, _, overload = name.removeprefix("npu::").partition(".")
        function = getattr(torch_npu, bare)
        function = getattr(function, overload) if overload else function
        given = {key: _fake(value) for key, value in arguments.items()}
        if has_meta(name):
            return Seen.SHAPES, [_plain(leaf) for leaf in pytree.tree_leaves(function(**given))]
        with contextlib.suppress(UnsupportedOperatorException):  # said after binding, if at all
            function(**given)
        return Seen.NAMES, []


def _fake(value: Any) -> Any:
    if isinstance(value, list):
        return [_fake(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    return torch.empty_strided(
        value["shape"],
        value["stride"],
        dtype=getattr(torch, value["dtype"]),
        device=value["device"],
    )


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
