"""Captured graphs: ``torch.npu.NPUGraph``, ``torch.npu.graph``, the ``.out`` forms of FIA and their
workspaces.

A graph is a tape of operators that run again on the same memory. Sizes of workspaces are made up;
that they grow with the lengths is what is modelled.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from splitkv.kernels_ascend.standin.checks import batch_size, head_dims
from splitkv.kernels_ascend.standin.device import Taped, taping
from splitkv.kernels_ascend.standin.fused_call import FusedCall, from_v1, from_v2
from splitkv.kernels_ascend.standin.fused_infer import fused_infer_v1, fused_infer_v2
from splitkv.kernels_ascend.standin.refusal import refuse

_HANDLED = {
    "npu::npu_fused_infer_attention_score": ("actual_seq_lengths", "actual_seq_lengths_kv"),
    "npu::npu_fused_infer_attention_score_v2": ("actual_seq_qlen", "actual_seq_kvlen"),
}
"""Operators whose host lengths can be handed over anew, and the keywords."""


class NPUGraph:
    """A tape of operators."""

    def __init__(self) -> None:
        self.tape: list[Taped] = []
        self.updatable = False

    def replay(self) -> None:
        """Run the tape; host lengths are those of the capture or of the last update."""
        for taped in self.tape:  # quirk: capture-bakes-lengths
            taped.replay()

    def update(self, cpu_update_input: Sequence[Mapping[str, Any]]) -> None:
        """Hand over host lengths, one entry for all recorded operators or one each.

        Raises:
            RuntimeError: the graph was captured without ``auto_dispatch_capture``.
            ValueError: another number of entries, or a keyword that cannot be updated.
        """
        if not self.updatable:
            raise RuntimeError("update needs auto_dispatch_capture=True at capture")
        handled = [one for one in self.tape if one.name.removesuffix(".out") in _HANDLED]
        entries = list(cpu_update_input)
        if len(entries) not in (1, len(handled)):  # quirk: capture-update-count
            raise ValueError(
                f"Currently, there are {len(handled)} operators, got {len(entries)} entries"
            )
        entries = entries * len(handled) if len(entries) == 1 else entries
        for taped, entry in zip(handled, entries, strict=True):
            allowed = _HANDLED[taped.name.removesuffix(".out")]
            if unknown := set(entry) - set(allowed):
                raise ValueError(f"{taped.name}: {unknown} cannot be updated, only {allowed}")
            taped.arguments.update({name: list(value) for name, value in entry.items()})


@contextmanager
def graph(
    npu_graph: NPUGraph,
    pool: Any = None,
    stream: Any = None,
    auto_dispatch_capture: bool = False,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Capture what runs inside the block."""
    npu_graph.tape.clear()
    npu_graph.updatable = auto_dispatch_capture
    with taping(npu_graph.tape):
        yield


def _workspace_bytes(call: FusedCall) -> int:
    lengths = call.kv_lens or [call.key.shape[1]]
    parts = sum(-(-length // 512) for length in lengths) + batch_size(call)
    return int(parts * call.num_heads * (head_dims(call)[2] + 2) * 4)


def _max_workspace(read: Callable[[Mapping[str, Any]], FusedCall]) -> Callable[..., Tensor]:
    def kernel(given: Mapping[str, Any]) -> Tensor:
        # as many elements as bytes are needed, in the query's dtype
        query: Tensor = given["query"]
        return query.new_empty(_workspace_bytes(read(given)))

    return kernel


def _into(
    name: str,
    read: Callable[[Mapping[str, Any]], FusedCall],
    compute: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]],
) -> Callable[..., Any]:
    def kernel(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        given = dict(given)
        workspace, out = given.pop("workspace"), given.pop("out")
        needed = _workspace_bytes(read(given))
        if workspace is not None and workspace.numel() * workspace.element_size() < needed:
            # quirk: out-workspace-unchecked (a device writes past its end)
            refuse(name, f"workspace of {workspace.numel()} elements, {needed} bytes are needed")
        for target, value in zip(out, compute(given), strict=True):
            if value.numel():
                if target.shape != value.shape or target.dtype != value.dtype:
                    refuse(name, f"out {list(target.shape)} is not {list(value.shape)}")
                target.copy_(value)
        return out[0], out[1]

    return kernel


_V1, _V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
KERNELS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    f"{_V1}.out": _into(_V1, from_v1, fused_infer_v1),
    f"{_V2}.out": _into(_V2, from_v2, fused_infer_v2),
    f"_{_V1}_get_max_workspace": _max_workspace(from_v1),
    f"_{_V2}_get_max_workspace": _max_workspace(from_v2),
}
