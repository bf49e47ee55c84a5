"""Which operator layout serves a spec, and what the operators refuse of it: facts of the spec
alone, no device needed.
"""

from dataclasses import dataclass

from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.limits import Limit, limit


@dataclass(frozen=True, slots=True)
class Route:
    """How one spec reaches the operator.

    layout: the operator's input_layout. shares: whether one row may hold several queries. folds:
    whether each kv head becomes a request of its own (a dense BNSD cache, whose pages would
    otherwise not be contiguous). text: for people.
    """

    layout: str
    shares: bool
    folds: bool
    text: str


def route_of(spec: DecodeSpec) -> Route:
    """The route of ``spec``.

    A paged NHD pool is the operator's 3-D cache, an HND pool its 4-D one, and a dense cache a 3-D
    one whose table counts up. TND takes several queries per row where the pages allow it; beyond
    its head dims every query is a row of BSND or BNSD.
    """
    many = spec.page_size is None or spec.page_size % limit("page_multiple_many").number == 0
    if spec.layout is Layout.PACKED:
        return Route("TND", True, False, "FIA v1, TND, keys one request after the other")
    if spec.layout is Layout.HND:
        if spec.head_dim in limit("head_dim_tnd_4d").choices:
            return Route("TND", many, False, _text("TND", "4-D cache [pages, K, P, D]", many))
        return Route("BNSD", False, False, _text("BNSD", "4-D cache [pages, K, P, D]", False))
    folds = spec.layout is Layout.BNSD
    form = {
        Layout.NHD: "3-D cache [pages, P, K*D]",
        Layout.BSND: "dense cache, or its 3-D page view",
        Layout.BNSD: "dense cache, or its 3-D page view with a request per kv head",
    }[spec.layout]
    if spec.head_dim <= limit("head_dim_tnd_max").number:
        return Route("TND", many, folds, _text("TND", form, many))
    return Route("BSND", False, folds, _text("BSND", form, False))


def _text(layout: str, form: str, shares: bool) -> str:
    rows = "queries of a request share rows" if shares else "one query per row"
    return f"FIA v1, {layout}, {form}, {rows}"


def operator_refusals(spec: DecodeSpec) -> list[str]:
    """Every documented limit that ``spec`` exceeds, with the value, the limit's sentence and what
    to do.
    """
    found = []
    if spec.head_dim % limit("head_dim_multiple").number:
        found.append(
            _exceeded("head_dim", spec.head_dim, limit("head_dim_multiple"), "pad the heads")
        )
    if spec.head_dim > limit("head_dim_max").number:
        found.append(_exceeded("head_dim", spec.head_dim, limit("head_dim_max")))
    elif spec.layout is Layout.PACKED and spec.head_dim > limit("head_dim_tnd_max").number:
        found.append(
            _exceeded(
                "head_dim", spec.head_dim, limit("head_dim_tnd_max"), "use a dense or paged cache"
            )
        )
    if spec.num_q_heads > limit("heads_max").number:
        found.append(
            _exceeded("num_q_heads", spec.num_q_heads, limit("heads_max"), "shard the heads")
        )
    if spec.group > limit("group_max").number:
        found.append(
            _exceeded("query heads per kv head", spec.group, limit("group_max"), "shard the heads")
        )
    if spec.page_size is not None:
        found += _page_refusals(spec, spec.page_size)
    return found


def _page_refusals(spec: DecodeSpec, page: int) -> list[str]:
    found = []
    for name in ("page_multiple", "page_max"):
        allowed = limit(name)
        if page % allowed.number if name == "page_multiple" else page > allowed.number:
            found.append(_exceeded("page_size", page, allowed, "use pages of 128 tokens"))
    row = spec.num_kv_heads * spec.head_dim
    if spec.layout is Layout.NHD and row > limit("cache_row_max").number:
        found.append(
            _exceeded("kv heads x head_dim", row, limit("cache_row_max"), "use layout HND")
        )
    return found


def _exceeded(name: str, value: int, allowed: Limit, remedy: str | None = None) -> str:
    advice = f"; {remedy}" if remedy else ""
    return f"{name} {value}: {allowed.says} ({allowed.source}){advice}"


def page_warning(page: int) -> str | None:
    """Why a page size is doubtful although it is documented, or None."""
    proven = limit("page_proven")
    if page == proven.number:
        return None
    advice = "compare with `splitkv parity` before relying on it"
    return f"page size {page}: {proven.says} ({proven.source}); {advice}"
