"""What speaks against a call's tensors and row sizes, said before anything is launched."""

import warnings
from collections.abc import Sequence
from typing import NoReturn

from splitkv.common.cache import Cache, DenseCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.support import UnsupportedError
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.host_facts import HostFacts
from splitkv.kernels_ascend.limits import Facts, limit, violations
from splitkv.kernels_ascend.pieces import Piece
from splitkv.kernels_ascend.pools import page_size_of, page_step
from splitkv.kernels_ascend.routes import (
    FIA_MLA,
    FIA_ROWS,
    FIA_TND,
    OWN,
    PAGED_ATTENTION,
    Route,
    Wants,
    choose,
    odd_bytes,
    page_warning,
)


def tensor_refusals(call: DecodeCall, plan: SplitPlan, wants: Wants) -> list[str]:
    """Every reason against this call's strides, sizes and cuts: value, limit, what to do."""
    route = choose(call.spec, wants).route
    if route is None:
        return []  # the spec's own refusals say more
    if route is OWN:
        return own.tensor_refusals(call)
    if route is FIA_MLA:
        return _latent_refusals(call)
    reasons = _memory_refusals(call)
    if not route.state and plan.max_splits > 1:
        reasons.append(
            f"{plan.max_splits} splits of a request: {route.operator} reports no state to merge "
            "them by; plan with num_splits=1"
        )
    if route is PAGED_ATTENTION and page_step(call.cache.k) not in (1, None):
        reasons.append(
            "pages of k and v alternate in one pool: ATB copies a strided cache whole (4.12); keep "
            "K and V as tensors of their own"
        )
    if route in (FIA_ROWS, FIA_TND):
        reasons += _capacity_refusals(call, plan)
    return reasons


def takes_whole_cache(call: DecodeCall, plan: SplitPlan) -> bool:
    """One query per request, no window, no cut: FIA reads the dense cache as it lies."""
    spec = call.spec
    single = (
        isinstance(call.cache, DenseCache) and spec.num_queries == 1 and not spec.packed_queries
    )
    return single and spec.sliding_window is None and plan.max_splits <= 1


def _memory_refusals(call: DecodeCall) -> list[str]:
    cache = call.cache
    steps = [
        page_step(tensor) if isinstance(cache, PagedCache) else 1 for tensor in (cache.k, cache.v)
    ]
    reasons = []
    for name, tensor, step in zip("kv", (cache.k, cache.v), steps, strict=True):
        torn = step is None if isinstance(cache, PagedCache) else not tensor.is_contiguous()
        if torn:
            reasons.append(
                f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}: the "
                "operator reads contiguous tensors (or whole pages) and does not copy (vllm-ascend "
                "issue 11790); keep K and V as tensors of their own"
            )
        elements, allowed = tensor.numel() * (step or 1), limit("kv_elements_max")
        if elements > allowed.number:
            reasons.append(
                f"{name} spans {elements} elements: {allowed.says} ({allowed.source}); "
                f"{allowed.advice}"
            )
    if None not in steps and steps[0] != steps[1]:
        reasons.append(
            f"pages of k lie {steps[0]} apart, pages of v {steps[1]}: one table serves both"
        )
    return reasons


def _latent_refusals(call: DecodeCall) -> list[str]:
    """The values of absorbed MLA are the first columns of its keys, which only memory can prove."""
    k, v = call.cache.k, call.cache.v
    if v.data_ptr() == k.data_ptr() and v.stride() == k.stride():
        return []
    return [
        f"v is not k[..., :{call.spec.head_dim_v}]: the operator takes the latent for keys and "
        "values at once, so that v must be that view of k and no tensor of its own"
    ]


def _capacity_refusals(call: DecodeCall, plan: SplitPlan) -> list[str]:
    """Reasons against T of a dense cache."""
    if not isinstance(call.cache, DenseCache) or not call.batch or not call.cache.capacity:
        return []
    capacity, longest = call.cache.capacity, limit("keys_per_row_max")
    if takes_whole_cache(call, plan):
        if capacity <= longest.number:
            return []
        return [f"T {capacity}: {longest.says} ({longest.source}); cut with num_splits"]
    if page_size_of(call.cache) is not None:
        return []
    return [
        f"T {capacity} of the dense cache is not a multiple of {limit('page_multiple').number}, so "
        "that windows, splits and several queries cannot be expressed as pages of it; allocate T "
        "in multiples of 128"
    ]


def check_rows(
    spec: DecodeSpec,
    wants: Wants,
    route: Route,
    pieces: Sequence[Piece],
    *,
    layout: str,
    fold: int = 1,
    causal: bool = False,
    page_size: int | None = None,
    listed: bool = True,
) -> None:
    """Hold the rows of one operator call against the limits; listed: it is given length lists.

    Raises:
        UnsupportedError: with every limit that they exceed.
    """
    reasons: dict[str, None] = {}
    for several in (False, True):
        of_kind = [piece for piece in pieces if (piece.count > 1) is several]
        if of_kind:
            facts = Facts(
                operator=route.operator,
                soc=wants.soc,
                layout=layout,
                rope_dim=0,
                page_size=page_size,
                rows=len(pieces) * fold,
                entries=len(pieces) * fold * listed,
                odd_bytes=odd_bytes(spec),
                queries=max(piece.count for piece in of_kind),
                tokens=sum(piece.count for piece in pieces) * fold,
                keys=max(piece.length for piece in of_kind),
                sparse_mode=3 if causal else 0,
                mask="compressed" if causal else "none",
                inner_precise=0,
            )
            reasons |= dict.fromkeys(violations(facts, strict=wants.strict))
    if reasons:
        refuse(spec, *reasons)


def refuse(spec: DecodeSpec, *reasons: str) -> NoReturn:
    """Raise UnsupportedError with every reason on a line of its own."""
    lines = [
        f"backend 'ascend' does not take these tensors for {spec}",
        *(f"    - {reason}" for reason in reasons),
    ]
    raise UnsupportedError("\n".join(lines))


def warn_of_page_size(page_size: int) -> None:
    """Say once per place why a page size other than 128 is doubtful."""
    text = page_warning(page_size)
    if text is not None:
        warnings.warn(text, stacklevel=2)


def lie_of(cache: Cache) -> tuple[object, ...]:
    """How K and V lie, all that ``tensor_refusals`` looks at: equal for caches that it answers
    alike. v may be a view of k.
    """
    k, v = cache.k, cache.v
    return k.shape, k.stride(), v.shape, v.stride(), k.data_ptr() == v.data_ptr()


def check_planned(facts: HostFacts, plan: SplitPlan) -> None:
    """Raise ValueError where a length, known to the host by now, is above the plan's."""
    planned = zip(facts.lengths, plan.seq_lens.tolist(), strict=True)
    for index, (length, most) in enumerate(planned):
        if length > most:
            raise ValueError(
                f"seq_lens[{index}] is {length}, the plan was made for {most}; "
                "call plan.refresh(seq_lens)"
            )
