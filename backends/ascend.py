"""The Ascend backend: torch_npu's fused-infer attention operator, external splits where asked for,
and our merge.

No NPU has run this. What is checked: the host side against a CPU stand-in for the operators
(``kernels_ascend.standin``).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
from splitkv.common.spec import FLOAT_DTYPES, DecodeSpec, Feature
from splitkv.common.state import PartialState
from splitkv.common.support import No, Range, Support, Why
from splitkv.common.visibility import IntArray

if TYPE_CHECKING:
    from splitkv.kernels_ascend.routes import Choice, Wants
    from splitkv.kernels_ascend.soc import Soc

_OWN = (
    'AscendBackend(route="own") takes it where triton-ascend is installed (compiled to HIVM and '
    "interpreted, never run on an NPU)"
)
_NO_SCORE_HOOK = "the fused-infer operators have no argument for it that comes with an LSE"
_FEATURES: dict[Feature, No | None] = dict.fromkeys(Feature, None) | {
    Feature.KV_START: No(
        Why.NOT_YET,
        "a request begins at 0 in the lengths and tables that reach an operator",
        "give a block table that begins at the first visible page, and lengths to match",
    ),
    Feature.SOFT_CAP: No(Why.UPSTREAM, f"{_NO_SCORE_HOOK} (no tanh on the scores)", _OWN),
    Feature.ALIBI: No(
        Why.NOT_YET,
        "the operators take no slopes, only a bias tensor (pse_shift), which as [1, 1, 1, S] was "
        "wrong at every length (vllm-ascend issue 15503)",
        _OWN,
    ),
    Feature.ATTN_BIAS: No(
        Why.NOT_YET,
        "the operators' bias tensor (pse_shift) as [1, 1, 1, S] was wrong at every length "
        "(vllm-ascend issue 15503)",
        _OWN,
    ),
    Feature.ATTN_MASK: No(
        Why.NOT_YET,
        "an explicit mask enters as a score of -1e12, so that a fully hidden row looks like an "
        "average, and one of few dimensions was ignored past 512 keys (vllm-ascend issue 15503)",
        f"give tree branches as requests of their own; {_OWN}",
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
    Feature.KV_FINE_SCALES: No(
        Why.NOT_YET,
        "the operators document antiquant scales per channel (all heads in one tensor, in the "
        "query's dtype) and per token (float32), and other shapes of them for pages and several "
        "queries; no route builds them, as no stand-in here computes them",
        "dequantise into a 16-bit cache",
    ),
    Feature.KV_ZERO_POINTS: No(
        Why.NOT_YET,
        "the operators' antiquant offsets come with antiquant scales, which have no route here",
        "dequantise into a 16-bit cache",
    ),
    Feature.KV_INT4: No(
        Why.NOT_YET,
        "no route unpacks int4 codes or applies the scales of their groups",
        "dequantise into a 16-bit cache",
    ),
}


_SUPPORT = Support(
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    kv_dtypes=(torch.float16, torch.bfloat16, torch.float32),
    head_dim=Range(1, 768),
    head_dim_v=Range(1, 768),
    group=Range(1, 256),
    page_size=Range(16, 512, 16),
    num_queries=Range(),
    features=_FEATURES,
)
"""What some route takes; which takes what together is the table's affair (``routes.py``), and the
numbers with their sources stand in ``limits.yaml``.
"""
_FEATURES_ALONE = replace(
    _SUPPORT,
    dtypes=FLOAT_DTYPES,
    kv_dtypes=FLOAT_DTYPES,
    head_dim=Range(),
    head_dim_v=Range(),
    group=Range(),
    page_size=Range(),
)


class AscendBackend(Backend):
    """torch_npu's attention operators, FIA (``npu_fused_infer_attention_score``) first.

    Route "own" is a kernel of ours for what the operators have no argument for (soft cap, ALiBi,
    bias, tree masks), taken only where it is asked for by that name.

    soc: the generation to decide for (None: that of the device, a 910B where there is none).
    strict: where sources on a limit disagree, take the narrower one. route: the only one to take,
    by name. needs_lse: False lets operators serve that report no LSE, where none with an LSE does;
    ``decode`` then returns an lse of NaN, and ``partial`` refuses.

    Causality, windows and anchors reach the operator as lengths and block tables, not as masks; the
    one mask in use is the bottom-right causal one for several queries over uncut requests. The
    operator cuts long rows itself, so automatic plans cut nothing below its row limit of 262144
    keys; ``num_splits`` and ``split_size`` cut outside, all splits in one call. Partial outs are
    rounded to 16 bits by the operator, once per split.

    Lengths reach the operator as host integers: pass ``seq_lens`` (and ``cu_seqlens``) as CPU
    tensors. On the device they are copied once per plan, and a copy during graph capture is an
    error. In a captured graph the operator keeps the lengths of the capture:
    ``splitkv.kernels_ascend.graphs`` makes calls that can be updated.
    """

    name = "ascend"
    device_type = "npu"
    rounds_partials = True
    batch_invariant = False  # the operator cuts rows as it likes
    support = _SUPPORT

    def __init__(
        self,
        *,
        soc: "Soc | None" = None,
        strict: bool = True,
        route: str | None = None,
        needs_lse: bool = True,
    ) -> None:
        self.soc, self.strict, self.needs_lse = soc, strict, needs_lse
        self.route_name = route

    @property
    def _own(self) -> bool:
        from splitkv.kernels_ascend.routes import OWN

        return self.route_name == OWN.name

    @property
    def evidence(self) -> str:
        from splitkv.kernels_ascend.runtime import is_standin

        return "stand-in" if is_standin() else "device"

    @property
    def wants(self) -> "Wants":
        """What the fields ask for, on this machine's device; a 910B where there is none."""
        from splitkv.kernels_ascend.routes import Wants
        from splitkv.kernels_ascend.runtime import device_name
        from splitkv.kernels_ascend.soc import Soc, soc_of

        return Wants(
            soc=self.soc or soc_of(device_name() or "") or Soc.A2,
            strict=self.strict,
            needs_lse=self.needs_lse,
            route=self.route_name,
        )

    def missing(self) -> str | None:
        from splitkv.kernels_ascend.runtime import missing

        return missing()

    def refusals(self, spec: DecodeSpec) -> list[str]:
        from splitkv.kernels_ascend.routes import choose

        if self._own:
            return choose(spec, self.wants).refusals
        found = _FEATURES_ALONE.refusals(spec)
        # said by their features already
        asked = replace(
            spec,
            kv_start=False,
            logits_soft_cap=None,
            alibi=False,
            attn_bias=False,
            attn_mask=False,
        )
        if spec.cache_dtype is not spec.dtype:
            asked = replace(
                asked,
                kv_dtype=spec.dtype,
                k_scale=None,
                v_scale=None,
                k_zero=False,
                v_zero=False,
            )
        return found + choose(asked, self.wants).refusals

    def tensor_refusals(self, call: DecodeCall, plan: SplitPlan | None) -> list[str]:
        from splitkv.kernels_ascend.checks import tensor_refusals

        assert plan is not None
        return tensor_refusals(call, plan, self.wants)

    def choice(self, spec: DecodeSpec) -> "Choice":
        """Which route serves ``spec``, and what speaks against each other one."""
        from splitkv.kernels_ascend.routes import choose

        return choose(spec, self.wants)

    def route(self, spec: DecodeSpec) -> str | None:
        """Which operator layout and cache form serves ``spec``, for people; None: none does."""
        route = self.choice(spec).route
        return None if route is None else route.describe(spec)

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
        as it cuts rows itself. The own kernel is planned for like any other.
        """
        from splitkv.kernels_ascend.checks import warn_of_page_size
        from splitkv.kernels_ascend.limits import limit

        if spec.page_size is not None and not self._own:
            warn_of_page_size(spec.page_size)
        if num_splits is None and split_size is None and not self._own:
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
        return partial(call, plan, self.wants)

    def decode(
        self,
        call: DecodeCall,
        plan: SplitPlan | None,
        *,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)``; lse is NaN where a route that reports none was asked for.

        Raises:
            ValueError: ``lse`` is given for such a route to write.
        """
        from splitkv.kernels_ascend.whole import decode_whole

        assert plan is not None
        whole = decode_whole(call, plan, self.wants, sinks)
        if whole is None:
            return super().decode(call, plan, sinks=sinks, out=out, lse=lse)
        result, result_lse = whole
        if lse is not None and result_lse.isnan().all():
            raise ValueError(
                "lse= is given, and the route that was asked for reports no LSE: leave it out"
            )
        if lse is not None:
            result_lse = lse.copy_(result_lse)
        return (result if out is None else out.copy_(result)), result_lse

    def merge(self, states: Sequence[PartialState] | PartialState) -> PartialState:
        from splitkv.kernels_ascend.merge import merge

        return merge(states)
