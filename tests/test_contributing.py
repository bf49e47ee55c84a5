"""CONTRIBUTING's recipe for a feature against the feature that it was shown with, int4 caches."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("backends", "benchmarks", "cli", "common", "integrations", "kernels_ascend", "kernels_cuda"),
    *("layers", "matrix"),
)
_SAYS_INT4 = re.compile(r"int4|ScaleKind\.GROUP", re.IGNORECASE)


def files_named(text: str) -> set[str]:
    """Paths of Python files; ``a/{b,c}.py`` are two."""
    found = set(re.findall(r"`([\w/]+\.py)`", text))
    for folder, names in re.findall(r"`([\w/]+)/\{([\w,]+)\}\.py`", text):
        found |= {f"{folder}/{name}.py" for name in names.split(",")}
    return found


def shown() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return files_named(text[text.index("Shown with int4 caches") :].split("\n\n", 1)[0])


def files_that_say_int4() -> set[str]:
    sources = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {
        path.relative_to(ROOT).as_posix()
        for path in sources
        if _SAYS_INT4.search(path.read_text(encoding="utf-8"))
    }


def test_the_feature_added_last_touched_what_the_recipe_names() -> None:
    assert files_that_say_int4() - shown() == set()
    missing = {name for name in shown() if not (ROOT / name).is_file()}
    assert missing == set(), "named, but not there"


@pytest.mark.parametrize("left_out", ["cli/spec_arguments.py", "kernels_cuda/int4.py"])
def test_a_file_that_the_recipe_leaves_out_is_found(left_out: str) -> None:
    assert left_out in shown()
    assert left_out in files_that_say_int4() - (shown() - {left_out})
