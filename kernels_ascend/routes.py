"""Which operator layout serves a spec, and what the operators refuse of it: facts of the spec
alone, no device needed.
"""

from dataclasses import dataclass

import torch

from splitkv.common.spec import DecodeSpec, Layout
from splitkv.common.support import dtype_name
from splitkv.kernels_ascend.limits import Limit, limit


@dataclass(frozen=True, slots=True)
class Route:
    """How one spec reaches the operator.

    single: the input_layout for rows of one query. shares: whether queries of a request may share a
    row, in layout TND. folds: whether each kv head becomes a request of its own (a dense BNSD
    cache, whose pages would otherwise not be contiguous). text: for people.
    """

    single: str
    shares: bool
    folds: bool
    text: str


def route_of(spec: DecodeSpec) -> Route:
    """The route of ``spec``.

    A paged NHD pool is the operator's 3-D cache, an HND pool its 4-D one, and a dense cache a 3-D
    one whose table counts up. Several queries share a row where the documentation of layout TND
    covers the call, else each is a row.
    """
    if spec.layout is Layout.PACKED:
        return Route("TND", True, False, "FIA v2, TND, keys one request after the other")
    single = "BNSD" if spec.layout is Layout.HND else "BSND"
    form = {
        Layout.NHD: "3-D cache [pages, P, K*D]",
        Layout.HND: "4-D cache [pages, K, P, D]",
        Layout.BSND: "dense cache, or its 3-D page view",
        Layout.BNSD: "dense cache, or its 3-D page view with a request per kv head",
    }[spec.layout]
    paged = spec.page_size is None or spec.page_size % limit("page_multiple_many").number == 0
    shares = spec.num_queries > 1 and paged and not _tnd_refusals(spec)
    call = "FIA v2, TND" if shares else f"FIA v1, {single}"
    rows = "queries of a request share rows" if shares else "one query per row"
    return Route(single, shares, spec.layout is Layout.BNSD, f"{call}, {form}, {rows}")


def _tnd_refusals(spec: DecodeSpec) -> list[str]:
    """What the documentation of layout TND does not cover of ``spec``."""
    found = []
    if spec.dtype is not torch.bfloat16:
        found.append(
            f"dtype {dtype_name(spec.dtype)}: layout TND takes bfloat16 (torch documentation of "
            "FIA v2, TND section)"
        )
    if spec.head_dim not in limit("tnd_head_dims").choices:
        found.append(_exceeded("head_dim", spec.head_dim, limit("tnd_head_dims")))
    return found


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
    if spec.layout is Layout.PACKED:
        found += [
            f"packed cache: {reason}; use a dense or paged cache" for reason in _tnd_refusals(spec)
        ]
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
