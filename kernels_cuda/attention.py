"""A call's kernels in order: later starts, splits, then the merge of those that share a request."""

from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.bound import Bound, bind_launches, can_start, facts
from splitkv.kernels_cuda.latent import latent, latent_launch
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.merge import merge_launch
from splitkv.kernels_cuda.plan import DevicePlan, capturing
from splitkv.kernels_cuda.split_launch import split_launch
from splitkv.kernels_cuda.starts import clip_launch
from splitkv.kernels_cuda.states import Destination, Workspace


def attention_launches(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: Tensor | None = None
) -> list[Launch]:
    """What is launched for ``call``; sinks [H] enter where a request is finished.

    A launch that is being captured covers the plan's capacity, since a refresh may use all of it.
    """
    return _launches(call, plan, destination, sinks)[0]


def attend(
    call: DecodeCall,
    plan: DevicePlan,
    destination: Destination,
    sinks: Tensor | None = None,
    memo: dict[object, object] | None = None,
) -> None:
    """Compute ``call`` by ``plan`` into ``destination``.

    memo: where calls by this plan are kept for those like them; None: this one has no like.
    """
    device = call.q.device
    found = None
    if memo is not None and call.kv_start is None and can_start(device):
        found = facts(call, plan, destination, sinks)
    if memo is None or found is None:
        for launch in _launches(call, plan, destination, sinks)[0]:
            launch.run(device)
        return
    key, pointers = found
    known = memo.get(key)
    if isinstance(known, Bound) and known.start(device.index, pointers):
        return
    launches, workspace = _launches(call, plan, destination, sinks)
    compiled = {launch: launch.run(device) for launch in launches}
    if key not in memo:
        memo[key] = bind_launches(compiled, call, plan, workspace, destination, sinks)


def _launches(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: Tensor | None
) -> tuple[list[Launch], Workspace]:
    if capturing(call.q.device):
        plan = plan.refreshable()
    workspace = Workspace.empty(call.spec, plan.num_slots, call.q.device)
    launches = []
    if call.kv_start is not None:
        clip, plan = clip_launch(call, plan)
        launches.append(clip)
    launch_splits = latent_launch if latent(call.spec) else split_launch
    launches.append(launch_splits(call, plan, workspace, destination, sinks))
    if plan.num_slots:
        launches.append(merge_launch(call, plan, workspace, destination, sinks))
    return launches, workspace
