"""Small calls of the operators and the same in float64 on the host, for the contract's checks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from splitkv.kernels_ascend.fused_infer import compressed_mask
from splitkv.kernels_ascend.runtime import operators

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Request:
    """Host tensors: q [S, H, D], k and v [T, K, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    @property
    def heads(self) -> dict[str, int]:
        return {"num_heads": self.q.shape[1], "num_key_value_heads": self.k.shape[1]}


def request(
    keys: int, *, queries: int = 1, H: int = 8, K: int = 2, D: int = 128, dtype: torch.dtype = BF16
) -> Request:
    """Numbers from a generator of its own, the same on every host."""
    random = torch.Generator().manual_seed(keys + 7 * H + D)
    shapes = ((queries, H, D), (keys, K, D), (keys, K, D))
    return Request(*(torch.randn(shape, generator=random).to(dtype) for shape in shapes))


def attend(
    one: Request,
    *,
    causal: bool = False,
    window: int | None = None,
    hidden: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Out [S, H, D] and lse [S, H] in float64; hidden: bool [S, T]; bias: [H or 1, T], added to the
    scaled scores.
    """
    group = one.q.shape[1] // one.k.shape[1]
    q, k, v = one.q.double(), one.k.double(), one.v.double()
    scores = torch.einsum("shd,thd->sht", q, k.repeat_interleave(group, 1)) * one.scale
    scores = scores if bias is None else scores + bias.double()
    i = torch.arange(len(k) - len(q), len(k))[:, None]
    j = torch.arange(len(k))[None]
    mask = torch.zeros(len(q), len(k), dtype=torch.bool) if hidden is None else hidden
    mask = mask | (j > i) if causal else mask
    mask = mask if window is None else mask | (i - j >= window)
    scores = scores.masked_fill(mask[:, None], -math.inf)
    out = torch.einsum("sht,thd->shd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return out, scores.logsumexp(-1)


@dataclass(frozen=True, slots=True)
class Latent:
    """One query of absorbed MLA, host tensors: q [H, 512], its rope [H, 64], the latent [T, 512]
    (keys and values both) and its rope [T, 64].
    """

    q: Tensor
    q_rope: Tensor
    k: Tensor
    k_rope: Tensor

    scale = 192**-0.5

    def attend(self) -> tuple[Tensor, Tensor]:
        """Out [H, 512] and lse [H] in float64."""
        q = torch.cat([self.q, self.q_rope], -1).double()
        k = torch.cat([self.k, self.k_rope], -1).double()
        scores = q @ k.T * self.scale
        return scores.softmax(-1) @ self.k.double(), scores.logsumexp(-1)


def latent(keys: int, heads: int) -> Latent:
    """Numbers from the generators of ``request``."""
    wide, narrow = (request(keys, H=heads, K=1, D=D) for D in (512, 64))
    return Latent(wide.q[0], narrow.q[0], wide.k[:, 0], narrow.k[:, 0])


def absorbed(
    batch: Sequence[Latent],
    device: torch.device,
    *,
    page: int | None = None,
    version: int = 1,
    layout: str = "BSND",
) -> tuple[Tensor, Tensor]:
    """FIA with rope parts, layout BSND, dense or in pages of ``page``: out and lse as reported."""
    longest = max(len(one.k) for one in batch)
    longest = longest if page is None else -(-longest // page) * page
    q, q_rope = (torch.stack([getattr(one, n) for one in batch])[:, None] for n in ("q", "q_rope"))
    k, k_rope = (
        torch.stack([pad(getattr(one, n), (0, 0, 0, longest - len(one.k))) for one in batch])
        for n in ("k", "k_rope")
    )
    lengths = [len(one.k) for one in batch]
    first = version == 1
    options: dict[str, Any] = {
        "num_heads" if first else "num_query_heads": q.shape[2],
        "num_key_value_heads": 1,
        "scale" if first else "softmax_scale": Latent.scale,
        "softmax_lse_flag" if first else "return_softmax_lse": True,
        "actual_seq_lengths_kv" if first else "actual_seq_kvlen": lengths,
    }
    if page is None:
        k, k_rope = k[:, :, None], k_rope[:, :, None]
    else:
        blocks = longest // page
        k, k_rope = (x.reshape(len(batch) * blocks, page, -1) for x in (k, k_rope))
        table = torch.arange(len(batch) * blocks, dtype=torch.int32).view(len(batch), blocks)
        options |= {"block_table": table, "block_size": page}
    shared = k.contiguous().to(device)  # one tensor: keys and values both
    name = "npu_fused_infer_attention_score" + ("" if first else "_v2")
    ropes = {"query_rope": q_rope, "key_rope": k_rope.contiguous()}
    out, lse = call(name, device, q, shared, shared, input_layout=layout, **ropes, **options)
    return out, lse


def error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference; infinite where the shapes differ."""
    if got.numel() != wanted.numel():
        return math.inf
    return float((got.double().reshape(wanted.shape) - wanted).abs().max())


CLOSE = 0.03
"""For 16-bit outputs of values of size 1: far above rounding, far below a mistake."""


def near(got: Tensor, wanted: Tensor) -> bool:
    return error(got, wanted) < CLOSE  # a NaN is not


def paged(
    requests: Sequence[Request], page: int, *, by_head: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V pools in order and their table: [pages, P, K * D], by head [pages, K, P, D]."""
    counts = [max(-(-len(one.k) // page), 1) for one in requests]
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32)
    pools = []
    for name in ("k", "v"):
        pool = torch.zeros(sum(counts), page, *requests[0].k.shape[1:], dtype=requests[0].k.dtype)
        first = 0
        for row, one in enumerate(requests):
            table[row, : counts[row]] = torch.arange(first, first + counts[row])
            pool[first : first + counts[row]].flatten(0, 1)[: len(one.k)] = getattr(one, name)
            first += counts[row]
        pools.append(pool.transpose(1, 2).contiguous() if by_head else pool.flatten(2))
    return pools[0], pools[1], table


def call(name: str, device: torch.device, *given: Any, **options: Any) -> Any:
    """Call an operator with host tensors, lists of them too, moved to the device and back."""
    moved = {key: _to(value, device) for key, value in options.items()}
    out = getattr(operators(), name)(*(_to(value, device) for value in given), **moved)
    if isinstance(out, Tensor):
        return out.cpu()
    return tuple(part.cpu() if isinstance(part, Tensor) else part for part in out)


def rows(one: Request, device: torch.device, **options: Any) -> tuple[Tensor, Tensor]:
    """FIA v1, layout BSND, one dense request: out [S, H, D], lse as reported."""
    given = {"input_layout": "BSND", "scale": one.scale, "softmax_lse_flag": True, **one.heads}
    tensors = (one.q[None], one.k[None], one.v[None])
    out, lse = call("npu_fused_infer_attention_score", device, *tensors, **given | options)
    return out[0], lse


def tnd(
    requests: Sequence[Request],
    device: torch.device,
    *,
    page: int = 128,
    by_head: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """FIA v2, layout TND, paged: out [T, H, D], lse as reported."""
    k, v, table = paged(requests, page, by_head=by_head)
    one = requests[0]
    counts = torch.tensor([len(each.q) for each in requests]).cumsum(0).tolist()
    given = {
        "input_layout": "TND",
        "softmax_scale": one.scale,
        "return_softmax_lse": True,
        "num_query_heads": one.q.shape[1],
        "num_key_value_heads": one.k.shape[1],
        "actual_seq_qlen": counts,
        "actual_seq_kvlen": [len(each.k) for each in requests],
        "block_table": table,
        "block_size": page,
    }
    q = torch.cat([each.q for each in requests])
    out, lse = call("npu_fused_infer_attention_score_v2", device, q, k, v, **given | options)
    return out, lse


def causal(device: torch.device) -> dict[str, Any]:
    return {"sparse_mode": 3, "atten_mask": compressed_mask(device)}


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_to(entry, device) for entry in value]
    return value.to(device) if isinstance(value, Tensor) else value
