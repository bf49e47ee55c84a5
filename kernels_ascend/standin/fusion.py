"""npu_fusion_attention: the training operator's forward pass in layout TND, with max and sum in
place of an LSE.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.standin.refusal import StandinGapError, refuse

_NAME = "npu_fusion_attention"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MODELLED = {
    "query", "key", "value", "head_num", "input_layout", "atten_mask", "scale", "actual_seq_qlen",
    "actual_seq_kvlen", "sparse_mode", "softmax_layout",
}  # fmt: skip
_DEFAULTS = {
    "keep_prob": 1.0,
    "pre_tockens": 2147483647,
    "next_tockens": 2147483647,
    "inner_precise": 0,
    "gen_mask_parallel": True,
    "sync": False,
    "seed": 0,
    "offset": 0,
}


def fusion_attention(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Out [T, N, Dv], max and sum [T, N, 8] (with softmax_layout TND), an empty tensor, three
    numbers.
    """
    _check(given)
    query, key, value = given["query"], given["key"], given["value"]
    bounds = [pairwise([0, *given[name]]) for name in ("actual_seq_qlen", "actual_seq_kvlen")]
    outs, tops, totals = [], [], []
    for (first, last), (start, end) in zip(*bounds, strict=True):
        out, top, total = _attend(
            query[first:last],
            key[start:end],
            value[start:end],
            given["scale"],
            given["sparse_mode"],
        )
        outs.append(out)
        tops.append(top)
        totals.append(total)
    out = torch.cat(outs).to(query.dtype)
    stats = (_stats(part, given["softmax_layout"]) for part in (tops, totals))
    return (out, *stats, query.new_empty(0), 0, 0, 0)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mode: int
) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (key, value))
    scores = torch.einsum("snd,tnd->snt", query.float(), keys) * scale
    if mode == 3:
        offset = torch.arange(len(key))[None] - torch.arange(len(query))[:, None]
        hidden = offset > len(key) - len(query)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
    top = scores.amax(-1)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1)
    return torch.einsum("snt,tnd->snd", weights / total[..., None], values), top, total


def _stats(parts: list[Tensor], layout: str) -> Tensor:
    if layout != "TND":  # quirk: fusion-by-head
        rows = [part.T.reshape(-1) for part in parts]
        whole = torch.cat(rows).view(-1, parts[0].shape[1])
    else:
        whole = torch.cat(parts)
    return whole[..., None].repeat(1, 1, 8)  # quirk: fusion-eightfold


def _check(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name not in _MODELLED and value is not None and value != _DEFAULTS.get(name):
            raise StandinGapError(f"{_NAME}: the stand-in does not model {name}={value!r}")
    if given["input_layout"] != "TND":
        raise StandinGapError(f"{_NAME}: the stand-in models layout TND only")
    query, key, value = given["query"], given["key"], given["value"]
    for tensor in (query, key, value):
        if tensor.dtype not in _DTYPES or tensor.dtype != query.dtype or tensor.dim() != 3:
            refuse(_NAME, f"{tensor.dtype} {list(tensor.shape)} is not one of {_DTYPES}, [T, N, D]")
        if not tensor.is_contiguous():  # quirk: contiguous
            refuse(_NAME, f"strides {list(tensor.stride())} are not contiguous")
    dims = (query.shape[-1], key.shape[-1], value.shape[-1])
    if dims[0] != dims[1] or not 1 <= dims[2] <= dims[0] <= 768:
        refuse(_NAME, f"head dims {dims} are not D, D and at most D, up to 768")
    if given["head_num"] != query.shape[1] or query.shape[1] % key.shape[1]:
        refuse(_NAME, f"head_num {given['head_num']} for {query.shape[1]} on {key.shape[1]} heads")
    _check_lengths(given)
    mode, mask = given["sparse_mode"], given["atten_mask"]
    if mode not in (0, 3) or (mode == 0 and mask is not None):
        raise StandinGapError(f"{_NAME}: the stand-in models no mask and sparse_mode 3 only")
    if mode == 3 and (mask is None or tuple(mask.shape) != (2048, 2048)):
        refuse(_NAME, "sparse_mode 3 needs the 2048 x 2048 mask")


def _check_lengths(given: Mapping[str, Any]) -> None:
    lists = {}
    for name, tensor in (("actual_seq_qlen", "query"), ("actual_seq_kvlen", "key")):
        ends, rows = given[name], given[tensor].shape[0]
        if not ends or ends[-1] != rows:  # quirk: fusion-lengths-end-at-T
            refuse(_NAME, f"{name} ends at {ends[-1] if ends else None}, {tensor} has {rows} rows")
        lists[name] = [end - start for start, end in pairwise([0, *ends])]
    if len({len(entries) for entries in lists.values()}) > 1:
        refuse(_NAME, "the length lists differ in length")
    if any(length <= 0 for entries in lists.values() for length in entries):
        raise StandinGapError(f"{_NAME}: the stand-in does not model rows without queries or keys")
