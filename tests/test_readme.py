"""What the README shows works, block after block, in the order in which a reader would type it."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
NEEDS_A_MODEL = "AutoModelForCausalLM"


def test_the_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if NEEDS_A_MODEL not in block:
            exec(compile(block, "README.md", "exec"), names)  # noqa: S102 - the README's own words
    assert names["out"].shape == names["q"].shape
    assert "'groups': 1" in capsys.readouterr().out


def test_only_the_block_that_needs_a_model_is_left_out() -> None:
    assert len(BLOCKS) > 4
    assert sum(NEEDS_A_MODEL in block for block in BLOCKS) == 1
