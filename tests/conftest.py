"""What several test files need: Triton's interpreter, and a stand-in for torch_npu.

Without a GPU Triton kernels run in its interpreter, which is chosen before triton is imported.
"""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[ModuleType]:
    """The stand-in, for one file at a time: other tests must not find a torch_npu."""
    from splitkv.kernels_ascend import standin

    yield standin.install()
    standin.uninstall()
