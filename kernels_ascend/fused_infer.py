"""Calls of npu_fused_infer_attention_score, v1 and v2: the only file that spells their keywords.

Single queries go to v1 in layout BSND or BNSD, the calls with the widest documentation. Several
queries per row go to v2 in layout TND: its documentation has grouped heads there, v1's has not.
Every call passes scale, both head counts and the LSE flag, whose defaults (1.0, 1, 0, off) are
never what is meant. Lengths are host integers. Results come back as out [rows, H, Dv] in the
query's dtype and lse float32 [rows, H].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from splitkv.kernels_ascend.runtime import operators

COMPRESSED_MASK_SIDE = 2048


@dataclass(frozen=True, slots=True)
class Heads:
    """Head counts of one call and its softmax scale."""

    num_q_heads: int
    num_kv_heads: int
    scale: float

    def keywords(self) -> dict[str, Any]:
        """As v1 spells them."""
        return {
            "num_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "scale": self.scale,
            "softmax_lse_flag": True,
        }

    def keywords_v2(self) -> dict[str, Any]:
        return {
            "num_query_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "softmax_scale": self.scale,
            "return_softmax_lse": True,
        }


@dataclass(frozen=True, slots=True)
class Pages:
    """A page pool in the operator's form, [blocks, P, K * D] or [blocks, K, P, D], and a row's
    blocks, int32 [rows, blocks].
    """

    k: Tensor
    v: Tensor
    table: Tensor
    page_size: int

    def keywords(self) -> dict[str, Any]:
        """As every operator that takes pages spells them, but ATB's."""
        return {"block_table": self.table, "block_size": self.page_size}


@dataclass(frozen=True, slots=True, eq=False)
class FusedCall:
    """One call of FIA, ready to be made: eagerly, or into buffers of the caller's."""

    operator: str
    tensors: tuple[Tensor, Tensor, Tensor]
    """Query, key and value; positional, as a captured graph's update wants them."""
    keywords: dict[str, Any]

    def run(self) -> tuple[Tensor, Tensor]:
        """Out and lse as the operator shapes them."""
        out, lse = getattr(operators(), self.operator)(*self.tensors, **self.keywords)
        return out, lse

    def workspace(self) -> Tensor:
        """What the operator may need for lengths up to those of this call."""
        sized: Tensor = getattr(operators(), f"_{self.operator}_get_max_workspace")(
            *self.tensors, **self.keywords
        )
        return sized

    def run_into(self, out: Tensor, lse: Tensor, workspace: Tensor) -> None:
        """The ``.out`` form. Nothing checks that ``workspace`` is large enough: size it by
        ``workspace()`` of the longest lengths.
        """
        getattr(operators(), self.operator).out(
            *self.tensors, **self.keywords, workspace=workspace, out=[out, lse]
        )


def packed_call(
    q: Tensor,
    heads: Heads,
    counts: Sequence[int],
    kv_lens: Sequence[int],
    *,
    pages: Pages | None = None,
    kv: tuple[Tensor, Tensor] | None = None,
    causal: bool = False,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> FusedCall:
    """Layout TND (v2): row r has counts[r] queries of q [sum of counts, H, D] and kv_lens[r] keys.

    Keys lie in ``pages``, or one row after the other in ``kv`` [sum of kv_lens, K, D]. causal:
    bottom-right aligned in each row. window: the same, and W positions back at most; both ends of
    the operator's band are visible, so that W keys are pre_tokens = W - 1. sinks: [H] in q's dtype;
    out and lse then hold their share, so that the result is no state and is not finished again.
    """
    k, v = (pages.k, pages.v) if pages is not None else kv or (None, None)
    assert k is not None
    assert v is not None
    # running sums for queries; for keys too, unless there is a block table
    lengths = list(kv_lens) if pages is not None else list(accumulate(kv_lens))
    masking: dict[str, Any] = {}
    if window is not None:
        masking = {"sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    elif causal:
        masking = {"sparse_mode": 3}
    if masking:
        masking["atten_mask"] = compressed_mask(q.device)
    keywords = {
        "input_layout": "TND",
        "actual_seq_qlen": list(accumulate(counts)),
        "actual_seq_kvlen": lengths,
        **({} if pages is None else pages.keywords()),
        **masking,
        **({} if sinks is None else {"learnable_sink": sinks}),
        **heads.keywords_v2(),
    }
    return FusedCall("npu_fused_infer_attention_score_v2", (q, k, v), keywords)


def packed_queries(
    q: Tensor, heads: Heads, counts: Sequence[int], kv_lens: Sequence[int], **more: Any
) -> tuple[Tensor, Tensor]:
    """``packed_call``, made: out [sum of counts, H, Dv], lse [sum of counts, H]."""
    out, lse = packed_call(q, heads, counts, kv_lens, **more).run()
    return out, lse[..., 0]  # (T, N, 1)


def single_call(
    q: Tensor,
    heads: Heads,
    kv_lens: Sequence[int],
    *,
    layout: str,
    pages: Pages | None = None,
    kv: tuple[Tensor, Tensor] | None = None,
) -> FusedCall:
    """Layout BSND or BNSD (v1) with one query per row, q [rows, H, D]; keys in ``pages``, or in
    ``kv`` [rows, T, K, D] ([rows, K, T, D]).
    """
    k, v = (pages.k, pages.v) if pages is not None else kv or (None, None)
    assert k is not None
    assert v is not None
    keywords = {
        "input_layout": layout,
        "actual_seq_lengths_kv": list(kv_lens),
        **({} if pages is None else pages.keywords()),
        **heads.keywords(),
    }
    query = q[:, None] if layout == "BSND" else q[:, :, None]
    return FusedCall("npu_fused_infer_attention_score", (query, k, v), keywords)


def single_queries(
    q: Tensor, heads: Heads, kv_lens: Sequence[int], **more: Any
) -> tuple[Tensor, Tensor]:
    """``single_call``, made: out [rows, H, Dv], lse [rows, H]."""
    out, lse = single_call(q, heads, kv_lens, **more).run()
    return out.flatten(1, 2), lse[..., 0, 0]  # (B, N, S, 1) whatever the layout


def latent_queries(
    q: Tensor, latent: Tensor, rope: Tensor, heads: Heads, kv_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA in layout BSND (v1), one query per row: q [rows, H, 576], latent [rows, T, 1,
    512] (keys and values both), rope [rows, T, 1, 64].
    """
    split = latent.shape[-1]
    out, lse = operators().npu_fused_infer_attention_score(
        q[:, None, :, :split].contiguous(),
        latent,
        latent,
        query_rope=q[:, None, :, split:].contiguous(),
        key_rope=rope,
        input_layout="BSND",
        actual_seq_lengths_kv=list(kv_lens),
        **heads.keywords(),
    )
    return out.flatten(1, 2), lse[..., 0, 0]


@cache
def compressed_mask(device: torch.device) -> Tensor:
    """The mask that sparse modes 2, 3 and 4 want whatever the lengths: bool [2048, 2048], True
    hides, strictly upper triangular.
    """
    side = COMPRESSED_MASK_SIDE
    return torch.ones(side, side, dtype=torch.bool, device=device).triu(1)
