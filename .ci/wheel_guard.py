"""Install a splitkv wheel in a fresh environment and check what is, and is not, in it.

    python .ci/wheel_guard.py dist/splitkv-0.1.0-py3-none-any.whl

Run from the root of the checkout that the wheel was built from. The fresh environment borrows
torch and the other dependencies from the one that runs this script, never splitkv itself.
"""

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELL = ROOT / "splitkv"
FOLDERS = sorted(link.name for link in SHELL.iterdir() if link.is_symlink())
NEVER_TOP_LEVEL = [*FOLDERS, "benchmarks", "docs", "examples", "layers", "tests"]
INSIDE = Path(__file__).with_name("wheel_inside.py")


class WheelError(Exception):
    """The wheel is not what the checkout says, or does not work away from it."""


def check_top_level(names: Iterable[str], version: str) -> None:
    """The wheel adds one importable name, ``splitkv``."""
    found = {name.split("/")[0] for name in names}
    wanted = {"splitkv", f"splitkv-{version}.dist-info"}
    if found != wanted:
        raise WheelError(f"the wheel's top level is {sorted(found)}, not {sorted(wanted)}")


def checkout_files() -> set[str]:
    """Every tracked file of the package, under the name it has in a wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", "splitkv", *FOLDERS],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    linked = {f"splitkv/{name}" for name in FOLDERS}
    names = {name if name.startswith("splitkv/") else f"splitkv/{name}" for name in listed if name}
    return names - linked


def check_complete(names: set[str]) -> None:
    """The wheel holds every tracked file, and nothing that git does not track."""
    packed = {name for name in names if name.startswith("splitkv/")}
    tracked = checkout_files()
    if missing := sorted(tracked - packed):
        raise WheelError(f"not in the wheel, see [tool.setuptools.package-data]: {missing}")
    if extra := sorted(packed - tracked):
        raise WheelError(f"in the wheel, but not tracked by git: {extra}")


def install(wheel: Path, env: Path) -> Path:
    """A fresh environment with the wheel in it; returns its folder of programs."""
    venv.create(env, with_pip=True)
    programs = env / "bin"
    pip = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", wheel], check=True)
    # A path file's folders are searched, their own path files are not read: the borrowed
    # environment's editable splitkv stays out.
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = env / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def check_installed(wheel: Path, data: list[str]) -> None:
    """Data loads, no folder of ours is importable by its bare name, the commands run."""
    with tempfile.TemporaryDirectory() as scratch:
        programs = install(wheel.resolve(), Path(scratch, "env"))
        elsewhere = Path(scratch, "elsewhere")
        elsewhere.mkdir()
        python = programs / "python"
        for command in (
            [python, INSIDE, json.dumps(data), json.dumps(NEVER_TOP_LEVEL)],
            [python, "-m", "splitkv.matrix", "--check"],
            [programs / "splitkv", "--help"],
        ):
            done = subprocess.run(command, cwd=elsewhere, check=False)
            if done.returncode:
                raise WheelError(f"{' '.join(map(str, command))} exited with {done.returncode}")


def main(wheel: Path) -> None:
    """Every check on one wheel; raises WheelError on the first that fails."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    check_top_level(names, version=wheel.name.split("-")[1])
    check_complete(names)
    data = sorted(name for name in names if re.match(r"splitkv/(?!.*\.py$)", name))
    check_installed(wheel, data)
    print(f"{wheel.name}: {len(names)} files, top level splitkv only")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python .ci/wheel_guard.py WHEEL")
    try:
        main(Path(sys.argv[1]))
    except WheelError as error:
        sys.exit(f"wheel guard: {error}")
