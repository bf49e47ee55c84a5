"""From linalg to HIVM by Huawei's bishengir-compile, for a target that is not there.

The last step, HIVM to a device object, is a closed program (``hivmc``) that no package ships. A
stand-in for it keeps the HIVM text that it is handed and writes a marker: a success here means that
everything before ``hivmc`` succeeded, never that a kernel was built.
"""

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lowering import Linalg

ROOT = Path(__file__).resolve().parent.parent
UB_BYTES = 192 * 1024
"""The unified buffer of one vector core of every target here: bishengir-compile 1.2.0's own table,
1572864 bits in its overflow message."""

_NOT_HIVMC = """#!/bin/sh
if [ "$1" = --version ]; then echo 'hivmc 1.2.0'; exit 0; fi
cp "$1" "$KEEP"
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out="$2"; fi; shift; done
for file in "$out" "${out%.o}.o"; do printf 'NOT A DEVICE OBJECT' > "$file"; done
"""
_OPTIONS = (  # those of triton/backends/ascend/compiler.py for A2 and A3, with its defaults
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "i16": 2, "i8": 1, "i1": 1 / 8}


@dataclass(frozen=True)
class Hivm:
    """What bishengir-compile made of a kernel. error: its complaint, None where it had none.

    ub_bytes: where the last buffer that its memory plan puts into the unified buffer ends. (Where a
    plan does not fit it is made anew with fewer double buffers, so that it may come near 192 KiB.)
    """

    ub_bytes: int
    error: str | None


def tools() -> Path:
    """The folder of bishengir-compile and bishengir-opt."""
    (found,) = ROOT.glob(".venv-ascend-ir/lib/python3*/site-packages/ascendnpuir/bin")
    return found


def compile_hivm(linalg: Linalg, target: str) -> Hivm:
    """Compile for ``target``, such as Ascend910B3."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "hivmc").write_text(_NOT_HIVMC)
        (place / "hivmc").chmod(0o755)
        text = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg.text)  # as Triton-Ascend does
        (place / "kernel.mlir").write_text(text)
        kept = place / "kept.mlir"
        done = subprocess.run(
            [
                tools() / "bishengir-compile",
                "kernel.mlir",
                f"--target={target}",
                *_OPTIONS,
                "-o",
                "kernel",
            ],
            cwd=place,
            env={"PATH": f"{place}:{tools()}:/usr/bin:/bin", "KEEP": str(kept)},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        said = done.stdout + done.stderr
        if done.returncode or not kept.exists():
            return Hivm(0, _first_error(said, done.returncode))
        return Hivm(ub_bytes(kept.read_text()), None)


def ub_bytes(hivm: str) -> int:
    """Bytes of the unified buffer that a HIVM text's memory plan uses."""
    constants = dict(re.findall(r"(%\w+) = arith\.constant (\d+) : i64", hivm))
    end = 0
    casts = re.findall(
        r"pointer_cast\((%\w+)\) : memref<([\dx]*?)x?(b?f\d+|i\d+), #hivm.address_space<ub>", hivm
    )
    for at, shape, dtype in casts:
        count = math.prod(int(size) for size in shape.split("x") if size)
        end = max(end, int(constants[at]) + math.ceil(count * _BYTES[dtype]))
    assert casts, "the memory plan was not understood: no buffer of the unified buffer in it"
    return end


def _first_error(output: str, status: int) -> str:
    lines = [line for line in output.splitlines() if "error" in line.lower()]
    if not lines:
        return f"exit status {status}: {output[-200:]!r}"
    telling = [line for line in lines if "overflow" in line] or lines
    return telling[0].split("error: ")[-1].split(" (possible reason")[0].strip()
