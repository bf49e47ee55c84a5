"""Every rank of the rank tests: runs the cases of its world size and writes what it got.

Started as ``python rank_worker.py FOLDER``; ``test_ranks.py`` looks at the results.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import splitkv
from splitkv.common.ranks import merge_across_ranks, shard_lengths, shard_windows
from splitkv.common.state import PartialState, finish

WORLDS = (2, 4)
Result = dict[str, Any]
CASES: dict[str, tuple[tuple[int, ...], Callable[[int, int], Result]]] = {}


def case(*worlds: int) -> Callable[[Callable[[int, int], Result]], Callable[[int, int], Result]]:
    """Register a case for these numbers of ranks."""

    def register(run: Callable[[int, int], Result]) -> Callable[[int, int], Result]:
        CASES[run.__name__] = (worlds, run)
        return run

    return register


def parts(state: PartialState) -> Result:
    return {"max": state.max, "lse": state.lse, "out": state.out}


def random_state(rank: int, *shape: int, dim: int = 5) -> PartialState:
    random = torch.Generator().manual_seed(rank)
    lse = torch.randn(shape, generator=random) * 20
    return PartialState(lse - 0.5, lse, torch.randn(*shape, dim, generator=random))


def history(tokens: int, kv_heads: int, dim: int, dim_v: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    k = torch.randn(tokens, kv_heads, dim, generator=random, dtype=torch.float64)
    return k, torch.randn(tokens, kv_heads, dim_v, generator=random, dtype=torch.float64)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, splitkv.UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@contextmanager
def counted(name: str) -> Iterator[list[Tensor]]:
    """What is sent through the collective ``name`` of torch.distributed."""
    sent: list[Tensor] = []
    collective = getattr(dist, name)

    def call(output: Tensor, tensor: Tensor, **how: Any) -> object:
        sent.append(tensor)
        return collective(output, tensor, **how)

    with mock.patch.object(dist, name, call):
        yield sent


@case(2, 4)
def replicated(rank: int, world: int) -> Result:
    with counted("all_gather_into_tensor") as sent:
        merged = merge_across_ranks(random_state(rank, 3, 2, 8))
    return {**parts(merged), "sent": [(list(x.shape), x.dtype) for x in sent]}


@case(2, 4)
def head_sharded(rank: int, world: int) -> Result:
    with counted("all_to_all_single") as sent:
        merged = merge_across_ranks(random_state(rank, 3, 2, 8), layout="head_sharded")
    return {**parts(merged), "sent": [(list(x.shape), x.dtype) for x in sent]}


@case(2, 4)
def float64_and_strided(rank: int, world: int) -> Result:
    state = random_state(rank, 8, 3)
    turned = PartialState(
        state.max.double().T, state.lse.double().T, state.out.double().transpose(0, 1)
    )
    return parts(merge_across_ranks(turned))


@case(2, 4)
def no_request(rank: int, world: int) -> Result:
    return parts(merge_across_ranks(PartialState.empty((0, 8), 4)))


@case(2, 4)
def one_rank_has_all(rank: int, world: int) -> Result:
    state = random_state(1, 3, 8) if rank == 1 else PartialState.empty((3, 8), 5)
    return parts(merge_across_ranks(state))


@case(2, 4)
def refusals(rank: int, world: int) -> Result:
    state = PartialState.empty((3, 6), 4)
    return {
        "heads": refused(
            lambda: merge_across_ranks(PartialState.empty((1, 7), 4), layout="head_sharded")
        ),
        "layout": refused(lambda: merge_across_ranks(state, layout="sharded")),  # type: ignore[arg-type]
        "unknown algo": refused(lambda: merge_across_ranks(state, algo="gossip")),
        **{
            algo: refused(lambda algo=algo: merge_across_ranks(state, algo=algo))  # type: ignore[misc]
            for algo in ("all_reduce", "ring", "tree")
        },
    }


@case(4)
def n02_ranks_without_keys(rank: int, world: int) -> Result:
    lengths, page = [1, 2, 3, 0], 16
    random = torch.Generator().manual_seed(3)
    q = torch.randn(4, 8, 64, generator=random, dtype=torch.float64)
    k, v = history(4 * 3, 1, 64, 64)
    local = shard_lengths(lengths, world, rank)
    pages_k, pages_v = (torch.full((4, page, 1, 64), torch.nan, dtype=torch.float64) for _ in "kv")
    for request, count in enumerate(local.tolist()):
        mine = [request * 3 + rank + world * slot for slot in range(count)]
        pages_k[request, :count], pages_v[request, :count] = k[mine], v[mine]
    state = splitkv.partial_attention(
        q,
        pages_k,
        pages_v,
        layout="NHD",
        block_table=torch.arange(4, dtype=torch.int32)[:, None],
        seq_lens=local.tolist(),
    )
    unwritten = state.out.masked_fill((state.lse == -torch.inf)[..., None], torch.nan)
    merged = merge_across_ranks(PartialState.from_lse(unwritten, state.lse))
    single = splitkv.partial_attention(
        q, k.view(4, 3, 1, 64), v.view(4, 3, 1, 64), layout="BSND", seq_lens=lengths
    )
    return {**parts(merged), "single": parts(single)}


@case(2)
def n06_a_window_over_ranks(rank: int, world: int) -> Result:
    length, window = 64, 16
    found: Result = {}
    for name, interleave in (("halves", 32), ("one by one", 1), ("blocks of 16", 16)):
        position = torch.arange(length)
        mine = position[(position // interleave) % world == rank].float()
        [visible] = shard_windows([length], window, world, rank, interleave).tolist()
        state = PartialState.empty((1, 2), 16)
        if visible:
            state = splitkv.partial_attention(
                torch.zeros(1, 2, 16),
                torch.ones(1, len(mine), 2, 16),
                mine[None, :, None, None].expand(1, -1, 2, 16),
                layout="BSND",
                sliding_window=visible,
            )
        found[name] = parts(merge_across_ranks(state))
    return found


@case(4)
def j06_one_sink_for_all_ranks(rank: int, world: int) -> Result:
    state = splitkv.partial_attention(
        torch.zeros(1, 1, 2, 16), torch.ones(1, 1, 1, 16), torch.ones(1, 1, 1, 16), layout="BSND"
    )
    out, lse = finish(merge_across_ranks(state), sinks=torch.zeros(2))
    return {"out": out, "lse": lse}


@case(2)
def k07_v_narrower_than_k(rank: int, world: int) -> Result:
    random = torch.Generator().manual_seed(3)
    q = torch.randn(1, 2, 64, 192, generator=random, dtype=torch.float64)
    k, v = (x[None] for x in history(17, 4, 192, 128))
    mine = slice(0, 10) if rank == 0 else slice(10, 17)
    # both queries see all of rank 0's keys; rank 1 holds the newest, where the mask cuts
    state = splitkv.partial_attention(q, k[:, mine], v[:, mine], layout="BSND", causal=rank == 1)
    single = splitkv.partial_attention(q, k, v, layout="BSND")
    return {**parts(merge_across_ranks(state)), "single": parts(single)}


@case(2)
def b13_lse_travels_in_float32(rank: int, world: int) -> Result:
    pairs = torch.tensor([[1000.0, 999.0], [70000.0, 69999.0], [12.34, 12.3]])
    lse = pairs[:, rank, None]
    state = PartialState(lse, lse, torch.full((3, 1, 1), 1.0 - rank))
    with counted("all_gather_into_tensor") as sent:
        merged = merge_across_ranks(state)
    return {**parts(merged), "pairs": pairs, "sent": [x.dtype for x in sent]}


def own_groups(rank: int, world: int, groups: dict[str, Any]) -> Result:
    """Groups of the caller's making; they exist before the library is asked."""
    found: Result = {
        "alone": refused(lambda: merge_across_ranks(random_state(rank, 3, 8), groups["zero"]))
    }
    if rank == 0:
        found["alone"] = parts(merge_across_ranks(random_state(rank, 3, 8), groups["zero"]))
    if "mesh" in groups:
        state = random_state(rank, 3, 8)
        found["cp"] = parts(merge_across_ranks(state, groups["cp"]))
        found["dp"] = parts(merge_across_ranks(state, groups["dp"]))
        found["mesh"] = refused(lambda: merge_across_ranks(state, groups["mesh"]))
    return found


def run_rank(rank: int, world: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / f'rendezvous{world}'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    groups: dict[str, Any] = {"zero": dist.new_group([0])}
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        groups |= {"mesh": mesh, "dp": mesh["dp"], "cp": mesh["cp"]}
    makes_none = mock.Mock(side_effect=AssertionError("the library made a process group"))
    with mock.patch.multiple(dist, new_group=makes_none, init_process_group=makes_none):
        results = {
            name: run(rank, world) for name, (worlds, run) in CASES.items() if world in worlds
        }
        results["own_groups"] = own_groups(rank, world, groups)
    torch.save(results, folder / f"{world}ranks{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Fork the ranks of each world, so that torch is imported once; 0 if all of them ended well."""
    fork = get_context("fork")
    for world in WORLDS:
        ranks = [
            fork.Process(target=run_rank, args=(rank, world, Path(sys.argv[1])))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
