"""A call's kernels in order: splits, then the merge of those that share a request."""

from torch import Tensor

from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.merge import merge_launch
from splitkv.kernels_cuda.plan import DevicePlan, capturing
from splitkv.kernels_cuda.split import split_launch
from splitkv.kernels_cuda.states import Destination, Workspace


def attention_launches(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: Tensor | None = None
) -> list[Launch]:
    """What is launched for ``call``; sinks [H] enter where a request is finished.

    A launch that is being captured covers the plan's capacity, since a refresh may use all of it.
    """
    if capturing(call.q.device):
        plan = plan.refreshable()
    workspace = Workspace.empty(call.spec, plan.num_slots, call.q.device)
    launches = [split_launch(call, plan, workspace, destination, sinks)]
    if plan.num_slots:
        launches.append(merge_launch(call, plan, workspace, destination, sinks))
    return launches


def attend(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: Tensor | None = None
) -> None:
    """Compute ``call`` by ``plan`` into ``destination``."""
    for launch in attention_launches(call, plan, destination, sinks):
        launch.run(call.q.device)
