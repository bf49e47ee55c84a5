"""One way to hold the decode operator against the function that it stands for."""

from typing import Any

import torch
from torch import Tensor

from splitkv import decode_attention
from splitkv.backends import torch_ops


def assert_operator_agrees(q: Tensor, call: dict[str, Any]) -> None:
    """The operator answers bit for bit as the function does, and its fake kernel knows the shapes.

    call: the function's keywords, k and v among them.
    """
    wanted = decode_attention(q, **call)
    got, _ = torch_ops.decode_attention(q, **call)
    assert isinstance(wanted, Tensor)
    assert torch.equal(got, wanted)
    k, v, rest = call["k"], call["v"], {x: call[x] for x in call if x not in ("k", "v")}
    torch.library.opcheck(
        torch.ops.splitkv.decode_attention.default,
        (q, k, v),
        rest,
        test_utils=("test_schema", "test_faketensor"),
    )
