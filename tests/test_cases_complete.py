"""Every fault in the log that users met elsewhere has a test named after it or a reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
_IDS = """
A01 A02 A04 A05 A06 A08 A09 B01 B02 B03 B05 B07 B08 B10 B12 B13 C01 C03 C04 C06 D01 D02 D04 D06 D07
D09 D10 D11 D13 D14 E01 E03 E04 E05 E06 E08 F01 F03 F04 F05 F07 F09 F11 G01 G03 G05 G06 H01 H03 H04
H05 H07 H09 I01 I02 I03 I05 I06 I07 I09 I12 I13 I14 I16 J01 J02 J04 J06 J07 J08 J10 J12 J13 K01 K02
K04 K05 K07 K08 K11 L01 L03 L05 L07 L08 M01 M03 M04 N01 N02 N04 N06 O01 O02 O03 P01 P03 P04 Q01 Q03
"""
IDS = _IDS.split()
OUT_OF_REACH: dict[str, str] = yaml.safe_load(
    (ROOT / "tests" / "cases_out_of_reach.yaml").read_text()
)


def test_names() -> Iterator[tuple[str, str]]:
    """(file, test name) of every test function below tests/ and tests_device/."""
    for folder in ("tests", "tests_device"):
        for path in sorted((ROOT / folder).glob("**/test_*.py")):
            for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield path.name, node.name


test_names.__test__ = False  # type: ignore[attr-defined]


def ids_in(name: str) -> set[str]:
    """``test_C01_nan...`` and ``test_c01_...`` stand for C01; several ids may follow."""
    leading = re.match(r"test((?:_[A-Za-z]\d\d)+)(?:_|$)", name)
    return {part.upper() for part in leading[1].split("_") if part} if leading else set()


TESTED = {one: f"{file}::{name}" for file, name in test_names() for one in ids_in(name)}


def test_the_log_has_a_hundred_ids() -> None:
    assert len(set(IDS)) == len(IDS) == 100


@pytest.mark.parametrize("case", IDS)
def test_case_is_tested_or_out_of_reach_and_not_both(case: str) -> None:
    tested, listed = TESTED.get(case), case in OUT_OF_REACH
    assert tested or listed, f"{case} has no test, and cases_out_of_reach.yaml does not list it"
    assert not (tested and listed), f"{case} is listed as out of reach, but {tested} covers it"


def test_nothing_unknown_is_tested_or_listed() -> None:
    assert not (set(TESTED) | set(OUT_OF_REACH)) - set(IDS)


def test_every_reason_is_a_sentence() -> None:
    for case, reason in OUT_OF_REACH.items():
        assert len(reason.split()) >= 8, f"{case}: {reason!r} is no reason"
        assert reason.rstrip().endswith("."), f"{case}: {reason!r} is no sentence"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("test_C01_nan_in_slots", {"C01"}),
        ("test_c01", {"C01"}),
        ("test_N01_N04_local_lengths", {"N01", "N04"}),
        ("test_fp16_is_fine", set()),
        ("test_merge_of_a01_states", set()),
    ],
)
def test_ids_are_read_from_the_front_of_a_name(name: str, found: set[str]) -> None:
    assert ids_in(name) == found
