"""One fused-infer (or incremental) attention call in one shape, whichever operator's names it came
with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from splitkv.kernels_ascend.standin.refusal import StandinGapError, refuse

UNLIMITED = 2147483647
"""The default of pre_tokens and next_tokens."""

PADDED_LAYOUTS = {"BSH": "BSH", "BSND": "BSND", "BNSD": "BNSD", "BNSD_BSND": "BSND"}
"""Query layout -> output layout, one row of S queries per request."""
TND_FAMILY = {"TND": "TND", "NTD": "NTD", "NTD_TND": "TND"}
"""The same for packed queries."""
_UNMODELLED_LAYOUTS = (
    "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NSD",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCall:
    """The arguments of one call, by what they mean; lengths are host integers."""

    operator: str
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    query_lens: list[int] | None
    kv_lens: list[int] | None
    block_table: Tensor | None
    num_heads: int
    num_kv_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    layout: str
    sparse_mode: int
    block_size: int
    inner_precise: int
    sink: Tensor | None
    query_rope: Tensor | None
    key_rope: Tensor | None
    returns_lse: bool

    @property
    def packed(self) -> bool:
        return self.layout in TND_FAMILY

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    @property
    def output_layout(self) -> str:
        return TND_FAMILY[self.layout] if self.packed else PADDED_LAYOUTS[self.layout]

    @property
    def legacy(self) -> bool:
        """Whether this call takes the path that stems from the incremental operator."""
        if self.query_rope is not None:  # quirk: rope-not-legacy
            return False
        return self.layout in ("BSH", "BSND", "BNSD") and self.padded_query().shape[1] == 1

    @property
    def legacy_window_dropped(self) -> bool:
        """Whether a sparse mode was asked for and is silently replaced by 0."""
        return self.legacy and self.sparse_mode != 0  # quirk: legacy-drops-window

    @property
    def corrects_full_mask(self) -> bool:
        return bool(self.inner_precise & 2)

    def padded_query(self) -> Tensor:
        """The query as [B, S, N, D]."""
        if self.layout == "BSH":
            return self.query.view(*self.query.shape[:2], self.num_heads, -1)
        return self.query if self.layout == "BSND" else self.query.transpose(1, 2)

    def packed_query(self) -> Tensor:
        """The query as [T, N, D]."""
        return self.query if self.layout == "TND" else self.query.transpose(0, 1)

    def refuse(self, reason: str) -> NoReturn:
        refuse(self.operator, reason)


def from_v1(given: Mapping[str, Any]) -> FusedCall:
    """From npu_fused_infer_attention_score's arguments."""
    return _build(
        "npu_fused_infer_attention_score",
        given,
        query_lens="actual_seq_lengths",
        kv_lens="actual_seq_lengths_kv",
        num_heads="num_heads",
        scale="scale",
        returns_lse="softmax_lse_flag",
    )


def from_v2(given: Mapping[str, Any]) -> FusedCall:
    """From npu_fused_infer_attention_score_v2's arguments."""
    return _build(
        "npu_fused_infer_attention_score_v2",
        given,
        query_lens="actual_seq_qlen",
        kv_lens="actual_seq_kvlen",
        num_heads="num_query_heads",
        scale="softmax_scale",
        returns_lse="return_softmax_lse",
    )


def from_incre(given: Mapping[str, Any]) -> FusedCall:
    """From npu_incre_flash_attention's arguments."""
    return _build(
        "npu_incre_flash_attention",
        given,
        query_lens=None,
        kv_lens="actual_seq_lengths",  # quirk: incre-lengths-are-keys
        num_heads="num_heads",
        scale="scale_value",
        returns_lse=None,  # quirk: incre-no-lse
    )


def from_prompt(given: Mapping[str, Any]) -> FusedCall:
    """From npu_prompt_flash_attention's arguments."""
    return _build(
        "npu_prompt_flash_attention",
        {**given, "block_table": None, "block_size": 0, "inner_precise": 0},
        query_lens="actual_seq_lengths",
        kv_lens="actual_seq_lengths_kv",
        num_heads="num_heads",
        scale="scale_value",
        returns_lse=None,  # quirk: prompt-no-lse
    )


_SAME_NAME = (
    "query_rope", "key_rope",
    "query", "key", "value", "atten_mask", "block_table", "num_key_value_heads", "pre_tokens",
    "next_tokens", "input_layout", "sparse_mode", "block_size", "inner_precise", "learnable_sink",
)  # fmt: skip


def _build(operator: str, given: Mapping[str, Any], **names: str | None) -> FusedCall:
    def take(meaning: str) -> Any:
        name = names[meaning]
        return given[name] if name is not None else None

    for name, value in given.items():
        if (
            name not in _SAME_NAME
            and name not in names.values()
            and value is not None
            and (isinstance(value, Tensor) or value != 0)
        ):
            shown = "" if isinstance(value, Tensor) else f"={value!r}"
            raise StandinGapError(f"{operator}: the stand-in does not model {name}{shown}")
    layout = given["input_layout"]
    if layout in _UNMODELLED_LAYOUTS:
        raise StandinGapError(f"{operator}: the stand-in does not model input_layout {layout!r}")
    if layout not in PADDED_LAYOUTS and layout not in TND_FAMILY:
        refuse(operator, f"input_layout {layout!r} is unknown")
    num_heads = take("num_heads")
    return FusedCall(
        operator=operator,
        query=given["query"],
        key=given["key"],
        value=given["value"],
        mask=given["atten_mask"],
        query_lens=_host_list(take("query_lens")),
        kv_lens=_host_list(take("kv_lens")),
        block_table=given["block_table"],
        num_heads=num_heads,
        num_kv_heads=given["num_key_value_heads"] or num_heads,  # quirk: num-kv-heads-default
        scale=take("scale"),
        pre_tokens=given.get("pre_tokens", UNLIMITED),
        next_tokens=given.get("next_tokens", UNLIMITED),  # quirk: prompt-next-default
        layout=layout,
        sparse_mode=given.get("sparse_mode", 0),
        block_size=given["block_size"],
        inner_precise=given["inner_precise"],
        sink=given.get("learnable_sink"),
        query_rope=given.get("query_rope"),
        key_rope=given.get("key_rope"),
        returns_lse=bool(take("returns_lse")),
    )


def _host_list(lengths: Any) -> list[int] | None:
    return None if lengths is None else [int(length) for length in lengths]
