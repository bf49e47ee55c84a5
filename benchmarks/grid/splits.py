"""Our split kernel without the merge, to tell how much of a step the merge is."""

from functools import partial

import torch
from torch import Tensor

from splitkv.backends.base import Backend
from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate
from splitkv.common.cache import Cache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan


def splits_only(step: Step, backend: Backend, plan: SplitPlan) -> Candidate | None:
    """The first launch of a call; None where a call is not several launches.

    A captured call merges even if its plan splits nothing yet: a refreshed plan may.
    """
    if backend.name != "cuda":
        return None
    from splitkv.kernels_cuda.attention import attention_launches
    from splitkv.kernels_cuda.plan import bind
    from splitkv.kernels_cuda.states import Destination

    out = torch.empty_like(step.q[:, None])
    lse = torch.empty(step.shape.batch, 1, step.shape.heads, device=step.device)
    on_device = bind(plan, step.device)

    def call(cache: Cache) -> Tensor:
        request = DecodeCall(step.q[:, None], cache, step.spec)
        attention_launches(request, on_device, Destination(out, lse))[0].run(step.device)
        return out

    return Candidate([partial(call, cache) for cache in step.caches])
