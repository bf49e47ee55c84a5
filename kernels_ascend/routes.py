"""The table of routes: which operator serves a request, and what speaks against each of the others.

Facts of the spec alone, no device needed; numbers are in ``limits.yaml``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from splitkv.common.spec import DecodeSpec, Feature, Layout
from splitkv.common.support import dtype_name
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.limits import Facts, doubts, violations
from splitkv.kernels_ascend.soc import Soc

MLA_LATENT, MLA_ROPE = 512, 64
"""Parts of a key of absorbed MLA: head_dim 576 is the latent and the rope part behind it."""


_FOLLOWING = "keys one request after the other"
_CACHES = {
    Layout.NHD: "3-D cache [pages, P, K*D]",
    Layout.HND: "4-D cache [pages, K, P, D]",
    Layout.BSND: "dense cache, or its 3-D page view",
    Layout.BNSD: "dense cache, or its 3-D page view with a request per kv head",
    Layout.PACKED: _FOLLOWING,
}
_AS_IT_LIES = _CACHES | dict.fromkeys((Layout.BSND, Layout.BNSD), "dense cache")
_COPIED = dict.fromkeys(Layout, "latent and rope part copied out of the cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
    """What is asked of the backend besides the spec.

    strict: how sources that disagree are read. needs_lse: whether the LSE must come back; without
    it operators that report none may serve. route: the only one allowed, by name; None is the first
    that takes the request.
    """

    soc: Soc = Soc.A2
    strict: bool = True
    needs_lse: bool = True
    route: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A way from a request to operator calls.

    layouts: our layout to the operator's input_layout and the dimensions of the paged cache that it
    gets (0: not paged). shares: whether queries of one request share a row; else each is a row.
    state: whether states come back; else only the output of whole histories. reads: how the cache
    reaches the operator, for people. rope_dim: how much of a key's dims go as a tensor of their
    own. masks: whether the operator is given the causal mask for whole requests; others cut rows
    first, some of them to one query. asked: only where it is named. against: what the numbers of
    limits.yaml cannot say.
    """

    name: str
    operator: str
    layouts: Mapping[Layout, tuple[str, int]]
    shares: bool
    state: bool
    text: str
    reads: Mapping[Layout, str] = field(default_factory=lambda: _CACHES)
    rope_dim: int = 0
    masks: bool = False
    asked: bool = False
    hands_sinks: bool = False
    against: Callable[[DecodeSpec], list[str]] = lambda spec: []

    def reasons(self, spec: DecodeSpec, wants: Wants) -> list[str]:
        """Everything that speaks against this route; empty where it serves ``spec``."""
        if found := unsaid(spec) + self.structural(spec):
            return found
        return violations(self.facts(spec, wants), strict=wants.strict)

    def structural(self, spec: DecodeSpec) -> list[str]:
        """What speaks against it whatever the numbers."""
        if spec.layout not in self.layouts:
            takes = ", ".join(layout.value for layout in self.layouts)
            return [f"layout {spec.layout.value}: route {self.name} takes {takes}"]
        found = self.against(spec)
        if not self.state:
            found += _whole_history(spec)
        if not self.state and spec.sinks and not self.hands_sinks:
            found.append("learned sinks: they are folded in by the LSE, which does not come back")
        return found

    def facts(self, spec: DecodeSpec, wants: Wants) -> Facts:
        """The operator call as far as ``spec`` decides it."""
        layout, form = self.layouts[spec.layout]
        one_tensor = spec.head_dim - self.rope_dim
        return Facts(
            operator=self.operator,
            soc=wants.soc,
            layout=layout,
            dtype=dtype_name(spec.dtype),
            kv_dtype=dtype_name(spec.cache_dtype),
            head_dim=one_tensor,
            head_dim_v=spec.head_dim_v,
            rope_dim=self.rope_dim,
            heads=spec.num_q_heads,
            kv_heads=spec.num_kv_heads,
            group=spec.group,
            page_size=spec.page_size if form else None,
            cache_form=form,
            cache_row=spec.num_kv_heads * spec.head_dim if form == 3 else None,
            query_row=spec.num_q_heads * one_tensor,
            odd_bytes=odd_bytes(spec),
            queries=spec.num_queries if self.shares else 1,
            sparse_mode=3 if self.masks and spec.causal else None,
            scale=spec.scale,
            sinks=int(self.hands_sinks),
            state=int(wants.needs_lse and not self.hands_sinks),
        )

    def describe(self, spec: DecodeSpec) -> str:
        """One line for people: operator, input layout, cache form, rows."""
        parts = [self.text, self.layouts[spec.layout][0], self.reads[spec.layout]]
        if parts[-1] != _FOLLOWING:
            parts.append("queries of a request share rows" if self.shares else "one query per row")
        return ", ".join(parts)


_SCORES = (Feature.SOFT_CAP, Feature.ALIBI, Feature.ATTN_BIAS, Feature.ATTN_MASK)


def unsaid(spec: DecodeSpec) -> list[str]:
    """What ``spec`` does to scores that no operator call of ours can say."""
    found = [
        f"{feature.value}: no operator is told of it; AscendBackend(route={OWN.name!r}) takes it"
        for feature in spec.features
        if feature in _SCORES
    ]
    if spec.kv_start:
        found.append("kv_start: a request begins at 0 in the lengths and tables of an operator")
    return found


def odd_bytes(spec: DecodeSpec) -> int:
    """Bytes of a head beyond a multiple of 32."""
    return spec.head_dim * spec.dtype.itemsize % 32


def _whole_history(spec: DecodeSpec) -> list[str]:
    found = []
    if spec.sliding_window is not None:
        found.append(
            f"sliding_window {spec.sliding_window}: a window is cut into ranges that are merged by "
            "their LSE"
        )
    if spec.packed_queries:
        found.append("ragged queries: it takes the same number of queries of every request")
    return found


def _several(spec: DecodeSpec) -> list[str]:
    if spec.num_queries > 1 or spec.layout is Layout.PACKED:
        return []
    return ["num_queries 1: the documentation of layout TND is narrower than that of single rows"]


def _single(spec: DecodeSpec) -> list[str]:
    if spec.num_queries == 1:
        return []
    return [f"num_queries {spec.num_queries}: it takes one query per request"]


def _many(spec: DecodeSpec) -> list[str]:
    return [] if spec.num_queries > 1 else ["num_queries 1: it is made for many queries"]


def _absorbed(spec: DecodeSpec) -> list[str]:
    wanted = (MLA_LATENT + MLA_ROPE, MLA_LATENT, 1)
    if (spec.head_dim, spec.head_dim_v, spec.num_kv_heads) == wanted:
        return []
    return [
        f"head_dim {spec.head_dim}, head_dim_v {spec.head_dim_v}, {spec.num_kv_heads} kv heads: "
        f"absorbed MLA is {wanted[0]}, {wanted[1]} and 1"
    ]


def _sinks(spec: DecodeSpec) -> list[str]:
    return [] if spec.sinks else ["no sinks are given"]


_ROWS = {
    Layout.BSND: ("BSND", 0),
    Layout.BNSD: ("BNSD", 0),
    Layout.NHD: ("BSND", 3),
    Layout.HND: ("BNSD", 4),
}
_TND = {
    Layout.PACKED: ("TND", 0),
    Layout.NHD: ("TND", 3),
    Layout.HND: ("TND", 4),
    Layout.BSND: ("TND", 3),
    Layout.BNSD: ("TND", 3),
}

FIA_TND = Route(
    name="fia-tnd",
    operator="npu_fused_infer_attention_score_v2",
    layouts=_TND,
    shares=True,
    state=True,
    text="FIA v2",
    against=_several,
)
FIA_ROWS = Route(
    name="fia-rows",
    operator="npu_fused_infer_attention_score",
    layouts=_ROWS,
    shares=False,
    state=True,
    text="FIA v1",
)
FIA_MLA = Route(
    name="fia-mla",
    operator="npu_fused_infer_attention_score",
    layouts=dict.fromkeys((Layout.NHD, Layout.HND, Layout.BSND, Layout.BNSD), ("BSND", 0)),
    shares=False,
    state=True,
    text="FIA v1 with query_rope and key_rope",
    reads=_COPIED,
    rope_dim=MLA_ROPE,
    against=_absorbed,
)
FUSION = Route(
    name="fusion",
    operator="npu_fusion_attention",
    layouts=dict.fromkeys((Layout.PACKED, Layout.BSND, Layout.BNSD), ("TND", 0)),
    shares=True,
    state=True,
    text="npu_fusion_attention (max and sum)",
    reads=dict.fromkeys(Layout, _FOLLOWING),
)
FIA_SINKS = Route(
    name="fia-sinks",
    operator="npu_fused_infer_attention_score_v2",
    layouts={layout: _TND[layout] for layout in (Layout.NHD, Layout.HND)},
    shares=True,
    state=False,
    text="FIA v2 with learnable_sink",
    asked=True,
    hands_sinks=True,
    against=_sinks,
)
PAGED_ATTENTION = Route(
    name="paged-attention",
    operator="_npu_paged_attention",
    layouts={Layout.NHD: ("TND", 4)},
    shares=False,
    state=False,
    text="_npu_paged_attention (ATB, no LSE)",
    reads={Layout.NHD: "4-D cache [pages, P, K, D]"},
    against=_single,
)
INCRE = Route(
    name="incre",
    operator="npu_incre_flash_attention",
    layouts=_ROWS,
    shares=False,
    state=False,
    text="npu_incre_flash_attention (no LSE)",
    reads=_AS_IT_LIES,
    against=_single,
)
PROMPT = Route(
    name="prompt",
    operator="npu_prompt_flash_attention",
    layouts={layout: _ROWS[layout] for layout in (Layout.BSND, Layout.BNSD)},
    shares=True,
    state=False,
    text="npu_prompt_flash_attention (no LSE)",
    reads=_AS_IT_LIES,
    masks=True,
    against=_many,
)

ROUTES = (FIA_TND, FIA_ROWS, FIA_MLA, FUSION, FIA_SINKS, PAGED_ATTENTION, INCRE, PROMPT)
"""Those of the vendor's operators, in order of preference: routes with a state first, the best
documented first among those.
"""


class OwnRoute(Route):
    """Our own kernel: no operator, so that ``limits.yaml`` has nothing to say of it."""

    def reasons(self, spec: DecodeSpec, wants: Wants) -> list[str]:
        found = own.refusals(spec)
        if wants.soc not in _LOWERED:
            chips = " and ".join(soc.value for soc in _LOWERED)
            found.append(f"{wants.soc}: the own kernel was compiled for {chips} only")
        return found

    def describe(self, spec: DecodeSpec) -> str:
        return self.text


_LOWERED = (Soc.A2, Soc.A3)
OWN = OwnRoute(
    name="own",
    operator="own kernel",
    layouts={},
    shares=True,
    state=True,
    text="own Triton-Ascend kernel (compiled to HIVM and interpreted, never run on an NPU)",
    asked=True,
)


def route_named(name: str) -> Route:
    """The route called ``name``.

    Raises:
        ValueError: nobody is; the text lists the known names.
    """
    for route in (*ROUTES, OWN):
        if route.name == name:
            return route
    raise ValueError(f"unknown route {name!r}, known: {[route.name for route in (*ROUTES, OWN)]}")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which route serves a request (None: none), and what speaks against each that does not."""

    route: Route | None
    against: Mapping[str, list[str]]
    refusals: list[str]
    """Where none serves: the reasons of the route that comes nearest."""


def choose(spec: DecodeSpec, wants: Wants) -> Choice:
    """The first route that takes ``spec``, or the named one; worked out once for each.

    The own kernel needs a compiler besides, which is looked for wherever it is asked for.
    """
    return _choose(spec, wants, own.missing() if wants.route == OWN.name else None)


@lru_cache(maxsize=1024)
def _choose(spec: DecodeSpec, wants: Wants, lacking: str | None) -> Choice:
    if lacking is not None:
        refusals = {OWN.name: [lacking]}
        return Choice(None, {**_choose(spec, wants, None).against, **refusals}, [lacking])
    chosen: Route | None = None
    against: dict[str, list[str]] = {}
    for route in (*ROUTES, OWN):
        reasons = route.reasons(spec, wants)
        if not reasons and _passed_over(route, wants):
            reasons = [f"it takes this; ask for it by name: AscendBackend(route={route.name!r})"]
        if not reasons and chosen is not None:
            reasons = [f"it takes this too; {chosen.name} comes first"]
        if reasons:
            against[route.name] = reasons
        elif chosen is None:
            chosen = route
    return Choice(chosen, against, [] if chosen else _nearest(spec, wants))


def _passed_over(route: Route, wants: Wants) -> bool:
    return route.asked if wants.route is None else route.name != wants.route


def _nearest(spec: DecodeSpec, wants: Wants) -> list[str]:
    """Reasons of the named route, else of the first one that is of the spec's kind."""
    if wants.route is not None:
        return route_named(wants.route).reasons(spec, wants)
    absorbed = not FIA_MLA.structural(spec)
    kind = [FIA_MLA] if absorbed else [FIA_TND] if spec.layout is Layout.PACKED else [FIA_ROWS]
    if not wants.needs_lse:
        fitting = [route for route in ROUTES if not route.structural(spec)]
        kind = sorted(fitting, key=lambda route: route.state) or kind
    reasons = kind[0].reasons(spec, wants)
    if spec.layout is Layout.PACKED:
        return [f"packed cache: {reason}; use a dense or paged cache" for reason in reasons]
    return reasons


def page_warning(page: int) -> str | None:
    """Why a page size is doubtful although it is documented, or None."""
    found = doubts(Facts(operator=FIA_ROWS.operator, page_size=page))
    return found[0].replace("page_size", "page size", 1) if found else None
