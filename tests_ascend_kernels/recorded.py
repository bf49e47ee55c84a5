"""The record of what these tests find, ``matrix/ascend_kernels.json``; run as a script, writes it.

Run by Triton-Ascend's virtual environment, from anywhere. Tests compare what they find with it, so
that it is what the sources say. Errors are magnitudes: they depend on the CPU's exp and log.
"""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COMPILER = "1.2.0"
"""Of ascendnpu-ir, which is installed in a virtual environment of its own."""


def versions() -> dict[str, str]:
    """Whose findings these are."""
    return {"triton-ascend": version("triton-ascend"), "ascendnpu-ir": COMPILER}


def compiled(variant: Any) -> dict[str, Any]:
    """Kind of cores, and the unified buffer's bytes (or the error) for each target."""
    from hivm import compile_hivm
    from lowering import TARGETS, lower

    linalg = lower(variant.launch)
    found: dict[str, Any] = {"cores": {"aiv": "vector", "mix": "cube and vector"}[linalg.mix_mode]}
    for target in TARGETS:
        hivm = compile_hivm(linalg, target)
        found[target] = hivm.ub_bytes if hivm.error is None else hivm.error
    return found


def magnitude(error: float) -> str:
    """The power of ten that is not below ``error``."""
    return f"{10.0 ** math.ceil(math.log10(error)):.0e}" if error else "0"


def linalg_errors() -> dict[str, dict[str, Any]]:
    """Of every case, out's worst error as ``closeness`` (or the merge's check) measures it."""
    from on_cpu import run_lowered
    from own_kernel import EXTRA, OwnKernel, taken
    from own_merge import MERGES, error_and_complaints
    from splitkv.kernels_ascend.kernels.launch import Launch
    from splitkv.matrix.parity import Outcome, run_case

    Launch.run = run_lowered  # type: ignore[method-assign]
    found: dict[str, dict[str, Any]] = {"merge": {}, "split": {}}
    for merge in MERGES:
        error, wrong = error_and_complaints(merge, run_lowered)
        found["merge"][merge.id] = "; ".join(wrong) or magnitude(error)
    for case in (*taken(), *EXTRA):
        result = run_case(OwnKernel(), case)
        if result.outcome is not Outcome.REFUSED:
            passed = result.outcome is Outcome.PASSED and result.errors is not None
            found["split"][case.id] = magnitude(result.errors.worst) if passed else result.why
    return found


def main() -> None:
    sys.path[:0] = [str(HERE), str(ROOT / "tests"), str(ROOT)]
    from mutants_own_kernel import MERGE_MUTANTS, SPLIT_MUTANTS
    from splitkv.matrix import kernel_record
    from variants import merge_variants, split_variants

    variants = [*merge_variants(), *split_variants()]
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(compiled, variants))
    record = {
        "says": "compiled to HIVM, and its linalg run on a CPU; no NPU has run any of this",
        "versions": versions(),
        "sources": kernel_record.digest(),
        "hivm": {variant.id: row for variant, row in zip(variants, rows, strict=True)},
        "linalg": linalg_errors(),
        "mutants_rejected": {
            "merge": {mutant.id: list(mutant.cases) for mutant in MERGE_MUTANTS},
            "split": {mutant.id: list(mutant.cases) for mutant in SPLIT_MUTANTS},
        },
    }
    kernel_record.RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
