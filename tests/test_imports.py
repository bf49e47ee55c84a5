"""What importing splitkv loads, and which folder may import which device's library."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("triton", "torch_npu", "transformers", "rich")
HOMES = {
    "triton": {"kernels_cuda", "kernels_ascend"},
    "torch_npu": {"kernels_ascend"},
}
FOLDERS = sorted(link.name for link in (ROOT / "splitkv").iterdir() if link.is_symlink())


def fresh_interpreter(code: str, *arguments: str) -> str:
    """Standard output of ``code`` in a new interpreter, which finds splitkv in this checkout."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(path: Path) -> Iterator[str]:
    """Full names of the modules that the file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (str(part.value) for part in node.args if isinstance(part, ast.Constant))


def test_the_public_names_load_no_optional_library() -> None:
    # Some builds of torch load a library of their own accord: only what splitkv adds counts.
    code = (
        "import json, sys, torch; before = set(sys.modules); import splitkv; "
        "names = {name: getattr(splitkv, name) for name in splitkv.__all__}; "
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    loaded = json.loads(fresh_interpreter(code))
    assert "splitkv" in loaded
    assert not set(OPTIONAL) & set(loaded)


@pytest.mark.parametrize("folder", ["backends", "cli", "common", "matrix"])
def test_declarations_import_without_the_optional_libraries(folder: str) -> None:
    # None in sys.modules makes an import fail as it does where the library is not installed.
    code = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[2:]))
package = importlib.import_module(f"splitkv.{sys.argv[1]}")
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        print(module.name)
"""
    assert fresh_interpreter(code, folder, *OPTIONAL).split()


@pytest.mark.parametrize("library", HOMES)
def test_device_libraries_are_imported_in_their_own_folders_only(library: str) -> None:
    importers = {
        path.relative_to(ROOT)
        for folder in ("splitkv", *FOLDERS)
        for path in (ROOT / folder).rglob("*.py")
        if any(name.split(".")[0] == library for name in imported_by(path))
    }
    strays = sorted(str(path) for path in importers if path.parts[0] not in HOMES[library])
    assert not strays
    assert importers, f"nothing imports {library}: the check looks in the wrong place"


def test_no_folder_imports_the_public_names_it_is_part_of() -> None:
    # The public names come from these folders: one that imported them back would close a circle.
    below = [folder for folder in FOLDERS if folder not in ("cli", "integrations")]
    offenders = [
        str(path.relative_to(ROOT))
        for folder in below
        for path in (ROOT / folder).rglob("*.py")
        if "splitkv" in imported_by(path)
    ]
    assert not offenders


def test_every_folder_is_named_to_the_tools_that_do_not_follow_links() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert {f"splitkv/{folder}" for folder in FOLDERS} <= set(tools["basedpyright"]["include"])
    assert set(FOLDERS) <= set(tools["coverage"]["run"]["source"])
    assert set(FOLDERS) <= set(tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
