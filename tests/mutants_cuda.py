"""Bugs to plant in the CUDA kernels' launches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mutants import Mutant, Patch, interleaved, sink_per_split
from splitkv.backends.cuda import CudaBackend


def _changed_arguments(change: Callable[[dict[str, Any]], None]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        from splitkv.kernels_cuda import attention

        right = attention.split_launch

        def launch(*args: Any) -> Any:
            made = right(*args)
            arguments = dict(made.arguments)
            change(arguments)
            return replace(made, arguments=arguments)

        patch.setattr(attention, "split_launch", launch)

    plant.__name__ = change.__name__
    return plant


def window_one_wider(arguments: dict[str, Any]) -> None:
    if arguments["WINDOW"]:
        arguments["window"] += 1


def window_of_tokens(arguments: dict[str, Any]) -> None:
    """Of so few tokens that no page is read which nobody may read: that would end the process."""
    arguments["window"] -= arguments["WINDOW_BLOCK"] - 1
    arguments["WINDOW_BLOCK"] = 1


def next_page(arguments: dict[str, Any]) -> None:
    if (table := arguments["block_table"]) is not None:
        arguments["block_table"] = (table + 1) % arguments["k"].shape[0]


def interleaved_heads(arguments: dict[str, Any]) -> None:
    q: Tensor = arguments["q"]
    assert q.is_contiguous()
    arguments["q"] = interleaved(q, arguments["kv_heads"]).contiguous()


def plain_average(patch: Patch) -> None:
    from splitkv.kernels_cuda import attention

    right = attention.merge_launch

    def launch(call: Any, plan: Any, workspace: Any, *rest: Any) -> Any:
        made = right(call, plan, workspace, *rest)

        class Unweighted:
            def run(self, device: torch.device) -> None:
                workspace.lse.copy_(torch.where(workspace.lse == -torch.inf, workspace.lse, 0.0))
                made.run(device)

        return Unweighted()

    patch.setattr(attention, "merge_launch", launch)


MUTANTS = (
    Mutant(
        plain_average,
        touched=("splits-page-3", "anchors"),
        broken=("paged cache (NHD, HND)", "anchor tokens with a window"),
    ),
    Mutant(
        _changed_arguments(window_one_wider),
        touched=("window-128", "anchors"),
        broken=("sliding window", "anchor tokens with a window"),
        spared=("sinks",),
        whole=("learned sinks",),
    ),
    Mutant(
        _changed_arguments(window_of_tokens),
        touched=("chunks", "blocks-fp32"),
        broken=("window that begins at blocks (chunked attention)",),
        spared=("window-128", "anchors"),
        whole=("anchor tokens with a window",),
    ),
    Mutant(
        _changed_arguments(next_page),
        touched=("page-16", "sinks"),
        broken=("paged cache (NHD, HND)", "learned sinks"),
        spared=("layout-packed-fp32",),
        whole=("packed cache (cu_seqlens_k)",),
    ),
    Mutant(
        _changed_arguments(interleaved_heads),
        touched=("group-3", "sinks"),
        broken=("paged cache (NHD, HND)", "learned sinks"),
        spared=("group-1",),
    ),
    Mutant(
        sink_per_split(CudaBackend),
        touched=("sinks",),
        broken=("learned sinks",),
        spared=("lengths-zero-between",),
    ),
)
