"""One history over several ranks: each rank leaves a state, and all states merge into one.

Ownership is in blocks of ``interleave`` tokens dealt out in turn: position g belongs to rank
(g // interleave) % world. A rank keeps its positions in rising order, so what it holds of the first
n positions is a prefix of its cache. Causal bounds are global: several queries of one request are
first written out as one length per query, and those lengths are localised.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from splitkv.common.state import PartialState, merge_states_torch
from splitkv.common.support import No, UnsupportedError, Why
from splitkv.common.visibility import IntArray, as_lengths

if TYPE_CHECKING:  # builds of torch without torch.distributed have neither
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

RankLayout = Literal["replicated", "head_sharded"]
Positions = TypeVar("Positions", int, IntArray, Tensor)

_LAYOUTS = ("replicated", "head_sharded")
_ALGORITHMS: dict[str, No | None] = {
    "gather": None,
    "all_reduce": No(
        Why.NEVER,
        "the library behind the group picks the order of the additions, "
        "so the bits could change with the number of ranks or the route",
        "use algo='gather'",
    ),
    "ring": No(
        Why.NOT_YET,
        "it sends world - 1 messages one after the other where gather sends one",
        "use algo='gather'",
    ),
    "tree": No(
        Why.NOT_YET,
        "it sends log2(world) messages one after the other where gather sends one",
        "use algo='gather'",
    ),
}


def merge_across_ranks(
    state: PartialState,
    group: "ProcessGroup | DeviceMesh | None" = None,
    *,
    algo: str = "gather",
    layout: RankLayout = "replicated",
) -> PartialState:
    """Merge each rank's state of the same queries over its own share of the keys.

    Every rank of the group calls it. State and LSE travel in one message, unrounded, and are merged
    in rank order. Sinks enter afterwards, once, through ``finish``.

    state: max, lse [..., H], out [..., H, Dv], of one shape and dtype on all ranks; a rank without
    keys passes ``PartialState.empty``. group: of the caller's making (None: the default group; a
    ``DeviceMesh`` of one dimension: its group). layout: "replicated" gives every rank all heads,
    the same bits on each; "head_sharded" gives rank r the r-th of ``world`` equal runs of heads,
    with the bits that "replicated" has there.

    Raises:
        ValueError: no process group, a rank outside of it, H that world does not divide, or an
            unknown name.
        UnsupportedError: a known ``algo`` that is not offered, with the reason.
    """
    _check_names(algo, layout)
    members = _process_group(group)
    world, heads = dist.get_world_size(members), state.lse.shape[-1]
    if layout == "replicated":
        gathered = _gather(_pack(state), world, members)
    elif heads % world:
        raise ValueError(f"layout 'head_sharded' cuts H into {world} ranks, H = {heads} is not")
    else:
        gathered = _exchange_heads(_pack(state), world, members)
    return merge_states_torch([_unpack(part) for part in gathered])


def owner(position: Positions, world: int, interleave: int = 1) -> Positions:
    """Rank that keeps ``position`` (int, array or tensor): (position // interleave) % world."""
    _check_ranks(world, 0, interleave)
    return (position // interleave) % world


def shard_lengths(
    seq_lens: Sequence[int] | IntArray, world: int, rank: int, interleave: int = 1
) -> IntArray:
    """How many of the first ``seq_lens`` positions ``rank`` keeps, int64 [B].

    With L = seq_lens, W = world, I = interleave it is
    L // (W * I) * I + clamp(L % (W * I) - rank * I, 0, I), which sums to L over the ranks. For
    several queries give one length per query: local bounds do not step by one with global ones.

    Raises:
        ValueError: negative lengths, ``rank`` not in 0 to world - 1, or ``interleave`` below 1.
    """
    _check_ranks(world, rank, interleave)
    lengths = as_lengths("seq_lens", seq_lens)
    cycle = world * interleave
    whole = lengths // cycle * interleave
    return whole + np.clip(lengths % cycle - rank * interleave, 0, interleave)


def shard_windows(
    seq_lens: Sequence[int] | IntArray,
    sliding_window: int,
    world: int,
    rank: int,
    interleave: int = 1,
) -> IntArray:
    """How many of its last positions ``rank`` shows to the query at seq_len - 1, int64 [B].

    The window is global, the positions from L - W on: shard_lengths(L) - shard_lengths(L - W).
    Where it is 0 the rank's state is empty.

    Raises:
        ValueError: as for ``shard_lengths``, or ``sliding_window`` below 1.
    """
    if sliding_window < 1:
        raise ValueError(f"sliding_window must be 1 or more, got {sliding_window}")
    lengths = as_lengths("seq_lens", seq_lens)
    before = np.maximum(lengths - sliding_window, 0)
    kept = shard_lengths(lengths, world, rank, interleave)
    return kept - shard_lengths(before, world, rank, interleave)


def _check_names(algo: str, layout: str) -> None:
    if algo not in _ALGORITHMS:
        raise ValueError(f"unknown algo {algo!r}, known: {list(_ALGORITHMS)}")
    if (no := _ALGORITHMS[algo]) is not None:
        raise UnsupportedError(f"merge_across_ranks does not take algo={algo!r}: {no}")
    if layout not in _LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}, known: {list(_LAYOUTS)}")


def _check_ranks(world: int, rank: int, interleave: int) -> None:
    if world < 1 or interleave < 1:
        raise ValueError(f"world and interleave must be 1 or more, got {world} and {interleave}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be 0 to {world - 1}, got {rank}")


def _process_group(group: "ProcessGroup | DeviceMesh | None") -> "ProcessGroup":
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension, got {group.ndim}; "
                f"choose one of {group.mesh_dim_names}: mesh[name]"
            )
        return group.get_group()
    members = dist.group.WORLD if group is None else group
    assert members is not None
    if dist.get_rank(members) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not a member of the group")
    return members


def _pack(state: PartialState) -> Tensor:
    """[..., H, Dv + 2]: max, lse and out of a row together."""
    return torch.cat([state.max[..., None], state.lse[..., None], state.out], -1)


def _unpack(packed: Tensor) -> PartialState:
    return PartialState(packed[..., 0], packed[..., 1], packed[..., 2:])


def _gather(packed: Tensor, world: int, members: "ProcessGroup") -> Tensor:
    """[world, ..., H, Dv + 2], in rank order."""
    gathered = packed.new_empty((world, *packed.shape))
    dist.all_gather_into_tensor(gathered.view(-1), packed.view(-1), group=members)
    return gathered


def _exchange_heads(packed: Tensor, world: int, members: "ProcessGroup") -> Tensor:
    """[world, ..., H / world, Dv + 2]: this rank's heads of every rank's state, in rank order."""
    outgoing = packed.unflatten(-2, (world, -1)).movedim(-3, 0).contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), group=members)
    return incoming
