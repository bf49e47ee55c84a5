"""What a peer is: another library's way to compute the same step.

To add one, write a class like ``TorchEager`` in ``eager.py`` (the whole of an adapter: a name, why
it is not here, what it does not take, and its calls) and either list it in ``known.py`` or name it
on the command line: ``--peer mypackage.module:MyPeer``. Its answer is compared with splitkv's
before it is timed; planning belongs into ``prepare``, where no clock runs.
"""

from typing import Protocol

from splitkv.cli.bench_shapes import Step
from splitkv.cli.bench_timing import Candidate


class Peer(Protocol):
    """One adapter."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def missing(self) -> str | None:
        """Why it cannot run on this machine, in a sentence, or None."""
        ...

    def refusal(self, step: Step) -> str | None:
        """Why it does not take this step, or None."""
        ...

    def prepare(self, step: Step) -> Candidate:
        """One call per cache of ``step.caches``, each returning [B, H, D] in q's dtype."""
        ...


def needs_cuda(library: str) -> str | None:
    """A sentence where ``library`` is not installed or torch sees no CUDA device."""
    from importlib.util import find_spec

    import torch

    if find_spec(library) is None:
        return f"{library} is not installed"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def only_uniform(step: Step) -> str | None:
    """For libraries that take one contiguous [B, T, K, D] alone."""
    if step.page_size is not None:
        return "takes no pages"
    return None if step.shape.uniform else "takes no lengths that differ"
