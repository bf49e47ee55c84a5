"""Where the wheel's documents state the numbers of ``limits.yaml``, as regular expressions.

The documents are Chinese prose; a pattern's group is the number (or several with / between them, K
and M for 1024 and its square). Every place of a pattern must state the same.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from splitkv.kernels_ascend.limits import Limit

FIA, FIA_V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
INCRE, PROMPT = "npu_incre_flash_attention", "npu_prompt_flash_attention"
FUSION = "npu_fusion_attention"

_SIXTEEN_BIT = "key、value输入类型为float16、bfloat16时"
_ATLAS = "Atlas 推理系列加速卡产品"


@dataclass(frozen=True, slots=True)
class Stated:
    """A limit by its name in limits.yaml, the documents that state it, and how."""

    limit: str
    documents: tuple[str, ...]
    pattern: str


STATED = (
    Stated("head_dim_multiple", (FIA, FIA_V2), r"输入类型全为float16、bfloat16时, D轴需(\d+)对齐"),
    Stated("head_dim_max", (FIA, FIA_V2, INCRE, PROMPT), r"支持D轴小于等于(\d+)"),
    Stated("heads_max", (FIA, FIA_V2, INCRE, PROMPT), r"支持N轴小于等于(\d+)"),
    Stated("heads_max", (FUSION,), r"Nq取值范围1~(\d+)"),
    Stated("group_max", (FIA, FIA_V2, INCRE, PROMPT), r"比值不能大于(\d+)"),
    Stated("group_max_old", (INCRE, PROMPT), r"比值不能大于(\d+)"),
    Stated("tnd_head_dims", (FIA_V2,), r"TND场景，要求Q_D、K_D、V_D等于(\d+)，"),
    Stated("tnd_head_dims", (FIA_V2,), r"或者Q_D、K_D等于(\d+)，V_D等于128/192"),
    Stated("fusion_head_dim_max", (FUSION,), r"Dq=Dk和Dk≥Dv，取值范围1~(\d+)"),
    Stated("mla_head_dim", (FIA_V2,), r"当query的d等于(\d+)时：\n支持TND、TND_NTD"),
    Stated("mla_rope_dim", (FIA_V2,), r"query_rope和keyRope的d为(\d+)"),
    Stated("mla_kv_heads", (FIA_V2,), r"要求query的n为[\d/]+，key、value的n为(\d+)"),
    Stated("mla_heads", (FIA_V2,), r"要求query的n为([\d/]+)，"),
    Stated("page_multiple", (FIA,), _SIXTEEN_BIT + r"需要(\d+)对齐"),
    Stated("page_multiple", (FIA_V2,), _SIXTEEN_BIT + r"需要(\d+)对齐"),
    Stated("page_multiple", (INCRE,), _SIXTEEN_BIT + r"block_size需要(\d+)对齐"),
    Stated(
        "page_multiple_many", (FIA, FIA_V2), r"block_size最小为128, 最大为512, 且要求是(\d+)的倍数"
    ),
    Stated("page_max", (FIA,), r"block_size需要传入非0值，且最大不超过(\d+)"),
    Stated("page_max", (FIA, FIA_V2), r"block_size最小为128, 最大为(\d+)"),
    Stated("page_proven", (FIA, FIA_V2), r"推荐使用(\d+)"),
    Stated("cache_row_max", (FIA, FIA_V2), r"且KV_N\*D超过(\d+)时"),
    Stated("keys_per_row_max", (FIA, FIA_V2), r"支持S轴小于等于(\d+)"),
    Stated("keys_per_row_max", (INCRE,), r"A2 推理产品支持B轴.*?支持S轴小于等于(\d+)"),
    Stated("keys_per_row_max_310p", (INCRE,), _ATLAS + r"支持B轴.*?支持S轴小于等于(\d+)"),
    Stated("keys_per_row_max_many", (FIA, FIA_V2, PROMPT), r"S支持小于等于(\d+)\(20M\)"),
    Stated("rows_max", (FIA, FIA_V2), r"支持B轴小于等于(\d+)"),
    Stated("rows_tnd_max", (FIA_V2,), r"actual_seq_qlen和actual_seq_kvlen的元素个数不大于(\d+)"),
    Stated("rows_incre_max", (INCRE,), r"A2 推理产品支持B轴小于等于(\d+)"),
    Stated("rows_incre_310p_max", (INCRE,), _ATLAS + r"支持B轴小于等于(\d+)"),
    Stated("rows_unaligned_max", (FIA, FIA_V2, PROMPT), r"D轴32byte不对齐时仅支持到(\d+)"),
    Stated("query_row_max", (FIA, FIA_V2, PROMPT), r"要求N\*D小于(\d+)"),
    Stated("rows_prompt_310p_max", (PROMPT,), _ATLAS + r": 支持B轴小于等于(\d+)"),
    Stated("keys_prompt_310p_max", (PROMPT,), _ATLAS + r".*?支持S轴小于等于(\d+)\(64k\)"),
    Stated("queries_prompt_310p_max", (PROMPT,), _ATLAS + r".*?支持S轴小于等于(\d+)\(64k\)"),
    Stated("mode_prompt_310p", (PROMPT,), r"sparse的模式.*?" + _ATLAS + r"仅支持默认值(\d+)"),
    Stated("rows_fusion_strict", (FUSION,), r"varlen场景下长度最大支持(\d+[KM])"),
    Stated("rows_fusion_loose", (FUSION,), r"; varlen场景B取值范围1~(\d+[KM])"),
    Stated("tnd_tokens_max", (FIA_V2,), r"T小于等于(\d+[KM])"),
    Stated("sink_head_dim", (FIA_V2,), r"仅支持value的d小于等于(\d+)"),
)

NOT_READ = {
    "kv_elements_max": "said as 'the range of int32', no number",
    "tnd_head_dims_3d": "sources, not in these documents",
    "tnd_head_dims_4d": "sources, not in these documents",
    "atb_head_dim_max": "ATB sources; its operators are not in these documents",
    "atb_head_dim_v_max": "ATB sources; its operators are not in these documents",
    "page_max_atb": "ATB sources; its operators are not in these documents",
    "page_max_atb_v": "ATB sources; its operators are not in these documents",
    "page_max_tnd": "aclnn text, not in these documents",
    "group_head_dims": "aclnn text, not in these documents",
    "scale_950": "ATB sources; its operators are not in these documents",
    "update_shards_max": "this release documents npu_attention_update without numbers",
    "update_dim_multiple": "this release documents npu_attention_update without numbers",
    "update_dim_max": "this release documents npu_attention_update without numbers",
    "group_prompt_310p": "said as the one value of num_key_value_heads, 0 for as many as queries",
    "lengths_prompt_310p": "said in words: the parameter is not supported",
    "scatter_slots_max": "int32 by choice, said as a dtype",
    "scatter_form": "said as the shapes of its scenarios",
    "single_query": "said by the operators' purpose, no number",
    "sink_v2": "there is no such argument",
    "mla_state": "aclnn text, not in these documents",
    "mla_state_tnd": "aclnn text, not in these documents",
    "page_none": "there is no such argument",
    "cache_form_atb": "ATB sources; its operators are not in these documents",
    "mode_known": "a list of modes in a sentence about several",
    "mode_legacy": "aclnn text, not in these documents",
    "mode_tnd_unmasked": "an issue, not a document",
    "inner_precise_single": "a list of values in a sentence about several",
    "inner_precise_bf16": "said in words",
}
"""Limits with numbers that no pattern reads, and why."""


def number(text: str) -> tuple[int, ...]:
    """``128``, ``1M`` or ``1/2/4`` as integers."""
    scale = {"K": 1024, "M": 1024**2}
    return tuple(
        int(part.rstrip("KM")) * scale.get(part[-1], 1) for part in text.split("/") if part
    )


def found(stated: Stated, texts: Mapping[str, str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(document, numbers) for every place; a document that does not state it has no numbers."""
    for document in stated.documents:
        places = re.findall(stated.pattern, texts[document])
        yield from ((document, number(place)) for place in places or [""])


def disagreements(
    stated: Stated, texts: Mapping[str, str], limits: Mapping[str, Limit]
) -> list[str]:
    """Where a document states another number than limits.yaml."""
    value = limits[stated.limit].value
    ours = set(value) if isinstance(value, tuple) else {value}
    wrong = []
    for document, numbers in found(stated, texts):
        agrees = set(numbers) <= ours if isinstance(value, tuple) else set(numbers) == ours
        if not numbers or not agrees:
            wrong.append(f"{stated.limit}: {document} states {numbers}, limits.yaml {sorted(ours)}")
    return wrong


_LIMITING = re.compile(
    r"[^\n。;；]*(?:小于等于|不大于|不能大于|不超过|超过|取值范围|对齐|倍数)[^\n。;；]*"
)


def unread(document: str, text: str) -> list[str]:
    """Sentences that limit something by a number and that no pattern reads."""
    sentences = (match[0].strip() for match in _LIMITING.finditer(text))
    patterns = [re.compile(entry.pattern) for entry in STATED if document in entry.documents]
    return [
        sentence
        for sentence in sentences
        if re.search(r"\d{2}", sentence) and not any(p.search(sentence) for p in patterns)
    ]
