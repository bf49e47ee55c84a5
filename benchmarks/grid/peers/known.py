"""The peers that are asked, and those named on the command line."""

from fnmatch import fnmatchcase
from importlib import import_module

from benchmarks.grid.peers import flashinfer_decode, torch_sdpa
from benchmarks.grid.peers.eager import TorchEager
from benchmarks.grid.peers.protocol import Peer
from benchmarks.grid.peers.tilelang_decode import TileLang
from benchmarks.grid.peers.torch_flex import TorchFlex
from benchmarks.grid.peers.torch_varlen import TorchVarlen

PEERS: tuple[Peer, ...] = (
    torch_sdpa.CUDNN,
    torch_sdpa.FLASH,
    torch_sdpa.DEFAULT,
    TorchVarlen(),
    TorchFlex(),
    TorchEager(),
    flashinfer_decode.TENSOR_CORES,
    flashinfer_decode.CUDA_CORES,
    flashinfer_decode.BATCH,
    TileLang(),
)


def peers(patterns: str, others: list[str]) -> list[Peer]:
    """Known peers whose name fits one of the shell patterns between commas, then ``others``.

    others: ``module:Class`` each, made without arguments.

    Raises:
        ValueError: a pattern that fits none, or a word without a colon.
    """
    found: list[Peer] = []
    for pattern in filter(None, patterns.split(",")):
        fits = [peer for peer in PEERS if fnmatchcase(peer.name, pattern.strip())]
        if not fits:
            raise ValueError(f"no peer is named {pattern!r}, known: {[p.name for p in PEERS]}")
        found += [peer for peer in fits if peer not in found]
    for word in others:
        module, colon, name = word.partition(":")
        if not colon:
            raise ValueError(f"--peer takes module:Class, got {word!r}")
        found.append(getattr(import_module(module), name)())
    return found
