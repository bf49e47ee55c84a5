"""Cases of ``splitkv parity`` in several processes, each with its own context on the device.

A process that dies (a crash in a driver, memory that ran out) fails the case it was at, and another
takes its place. Answers come in the table's order, whoever is done first.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from typing import Any

import torch

from splitkv.backends.base import Backend
from splitkv.matrix import parity
from splitkv.matrix.case import Case, Size
from splitkv.matrix.parity import Outcome, Result


@dataclass(frozen=True, slots=True)
class Asked:
    """What every process is told. threads: of the host's cores, for one process."""

    interpreter: bool
    standin: bool
    device: str | None
    seed: int
    threads: int


def run(
    backends: Sequence[Backend], cases: Sequence[Case], asked: Asked, jobs: int
) -> Iterator[tuple[Backend, Result]]:
    """As ``parity.run``, with ``jobs`` processes at work at a time."""
    tasks = [(case, backend) for case in cases for backend in backends]
    # the large ones first: what takes long must not start last
    order = sorted(range(len(tasks)), key=lambda index: tasks[index][0].size is not Size.LARGE)
    idle: SimpleQueue[_Process] = SimpleQueue()
    for _ in range(min(jobs, len(tasks))):
        idle.put(_Process(asked))

    def work(case: Case, backend: str) -> Result:
        process = idle.get()
        result, process = process.result(case, backend)
        idle.put(process)
        return result

    with ThreadPoolExecutor(jobs) as threads:
        futures = {
            index: threads.submit(work, tasks[index][0], tasks[index][1].name) for index in order
        }
        try:
            for index, (_, backend) in enumerate(tasks):
                yield backend, futures[index].result()
        finally:
            threads.shutdown(cancel_futures=True)
            while not idle.empty():
                idle.get().stop()


class _Process:
    """One process that answers cases, started when the first is put to it."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._started: tuple[SpawnProcess, Any] | None = None  # a process and our end of its pipe

    def result(self, case: Case, backend: str) -> tuple[Result, "_Process"]:
        """What became of the case, and the process to put the next one to."""
        try:
            process, pipe = self._started or self._start()
        except OSError as fault:
            why = f"no process could be started for it: {fault}; ask for fewer jobs"
            return Result(case.id, Outcome.FAILED, why=(why,)), self
        try:
            pipe.send((case, backend))
            return pipe.recv(), self
        except (EOFError, OSError):
            process.join()
            why = f"the process that ran it ended with exit code {process.exitcode}"
            return Result(case.id, Outcome.FAILED, why=(why,)), _Process(self._asked)

    def _start(self) -> tuple[SpawnProcess, Any]:
        context = get_context("spawn")  # a forked child cannot use its parent's device
        pipe, its_end = context.Pipe()
        with its_end:  # then the child's alone, so that its death is an end of file here
            process = context.Process(target=_serve, args=(its_end, self._asked), daemon=True)
            try:
                process.start()
            except OSError:
                pipe.close()
                raise
        self._started = process, pipe
        return self._started

    def stop(self) -> None:
        if self._started is not None:
            process, pipe = self._started
            pipe.close()
            process.join()


def _serve(pipe: Connection, asked: Asked) -> None:
    torch.set_num_threads(asked.threads)
    known = {
        backend.name: backend
        for backend in parity.backends_for(interpreter=asked.interpreter, standin=asked.standin)
    }
    while True:
        try:
            case, backend = pipe.recv()
        except EOFError:  # nobody is left who asks
            return
        pipe.send(parity.run_case(known[backend], case, asked.device, asked.seed))
