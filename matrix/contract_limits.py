"""Contract: which head dims, page sizes, ratios and head counts are taken, and computed rightly."""

from collections.abc import Callable, Iterable

import torch

from splitkv.matrix.contract import Agrees, Found, check
from splitkv.matrix.contract_calls import (
    BF16,
    absorbed,
    attend,
    call,
    causal,
    latent,
    near,
    request,
    rows,
    tnd,
)


def _sweep(values: Iterable[int], right: Callable[[int], bool], documented: set[int]) -> Found:
    """Try each value: right, wrong without a word, or refused."""
    fine: list[int] = []
    wrong: list[int] = []
    refused: list[int] = []
    for value in values:
        try:
            (fine if right(value) else wrong).append(value)
        except (RuntimeError, NotImplementedError):
            refused.append(value)
    text = f"right: {fine}, refused: {refused}, silently wrong: {wrong}"
    if documented - set(fine):
        return Found(text, Agrees.NO)
    return Found(text, Agrees.NO if wrong else Agrees.YES)


@check(
    "Which head dims does TND take over a 3-D cache?",
    "128 and 192 (docs), any multiple of 16 up to 256 (sources) (4.1)",
)
def head_dims_3d(device: torch.device) -> Found:
    def right(D: int) -> bool:
        one = request(300, D=D)
        return near(tnd([one], device)[0], attend(one)[0])

    return _sweep((64, 96, 128, 192, 256), right, {128, 192})


@check("And over a 4-D cache?", "128 and 192 (docs), 64 too (sources); not 96, 256 (4.1)")
def head_dims_4d(device: torch.device) -> Found:
    def right(D: int) -> bool:
        one = request(300, D=D)
        return near(tnd([one], device, by_head=True)[0], attend(one)[0])

    return _sweep((64, 96, 128, 192, 256), right, {128, 192})


@check(
    "Which page sizes are right with one query per row?",
    "16 to 512 in multiples of 16 (docs); 16 was silently wrong on a 910C (4.1; 9, row 3)",
)
def page_sizes(device: torch.device) -> Found:
    def right(page: int) -> bool:
        one = request(1100)
        return near(tnd([one], device, page=page)[0], attend(one)[0])

    return _sweep((16, 32, 64, 128, 256, 512), right, {128})


@check(
    "Which page sizes are right with several queries per row?",
    "128 to 512 in multiples of 128 (docs), 16 to 1024 (CANN 9.1) (4.1)",
)
def page_sizes_many(device: torch.device) -> Found:
    def right(page: int) -> bool:
        one = request(1100, queries=4)
        return near(tnd([one], device, page=page, **causal(device))[0], attend(one, causal=True)[0])

    return _sweep((16, 64, 128, 256, 512), right, {128})


@check(
    "How many query heads per kv head?",
    "at most 64 (torch docs), unlimited (aclnn, August 2026) (4.1; 10, row 5)",
)
def ratios(device: torch.device) -> Found:
    def right(group: int) -> bool:
        one = request(300, H=group, K=1)
        return near(rows(one, device)[0], attend(one)[0])

    return _sweep((1, 4, 7, 8, 12, 16, 64, 65, 128), right, {1, 4, 7, 8, 12, 16, 64})


@check(
    "How many heads does absorbed MLA take, and with an LSE?",
    "powers of two, 12 refused; an LSE unsupported (docs), in use (vllm-ascend) (4.1; 10, row 1)",
)
def mla_heads(device: torch.device) -> Found:
    return _sweep((8, 12, 16, 32, 64, 128), _latent_heads(device, None), {32, 64, 128})


@check(
    "And over a paged latent cache?",
    "32, 64 and 128 in pages of 16 or 128 (docs of v1), powers of two (docs of v2) (4.1)",
)
def mla_heads_paged(device: torch.device) -> Found:
    return _sweep((8, 12, 16, 32, 64, 128), _latent_heads(device, 128), {32, 64, 128})


def _latent_heads(device: torch.device, page: int | None) -> Callable[[int], bool]:
    def right(H: int) -> bool:
        one = latent(256, H)
        return near(absorbed([one], device, page=page)[0], one.attend()[0])

    return right


@check("Which dtypes of a state does the update take?", "float32, float16, bfloat16 (4.7)")
def update_dtypes(device: torch.device) -> Found:
    taken = []
    for dtype in (torch.float32, torch.float16, BF16):
        lses, outs = [torch.zeros(4)] * 2, [torch.ones(4, 64, dtype=dtype)] * 2
        merged, _ = call("npu_attention_update", device, lses, outs, 1)
        if near(merged, torch.ones(4, 64).double()):
            taken.append(str(dtype).removeprefix("torch."))
    return Found(f"right: {taken}", Agrees.YES if len(taken) == 3 else Agrees.NO)
