"""One layer: run the prepared launches, normalise what they report, merge what belongs to one
query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan
from splitkv.common.spec import DecodeSpec
from splitkv.common.state import PartialState
from splitkv.kernels_ascend import own
from splitkv.kernels_ascend.checks import check_planned, lie_of, refuse, tensor_refusals
from splitkv.kernels_ascend.host_facts import HostFacts, read_facts
from splitkv.kernels_ascend.lse import normalise
from splitkv.kernels_ascend.merge import merge
from splitkv.kernels_ascend.prepare import Prepared, prepare
from splitkv.kernels_ascend.routes import OWN, Wants, choose
from splitkv.kernels_ascend.runtime import is_capturing


def partial(call: DecodeCall, plan: SplitPlan, wants: Wants) -> PartialState:
    """The state of all queries of ``call`` over its cache; each launch's out was rounded to the
    query's dtype by the operator. The own kernel rounds nothing, and reads lengths on the device.

    Raises:
        UnsupportedError: a documented limit of the operators that only the tensors show; nothing
        was launched. RuntimeError: host facts are needed from the device while its stream is
        captured.
    """
    spec = call.spec
    if wants.route == OWN.name:
        return own.split_decode(call, plan)
    check_state(spec, wants)
    facts = read_facts(call, plan.bound)
    if not call.q.numel() or not any(facts.lengths):
        if reasons := tensor_refusals(call, plan, wants):  # as it will be refused with a key
            refuse(spec, *reasons)
        return PartialState.empty(call.rows, spec.head_dim_v, device=call.q.device)
    prepared = _prepared(call, plan, facts, wants)
    q = call.q.reshape(-1, spec.num_q_heads // prepared.fold, spec.head_dim).contiguous()
    results = [normalise(*launch.run(call, q)) for launch in prepared.launches]
    state = _merged(results, prepared.gather, q, spec.head_dim_v)
    shape = call.rows
    return PartialState(
        state.max.reshape(shape), state.lse.reshape(shape), state.out.reshape(*shape, -1)
    )


def check_state(spec: DecodeSpec, wants: Wants) -> None:
    """Raise unless the route that ``wants`` leads to reports states.

    Raises:
        UnsupportedError: it reports the output alone; a state is never made up.
    """
    route = choose(spec, wants).route
    if route is not None and not route.state:
        refuse(
            spec,
            f"a state is asked for, and route {route.name} ({route.operator}) gives the output "
            "alone; use decode, or a route with an LSE",
        )


def _prepared(call: DecodeCall, plan: SplitPlan, facts: HostFacts, wants: Wants) -> Prepared:
    key = ("ascend", call.spec, wants)
    made_for = (facts, call.q.shape, call.q.device, *lie_of(call.cache))
    bound = plan.bound.get(key)
    if not isinstance(bound, _Bound) or bound.made_for != made_for:
        if is_capturing():
            raise RuntimeError(
                "the stream is being captured, and this plan has not yet run for these lengths and "
                "shapes: run one call with it before the capture"
            )
        check_planned(facts, plan)
        bound = _Bound(made_for, prepare(call, plan, facts, wants))
        plan.bound[key] = bound
    return bound.prepared


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    made_for: tuple[object, ...]
    prepared: Prepared


def _merged(
    results: list[tuple[Tensor, Tensor]], gather: Tensor | None, q: Tensor, head_dim_v: int
) -> PartialState:
    """One state per slot, [slots, H]."""
    outs, lses = [out for out, _ in results], [lse for _, lse in results]
    if gather is None and results:
        out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (outs, lses))
        return PartialState(lse, lse, out)
    assert gather is not None
    nothing = PartialState.empty((1, q.shape[1]), head_dim_v, device=q.device)
    all_outs, all_lses = torch.cat([*outs, nothing.out]), torch.cat([*lses, nothing.lse])
    picked = [PartialState(all_lses[row], all_lses[row], all_outs[row]) for row in gather]
    return merge(picked)
