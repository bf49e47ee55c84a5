"""What is compiled on first use is compiled before the clock runs, in several processes at a time.

FlashInfer builds one module for each of its ways and head dim (dtypes are the same at every point,
heads and pages are arguments): minutes one after another. Our kernels differ by heads and layout.
All of them keep what they built on disk, where the process that measures finds it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import torch

from benchmarks.grid.measure import words
from benchmarks.grid.peers.protocol import Peer
from benchmarks.grid.points import PAGE_SIZES, Point
from splitkv.backends.registry import select
from splitkv.cli.bench_shapes import Shape, Step, ours, steps
from splitkv.cli.bench_timing import synchronize

_LENGTHS = ((256, 256), (300, 80))
"""Dense where all are equal, packed where they are not: the smallest that are cut in two."""


@dataclass(frozen=True, slots=True)
class Task:
    """Ours (peer None) or a peer, for heads on kv_heads of dim."""

    peer: Peer | None
    heads: int
    kv_heads: int
    dim: int


def tasks(points: Sequence[Point], peers: Sequence[Peer]) -> list[Task]:
    """The peers first, whose builds take longest: once for each head dim that occurs."""
    heads = dict.fromkeys((p.shape.heads, p.shape.kv_heads, p.shape.dim) for p in points)
    dims = {dim: (q, kv, dim) for q, kv, dim in reversed(heads)}
    here = [peer for peer in peers if peer.missing() is None]
    of_peers = [Task(peer, *of) for of in reversed(dims.values()) for peer in here]
    return of_peers + [Task(None, *of) for of in heads]


def warm(found: Sequence[Task], device: torch.device, jobs: int) -> Iterator[str]:
    """Do all of them, ``jobs`` at a time; yields a line for each that failed."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(first_use, task, device): task for task in found}
        for one in as_completed(running):
            if (fault := one.exception()) is not None:
                task = running[one]
                name = "splitkv" if task.peer is None else task.peer.name
                yield f"{name} {task.heads}:{task.kv_heads}x{task.dim}: {words(fault)}"


def first_use(task: Task, device: torch.device) -> None:
    """One call in each layout."""
    for lengths in _LENGTHS:
        shape = Shape(task.heads, task.kv_heads, task.dim, lengths)
        for step in steps(shape, PAGE_SIZES, device, cold_bytes=1).values():
            if task.peer is None:
                _ours(step)
            elif task.peer.refusal(step) is None:
                task.peer.prepare(step).first()
            synchronize(device)


def _ours(step: Step) -> None:
    backend = select(step.spec, step.device)
    for splits in (None, 1, 2):
        plan = backend.plan(step.spec, step.shape.lengths, num_splits=splits)
        ours(step, backend, plan).first()
