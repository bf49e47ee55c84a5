"""The Ascend backend: torch_npu's fused-infer attention operator, external splits where asked for,
and our merge.

No NPU has run this. What is checked: the host side against a CPU stand-in for the operators
(``kernels_ascend.standin``).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from splitkv.backends.base import Backend
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.profile import (
    ASCEND_910_93,
    ASCEND_910B1,
    ASCEND_910B3,
    ASCEND_910B4,
    DeviceProfile,
)
from splitkv.common.spec import DecodeSpec, Feature
from splitkv.common.state import PartialState
from splitkv.common.support import No, Range, Support, Why
from splitkv.common.visibility import IntArray

_NO_SCORE_HOOK = "the fused-infer operators have no argument for it that comes with an LSE"
_FEATURES: dict[Feature, No | None] = dict.fromkeys(Feature, None) | {
    Feature.SOFT_CAP: No(Why.UPSTREAM, f"{_NO_SCORE_HOOK} (no tanh on the scores)"),
    Feature.ALIBI: No(
        Why.NOT_YET,
        "the operators take no slopes, only a bias tensor (pse_shift), which as [1, 1, 1, S] was "
        "wrong at every length (vllm-ascend issue 15503)",
    ),
    Feature.ATTN_BIAS: No(
        Why.NOT_YET,
        "the operators' bias tensor (pse_shift) as [1, 1, 1, S] was wrong at every length "
        "(vllm-ascend issue 15503)",
    ),
    Feature.ATTN_MASK: No(
        Why.NOT_YET,
        "an explicit mask enters as a score of -1e12, so that a fully hidden row looks like an "
        "average, and one of few dimensions was ignored past 512 keys (vllm-ascend issue 15503)",
        "give tree branches as requests of their own",
    ),
    Feature.HEAD_DIM_V: No(
        Why.UPSTREAM,
        "key and value have one head dim outside of the 192/128 MLA prefill (documentation)",
        "pad v to the key's head dim and cut the result",
    ),
    Feature.MIXED_DTYPE: No(
        Why.UPSTREAM, "query, key and value have one dtype (documentation)", "convert the queries"
    ),
    Feature.KV_SCALES: No(
        Why.NOT_YET,
        "the operators' int8 caches with antiquant scales have no route here, and there is no fp8 "
        "before Ascend 950",
        "dequantise into a 16-bit cache",
    ),
}


_SUPPORT = Support(
    dtypes=(torch.float16, torch.bfloat16),
    kv_dtypes=(torch.float16, torch.bfloat16),
    head_dim=Range(16, 512, 16),
    head_dim_v=Range(16, 512, 16),
    group=Range(1, 64),
    page_size=Range(16, 512, 16),
    num_queries=Range(),
    features=_FEATURES,
)
# the same limits refuse with their sentence and source: kernels_ascend/limits.yaml
_WITHOUT_LIMITS = replace(
    _SUPPORT, head_dim=Range(), head_dim_v=Range(), group=Range(), page_size=Range()
)


class AscendBackend(Backend):
    """torch_npu's ``npu_fused_infer_attention_score``.

    Causality, windows and anchors reach the operator as lengths and block tables, not as masks; the
    one mask in use is the bottom-right causal one for several queries over uncut requests. The
    operator cuts long rows itself, so automatic plans cut nothing below its row limit of 262144
    keys; ``num_splits`` and ``split_size`` cut outside, all splits in one call. Partial outs are
    rounded to 16 bits by the operator, once per split.

    Lengths reach the operator as host integers: pass ``seq_lens`` (and ``cu_seqlens``) as CPU
    tensors. On the device they are copied once per plan, and a copy during graph capture is an
    error. In a captured graph the operator keeps the lengths of the capture.
    """

    name = "ascend"
    device_type = "npu"
    rounds_partials = True
    batch_invariant = False  # the operator cuts rows as it likes
    support = _SUPPORT

    @property
    def evidence(self) -> str:
        from splitkv.kernels_ascend.runtime import is_standin

        return "stand-in" if is_standin() else "device"

    def missing(self) -> str | None:
        from splitkv.kernels_ascend.runtime import missing

        return missing()

    def refusals(self, spec: DecodeSpec) -> list[str]:
        from splitkv.kernels_ascend.routes import operator_refusals

        return _WITHOUT_LIMITS.refusals(spec) + operator_refusals(spec)

    def tensor_refusals(self, call: DecodeCall, plan: SplitPlan | None) -> list[str]:
        from splitkv.kernels_ascend.prepare import tensor_refusals

        assert plan is not None
        return tensor_refusals(call, plan)

    def route(self, spec: DecodeSpec) -> str:
        """Which operator layout and cache form serves ``spec``, for people."""
        from splitkv.kernels_ascend.routes import route_of

        return route_of(spec).text

    def profile(self) -> DeviceProfile:
        """By the device's name; a 910B3 where there is none."""
        from splitkv.kernels_ascend.runtime import device_name

        name = device_name() or ""
        known = (ASCEND_910B1, ASCEND_910B4, ASCEND_910_93)
        return next((one for one in known if name.startswith(one.name)), ASCEND_910B3)

    def plan(
        self,
        spec: DecodeSpec,
        seq_lens: Sequence[int] | IntArray,
        *,
        num_splits: int | None = None,
        split_size: int | None = None,
        capacity: int | None = None,
    ) -> SplitPlan:
        """Splits for these host lengths; automatic means as few as the operator's row limit allows,
        as it cuts rows itself.
        """
        from splitkv.kernels_ascend.limits import limit
        from splitkv.kernels_ascend.prepare import warn_of_page_size

        if spec.page_size is not None:
            warn_of_page_size(spec.page_size)
        if num_splits is None and split_size is None:
            longest = int(max(seq_lens, default=0))
            num_splits = max(-(-longest // limit("keys_per_row_max").number), 1)
        return super().plan(
            spec, seq_lens, num_splits=num_splits, split_size=split_size, capacity=capacity
        )

    def plan_for(
        self, call: DecodeCall, *, num_splits: int | None = None, split_size: int | None = None
    ) -> SplitPlan:
        """A plan for this call's own lengths; lengths on the device are copied, once."""
        from splitkv.kernels_ascend.host_facts import read_facts

        memo: dict[object, object] = {}
        facts = read_facts(call, memo)
        plan = self.plan(call.spec, facts.lengths, num_splits=num_splits, split_size=split_size)
        plan.bound.update(memo)
        return plan

    def partial(self, call: DecodeCall, plan: SplitPlan | None) -> PartialState:
        from splitkv.kernels_ascend.attention import partial

        assert plan is not None
        return partial(call, plan)

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        from splitkv.kernels_ascend.merge import merge

        return merge(states)
