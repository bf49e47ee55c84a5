"""What several test files need: Triton's interpreter, a stand-in for torch_npu, fixed examples.

Without a GPU Triton kernels run in its interpreter, which is chosen before triton is imported.
Property tests draw the same examples in every run, so that a change fails for what it did;
``--hypothesis-profile=search`` draws new ones.
"""

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import settings

settings.register_profile("search")
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[ModuleType]:
    """The stand-in, for one file at a time: other tests must not find a torch_npu."""
    from splitkv.kernels_ascend import standin

    yield standin.install()
    standin.uninstall()
