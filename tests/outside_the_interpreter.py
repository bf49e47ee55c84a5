"""Runs of modules that need Triton's compiler, which the interpreter takes the place of here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def printed_by(module: str) -> dict[str, Any]:
    """The JSON object that ``python -m module`` prints."""
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).resolve().parent.parent,
        env=compiled,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))
