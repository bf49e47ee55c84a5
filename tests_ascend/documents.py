"""What the wheel's own documentation of its operators says: texts, examples, and calls in them."""

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from real_operators import fake_tensors

Call = tuple[str, dict[str, Any]]
"""An operator's name and its arguments by name, defaults filled in."""
_EXAMPLES = "调用示例"
_OUTPUT = "# 执行上述代码"
_START = re.compile(r"import (torch|math|numpy)|from torch import")


@dataclass(frozen=True, slots=True)
class Example:
    """One program of a document; ``number`` counts within it."""

    operator: str
    number: int
    source: str


def texts() -> dict[str, str]:
    """The document of each operator, by name, read without importing it."""
    spec = find_spec("torch_npu")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("_op_plugin_docs.py").read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name, text = map(ast.literal_eval, node.value.args)
            found[name] = text
    return found


def examples(operator: str, text: str) -> Iterator[Example]:
    """The programs after the heading: from the first import as far as it is Python."""
    _, _, rest = text.partition(_EXAMPLES)
    lines = rest.splitlines()
    number, at = 0, 0
    while at < len(lines):
        if not _START.match(lines[at]):
            at += 1
            continue
        ends = (n for n in range(at, len(lines)) if lines[n].lstrip().startswith(_OUTPUT))
        length = _longest_program(lines[at : next(ends, len(lines))])
        yield Example(operator, number, "\n".join(lines[at : at + length]))
        number, at = number + 1, at + max(length, 1)


def _longest_program(lines: list[str]) -> int:
    for length in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:length]))
        except SyntaxError:
            continue
        return length
    return 0


def run(example: Example, folder: Path) -> tuple[list[Call], str | None]:
    """Run the program on fake tensors: its calls of torch_npu's operators, and what ended it.

    Graph compilation is left out, the model runs as it is. Programs that compare numbers end there,
    as there are none.
    """
    path = folder / f"{example.operator}_{example.number}.py"
    path.write_text(example.source, encoding="utf-8")
    recorder = _Recorder()
    with _without_graphs_and_device(), fake_tensors(), recorder, redirect_stdout(StringIO()):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception as fault:  # noqa: BLE001 (somebody else's program: whatever ends it is said)
            return recorder.calls, f"{type(fault).__name__}: {str(fault).splitlines()[0]}"
    return recorder.calls, None


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "npu":
            schema = func._schema.arguments
            given = {
                entry.name: entry.default_value for entry in schema if entry.has_default_value()
            }
            given |= {entry.name: value for entry, value in zip(schema, args, strict=False)}
            self.calls.append((func._schema.name.removeprefix("npu::"), given | (kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_graphs_and_device() -> Iterator[None]:
    names = ("torchair", "torchair.configs", "torchair.core", "torchair.ge_concrete_graph")
    leaves = ("torchair.configs.compiler_config", "torchair.core.utils")
    sys.modules.update({name: MagicMock() for name in (*names, *leaves)})
    with (
        patch.object(torch, "compile", lambda model, **options: model),
        patch.object(torch.Tensor, "npu", lambda tensor: tensor.to("npu")),
        patch.object(torch.npu, "is_available", lambda: True),
        patch.object(torch.npu, "manual_seed", lambda seed: None),
        patch.object(torch.npu, "set_device", lambda device: None),
    ):
        yield
