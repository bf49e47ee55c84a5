"""What an Ascend host has of what torch_npu needs, found without importing torch or torch_npu."""

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PARTS = {
    "libascend_hal.so": "the NPU driver",
    "libascendcl.so": "the CANN toolkit",
    "libhccl.so": "the CANN toolkit",
    "libopapi.so": "the CANN operator packages",
    "libatb.so": "NNAL, which only the ATB operators need (_npu_paged_attention)",
}
"""Shared libraries and what brings them; the loader finds them once set_env.sh was sourced."""

_TRY = """
import ctypes, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        found[name] = str(error)
    else:
        found[name] = None
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A shared library, what brings it, and ``why`` the loader does not take it (None: it does)."""

    library: str
    of: str
    why: str | None


def parts(timeout: float) -> list[Part]:
    """Each of ``PARTS``, tried in another process: loading a broken driver can end one."""
    command = [sys.executable, "-c", _TRY, *PARTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [Part(name, of, f"no answer in {timeout:g} s") for name, of in PARTS.items()]
    if done.returncode:
        why = f"the interpreter ended with code {done.returncode}"
        return [Part(name, of, why) for name, of in PARTS.items()]
    found = json.loads(done.stdout)
    return [Part(name, of, found[name]) for name, of in PARTS.items()]


def mismatch() -> str | None:
    """Why the installed torch and torch_npu do not go together, or None: their releases pair up."""
    try:
        torch, torch_npu = version("torch"), version("torch-npu")
    except PackageNotFoundError:
        return None
    if torch.split(".")[:2] == torch_npu.split(".")[:2]:
        return None
    release = ".".join(torch.split(".")[:2])
    return (
        f"torch {torch} and torch_npu {torch_npu} do not go together, each torch_npu is built for "
        f"the torch of its number: pip install 'torch-npu=={release}.*'"
    )
