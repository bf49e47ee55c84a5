"""Compile the CUDA kernels ahead of time, without a GPU: ``python -m benchmarks.aot``.

Every kernel variant that the case table reaches, and some heavier ones, is compiled for sm_80 and
sm_90 with the installed triton, down to machine code. The table says what a variant takes of a
multiprocessor: registers a thread, spilled bytes a thread, shared memory. It says nothing of
results or speed. Exit status 1: a variant spills, or takes more registers or shared memory than a
multiprocessor of the target has; 2: usage.

The generated pairs are left out unless ``--pairs``: several masks and tensors meet in them, and 15
of 799 compiled variants spill 8 to 696 bytes a thread.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from splitkv.backends.cuda import E4M3_CAPABILITY, CudaBackend
from splitkv.cli.output import print_table, track
from splitkv.common.call import DecodeCall
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import H200
from splitkv.common.state import PartialState, stack_states
from splitkv.common.support import dtype_name
from splitkv.kernels_cuda import latent_hopper
from splitkv.kernels_cuda.attention import attention_launches
from splitkv.kernels_cuda.cut import cut_launches
from splitkv.kernels_cuda.latent import latent, launch_for_hopper, shares_memory
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.merge import merge_stacked
from splitkv.kernels_cuda.plan import DevicePlan, bind
from splitkv.kernels_cuda.primitives import INTERPRETED
from splitkv.kernels_cuda.states import Destination, Workspace
from splitkv.matrix.case import Case, Memory, make
from splitkv.matrix.cases import cases_named
from splitkv.matrix.cases_pairwise import PAIRWISE
from splitkv.matrix.inputs import build

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
"""Most bytes of shared memory of one block: CUDA C++ programming guide, compute capabilities."""
_REGISTERS = 64 << 10
"""Of one multiprocessor, of both targets; the same place."""
_HOPPER = 90
_EVERYTHING: dict[str, Any] = {
    "sliding_window": 100,
    "anchor_tokens": 4,
    "logits_soft_cap": 20.0,
    "alibi": True,
    "attn_mask": True,
    "attn_bias": True,
    "columns": 8,
}
HEAVIEST = tuple(
    make(
        f"heaviest-{dtype_name(dtype)}-{dim}-{4 * group}-{len(masks)}",
        "the most registers",
        (300,),
        num_q_heads=group,
        num_kv_heads=1,
        num_queries=4,
        head_dim=dim,
        dtype=dtype,
        page_size=16,
        **masks,
    )
    for dtype, dims in ((torch.bfloat16, (64, 128, 256)), (torch.float32, (64, 128)))
    for dim in dims
    for group in (4, 16)
    for masks in (_EVERYTHING, {"sliding_window": 100, "logits_soft_cap": 20.0, "alibi": True})
)
"""Beyond the case table: specs that need the most registers.

Not among them: float32 at 256, which spills about 100 bytes a thread under several masks at once
until ``tiles`` gives it 8 warps.
"""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True, slots=True)
class Variant:
    """A launch as the compiler sees it; ``case`` is the first that reaches it."""

    case: str
    launch: Launch


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled variant takes; spilled: bytes of local memory a thread."""

    case: str
    kernel: str
    shape: str
    target: int
    registers: int
    spilled: int
    shared: int
    warps: int
    stages: int

    @property
    def too_much(self) -> bool:
        crowded = self.registers * 32 * self.warps > _REGISTERS
        return crowded or self.spilled > 0 or self.shared > SHARED_LIMIT[self.target]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--case", help="a shell pattern of case ids, such as 'window*' (default: all)"
    )
    parser.add_argument("--pairs", action="store_true", help="the generated pairs of features too")
    parser.add_argument("--target", type=int, choices=sorted(SHARED_LIMIT), action="append")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="threads that compile")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(argv)
    try:
        cases = cases_named(args.case) + (HEAVIEST if args.case is None else ())
        if args.case is None and not args.pairs:
            cases = tuple(case for case in cases if case not in PAIRWISE)
    except ValueError as error:
        parser.error(str(error))
    if INTERPRETED.value:
        parser.error("TRITON_INTERPRET is on, and the interpreter compiles nothing; unset it")
    usages = compile_all(
        list(distinct_variants(cases)), args.target or sorted(SHARED_LIMIT), args.workers
    )
    report(usages)
    if args.json is not None:
        found = {"triton": triton.__version__, "variants": [asdict(usage) for usage in usages]}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(usage.too_much for usage in usages))


def distinct_variants(cases: tuple[Case, ...]) -> Iterator[Variant]:
    """Each kernel variant that some case reaches, once."""
    known = set()
    for case in cases:
        if CudaBackend().refusals(case.spec):
            continue
        for launch in launches_of(case):
            key = repr(specialised(launch, _HOPPER))
            if (launch.kernel, key) not in known:
                known.add((launch.kernel, key))
                yield Variant(case.id, launch)


def launches_of(case: Case) -> list[Launch]:
    """All that a call of ``case`` would launch, with a plan of the host and one of the device."""
    near = replace(case, memory=Memory.PLAIN) if case.memory is Memory.FAR else case
    inputs = build(near, seed=0)
    call, spec = inputs.call, case.spec
    rows = call.rows
    splits = {"num_splits": case.num_splits, "split_size": case.split_size}
    plan: SplitPlan = plan_splits(spec, list(case.seq_lens), profile=H200, **splits)
    cuts, _ = cut_launches(call, plan)
    if not case.returns_state:
        out = torch.empty(*rows, spec.head_dim_v, dtype=spec.dtype)
        destination = Destination(out, torch.empty(rows))
        return [*cuts, *_launches(call, bind(plan, out.device), destination, inputs.sinks)]
    state = PartialState.empty(rows, spec.head_dim_v)
    destination = Destination(state.out, state.lse, state.max)
    launches = _launches(call, bind(plan, state.out.device), destination)
    with patch.object(Launch, "run", lambda launch, device: launches.append(launch)):
        merge_stacked(stack_states([state, state]))
    return [*cuts, *launches]


def _launches(
    call: DecodeCall, plan: DevicePlan, destination: Destination, sinks: torch.Tensor | None = None
) -> list[Launch]:
    """What any device launches, and what Hopper launches instead."""
    found = attention_launches(call, plan, destination, sinks)
    shared = latent(call.spec) and shares_memory(call.spec, call.cache)
    if latent_hopper.takes(call, shared=shared):
        workspace = Workspace.empty(call.spec, plan.num_slots, call.q.device)
        found.append(launch_for_hopper(call, plan, workspace, destination, sinks))
    return found


def _on(launch: Launch, target: int) -> Launch:
    """``launch`` as a device of compute capability ``target`` is given it: Hopper's start early."""
    if "EARLY" not in launch.arguments or target < _HOPPER:
        return launch
    options = dict(launch.options)
    if "launch_pdl" in options:
        options["launch_pdl"] = True
    return replace(launch, arguments={**launch.arguments, "EARLY": True}, options=options)


def specialised(launch: Launch, target: int) -> tuple[Any, ...]:
    """``(options, signature, constants, attributes)`` for compute capability ``target``, as triton
    derives them from arguments.
    """
    backend, kernel = make_backend(GPUTarget("cuda", target, 32)), launch.kernel
    bind_arguments = create_function_from_signature(kernel.signature, kernel.params, backend)
    launch = _on(launch, target)
    options = {**launch.options, "debug": False}
    bound, specialisation, _ = bind_arguments(**launch.arguments, **options)
    return tuple(kernel._pack_args(backend, options, bound, specialisation, options))


def compile_all(variants: list[Variant], targets: list[int], workers: int) -> list[Usage]:
    """Every variant for every target that has its types and instructions, in order; triton and the
    assembler free the GIL.
    """
    jobs = [
        (variant, target)
        for variant in variants
        for target in targets
        if _compiles(variant.launch, target)
    ]
    with ThreadPoolExecutor(workers) as pool:
        done = pool.map(compile_variant, *zip(*jobs, strict=True))
        return list(track(done, "compiling", total=len(jobs)))


def _compiles(launch: Launch, target: int) -> bool:
    if launch.kernel is latent_hopper.latent_hopper_kernel:
        return target == _HOPPER
    cache = launch.arguments.get("k")
    reads_e4m3 = isinstance(cache, torch.Tensor) and cache.dtype == torch.float8_e4m3fn
    return not reads_e4m3 or divmod(target, 10) >= E4M3_CAPABILITY


def compile_variant(variant: Variant, target: int) -> Usage:
    """Compile for compute capability ``target`` and read what the machine code takes."""
    gpu, kernel = GPUTarget("cuda", target, 32), variant.launch.kernel
    options, signature, constants, attributes = specialised(variant.launch, target)
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=options.__dict__)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        listing = subprocess.run(
            [_CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        )
    found = _USAGE.search(listing.stdout)
    assert found is not None, listing.stdout
    registers, stack, shared, local = map(int, found.groups())
    return Usage(
        case=variant.case,
        kernel=variant.launch.kernel.__name__,
        shape=_shape(variant.launch),
        target=target,
        registers=registers,
        spilled=stack + local,
        shared=shared + compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        stages=compiled.metadata.num_stages,
    )


def report(usages: list[Usage]) -> None:
    columns = ("case", "kernel", "shape", "sm", "registers", "spilled", "shared", "warps", "stages")
    rows = [
        (
            usage.case,
            usage.kernel,
            usage.shape,
            usage.target,
            usage.registers,
            usage.spilled or None,
            usage.shared,
            usage.warps,
            usage.stages,
        )
        for usage in usages
    ]
    print_table(columns, rows, title=f"compiled with triton {triton.__version__}, not run")
    spilling = [usage for usage in usages if usage.too_much]
    print(f"{len(usages)} compiled, {len(spilling)} of them spill or exceed a multiprocessor")


_DIMS = ("D", "DV", "HEAD", "REST")
_TOLD = ("CAUSAL", "WINDOW", "WINDOW_BLOCK", "SOFT_CAP", "CODES", "K_SCALE", "V_SCALE", "SHARED")
_BROUGHT = ("alibi_slopes", "attn_bias", "attn_mask", "k_zero", "v_zero", "sinks")


def _shape(launch: Launch) -> str:
    """What tells variants of one kernel apart, in a few words."""
    arguments = launch.arguments
    if "BLOCK_N" not in arguments:
        return f"Dv {arguments['DV']}" if "DV" in arguments else str(arguments.get("MODE", ""))
    q = arguments["q"]
    assert isinstance(q, torch.Tensor)
    dims = " ".join(f"{name} {arguments[name]}" for name in _DIMS if name in arguments)
    words = [f"{dtype_name(q.dtype)} {dims} tile {arguments['BLOCK_M']}x{arguments['BLOCK_N']}"]
    for name in _TOLD:
        value = arguments.get(name)
        if value is True:
            words.append(name)
        elif value and (name != "WINDOW_BLOCK" or value != 1):
            words.append(f"{name} {value}")
    words += [name for name in _BROUGHT if arguments.get(name) is not None]
    return " ".join(words).lower()


if __name__ == "__main__":
    sys.exit(main())
