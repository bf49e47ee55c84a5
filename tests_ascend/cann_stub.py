"""Empty CANN libraries, so that the real torch_npu can be imported where there is no CANN.

They are made from the installed wheel when a test asks: every function that the wheel wants and
nobody here has becomes one that answers with an error. There is one device by name, on which
nothing can be allocated and nothing computes: what works are schemas, meta functions and fake
tensors. Needs gcc and binutils.
"""

import ctypes
import importlib
import os
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

NOT_INITIALISED = 107001
"""ACL's own code for a runtime that aclInit has not set up."""
TEXTS = {"aclrtGetSocName": "Ascend910B3", "aclGetRecentErrMsg": "no CANN here: a stub"}
ANSWERS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
    "aclrtSetDevice": "int aclrtSetDevice(int device) { return 0; }",
}
"""Torch asks for the current device wherever a tensor is indexed, a fake one too."""
NULL_POINTERS = ("aclopCreateAttr", "aclCreateTensorDesc", "aclCreateDataBuffer")
HOLDS_ALL = "libascendcl.so"
SETTINGS = "_ZZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11EvE4keys"


def import_torch_npu(folder: Path) -> ModuleType:
    """Build the libraries in ``folder``, load them, and import torch and torch_npu.

    The loader matches the libraries that the wheel asks for by name (DT_SONAME), so that no search
    path is needed.
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch before torch_npu, see below
    load(folder)
    importlib.import_module("torch")
    _forget_allocator_settings()
    return importlib.import_module("torch_npu")


def load(folder: Path) -> list[str]:
    """Build and load; returns the names of the functions that were invented."""
    wheel, torch = _package("torch_npu") / "lib", _package("torch") / "lib"
    own = [*sorted(wheel.glob("*.so")), *sorted(wheel.parent.glob("_C*.so"))]
    given = [*own, *sorted(torch.glob("*.so*"))]
    functions = _unresolved(own, given)
    absent = _absent(own, {path.name for path in given})
    for name in sorted(absent | {HOLDS_ALL}):
        source = _source(functions) if name == HOLDS_ALL else ""
        ctypes.CDLL(str(_build(folder, name, source)), mode=ctypes.RTLD_GLOBAL)
    return functions


def _forget_allocator_settings() -> None:
    """Let torch_npu name its allocator's settings where torch is a CUDA build.

    CUDA has then given torch the same names, and torch ends the process at the second. The set of
    names is emptied in place (libstdc++'s layout: buckets, their count, first node, size).
    """
    library = _package("torch") / "lib"
    if not (library / "libc10_cuda.so").exists():
        return
    names = (ctypes.c_size_t * 4).in_dll(ctypes.CDLL(str(library / "libc10.so")), SETTINGS)
    ctypes.memset(names[0], 0, names[1] * ctypes.sizeof(ctypes.c_void_p))
    names[2] = names[3] = 0


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _unresolved(own: Iterable[Path], given: Iterable[Path]) -> list[str]:
    """Functions without a symbol version (those are libc's) that nothing here defines."""
    wanted = {
        fields[-1]
        for path in own
        for fields in _symbols(path, "--undefined-only")
        if fields[-2] == "U" and "@" not in fields[-1]
    }
    defined = {
        fields[-1].split("@")[0] for path in given for fields in _symbols(path, "--defined-only")
    }
    process = ctypes.CDLL(None)
    return sorted(name for name in wanted - defined if not hasattr(process, name))


def _symbols(path: Path, which: str) -> list[list[str]]:
    lines = _output("nm", "--dynamic", which, str(path)).splitlines()
    return [fields for line in lines if len(fields := line.split()) >= 2]


def _absent(own: Iterable[Path], given: set[str]) -> set[str]:
    needed = {
        line.split()[1]
        for path in own
        for line in _output("objdump", "--private-headers", str(path)).splitlines()
        if line.split()[:1] == ["NEEDED"]
    }
    return {name for name in needed - given if not _loads(name)}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _source(functions: Iterable[str]) -> str:
    lines = []
    for name in functions:
        if name in TEXTS:
            lines.append(f'const char *{name}(void) {{ return "{TEXTS[name]}"; }}')
        elif name in ANSWERS:
            lines.append(ANSWERS[name])
        elif name in NULL_POINTERS:
            lines.append(f"void *{name}(void) {{ return 0; }}")
        else:
            code = 0 if name.startswith("Msprof") else NOT_INITIALISED
            lines.append(f"int {name}(void) {{ return {code}; }}")
    return "\n".join(lines) + "\n"


def _build(folder: Path, name: str, source: str) -> Path:
    built, text = folder / name, folder / f"{name}.c"
    text.write_text(source)
    _output("gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(built), str(text))
    return built


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
