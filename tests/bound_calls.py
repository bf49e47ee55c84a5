"""What the fast path of CUDA launches would start, seen with no GPU; run by ``test_cuda_bound``.

Triton's own derivation says what each launch would be compiled for. Calls of many kinds follow one
another by one plan; what starts must be what the ordinary way starts, with the same arguments.
Prints JSON: for each experiment the pairs of calls that went wrong, and how many were started from
what was kept. Not under the interpreter, which specialises on nothing.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from benchmarks.aot import specialised
from splitkv.common.cache import DenseCache, PackedCache, PagedCache
from splitkv.common.call import DecodeCall
from splitkv.common.plan import plan_splits
from splitkv.common.profile import H200
from splitkv.common.spec import DecodeSpec, Layout, ScaleKind
from splitkv.kernels_cuda import attention, bound
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.plan import DevicePlan, bind
from splitkv.kernels_cuda.states import Destination

BATCH, HEADS, KV_HEADS, DIM, PAGE, COLUMNS = 2, 4, 2, 16, 2, 64
"""As many slots in a page as kv heads: the shapes of both layouts are the same."""
HOPPER = 90
PLAIN = DecodeSpec(
    num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, layout=Layout.NHD, page_size=PAGE
)


@dataclass(frozen=True, eq=False)
class Asked:
    """One call, with all that it is given."""

    call: DecodeCall
    destination: Destination
    sinks: Tensor | None = None

    def attend(self, plan: DevicePlan, memo: dict[object, object] | None) -> None:
        attention.attend(self.call, plan, self.destination, self.sinks, memo)


class FakeKernel(CompiledKernel):  # type: ignore[misc]
    """Compiled for ``made_for``; writes down what it is started with."""

    function, packed_metadata = 1, (4, 1, 0)

    def __init__(self, made_for: str, log: list[object]) -> None:
        self.made_for, self.log = made_for, log

    def run(self, *arguments: Any) -> None:
        programs, others = arguments[:3], arguments[9:]
        assert arguments[3:9] == (7, 1, (4, 1, 0), None, None, None)
        self.log.append([self.made_for, programs, *others])


class Device:
    """Stands for triton and the GPU: ``log`` holds what was started, ``ordinary`` counts the
    launches of the ordinary way.
    """

    def __init__(self) -> None:
        self.log: list[object] = []
        self.ordinary = 0

    def launch(self, kernel: Any, *, grid: Any, warmup: bool, **arguments: Any) -> FakeKernel:
        assert not warmup
        self.ordinary += 1
        named = {name: arguments.pop(name) for name in kernel.arg_names}
        made = repr(specialised(Launch(kernel, grid[0], named, arguments), HOPPER))
        fake = FakeKernel(kernel.__name__ + made, [])
        values = (_pointer(value) for value in named.values())
        self.log.append([fake.made_for, (grid[0], 1, 1), *values])
        fake.log = self.log
        return fake

    def started(self, asked: Asked, plan: DevicePlan, memo: dict[object, object]) -> list[object]:
        """What ``asked`` starts, its workspace's place left open."""
        self.log.clear()
        asked.attend(plan, memo)
        return [_relative(entry, asked, plan) for entry in self.log]


def _pointer(value: object) -> object:
    if isinstance(value, Tensor):
        return value.data_ptr() if value.numel() else 0
    return value


def _relative(entry: Any, asked: Asked, plan: DevicePlan) -> list[object]:
    tensors = [*bound.tensors_of(asked.call, asked.destination, asked.sinks)]
    tensors += [getattr(plan, name) for name in plan.__slots__]
    known = {tensor.data_ptr() for tensor in tensors if isinstance(tensor, Tensor)}
    first, found = None, []
    for value in entry:
        if isinstance(value, int) and value >= 2**32 and value not in known:
            first = value if first is None else first
            found.append(("workspace", value - first))
        else:
            found.append(value)
    return found


@contextmanager
def pretended(device: Device) -> Iterator[None]:
    active = SimpleNamespace(get_current_stream=lambda index: 7)

    def run(kernel: Any, **arguments: Any) -> FakeKernel:  # a function, which binds the kernel
        return device.launch(kernel, **arguments)

    with (
        patch.object(JITFunction, "run", run),
        patch.object(attention, "can_start", lambda where: True),
        patch.object(bound, "driver", SimpleNamespace(active=active)),
    ):
        yield


def new(*shape: int, dtype: torch.dtype = torch.bfloat16, shift: int = 0, pad: int = 0) -> Tensor:
    """Its last dimension ``pad`` longer in memory, and ``shift`` elements past an aligned place."""
    wide = (*shape[:-1], shape[-1] + pad)
    size = torch.Size(wide).numel()
    return torch.ones(size + shift).to(dtype)[shift:].view(wide)[..., : shape[-1]]


def table(dtype: torch.dtype = torch.int32, **more: int) -> Tensor:
    return new(BATCH, COLUMNS, dtype=dtype, **more)


def lengths(dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.full((BATCH,), PAGE * COLUMNS).to(dtype)


def paged(**more: Any) -> PagedCache:
    size = (8, PAGE, KV_HEADS, DIM)
    given = {"k": new(*size), "v": new(*size), "block_table": table(), "seq_lens": lengths()}
    return PagedCache(**{**given, **more})


def asked(
    cache: Any = None,
    q: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    top: Tensor | None = None,
    sinks: Tensor | None = None,
    extras: dict[str, Tensor] | None = None,
    **spec: Any,
) -> Asked:
    q = new(BATCH, 1, HEADS, DIM) if q is None else q
    cache = paged() if cache is None else cache
    given = replace(PLAIN, layout=cache.layout, sinks=sinks is not None, **spec)
    return Asked(
        DecodeCall(q, cache, given, **(extras or {})),
        Destination(
            torch.empty_like(q) if out is None else out,
            torch.empty(q.shape[:-1]) if lse is None else lse,
            top,
        ),
        sinks,
    )


def dense(**more: Any) -> DenseCache:
    size = (BATCH, PAGE * COLUMNS, KV_HEADS, DIM)
    return DenseCache(new(*size, **more), new(*size, **more), lengths(), Layout.BSND)


def shared() -> PagedCache:
    k = new(8, PAGE, KV_HEADS, DIM)
    return paged(k=k, v=k[:])


def scaled(*, same: bool = False, **more: Any) -> Asked:
    size = (8, PAGE, KV_HEADS, DIM)
    cache = paged(k=new(*size, dtype=torch.int8), v=new(*size, dtype=torch.int8))
    k_scale = new(KV_HEADS, dtype=torch.float32, **more)
    v_scale = k_scale if same else new(KV_HEADS, dtype=torch.float32)
    extras = {"k_scale": k_scale, "v_scale": v_scale}
    kinds = {"k_scale": ScaleKind.HEAD, "v_scale": ScaleKind.HEAD}
    return asked(cache, extras=extras, kv_dtype=torch.int8, **kinds)


def _with(name: str, tensor: Tensor, **spec: Any) -> Asked:
    flag = {"alibi_slopes": "alibi"}.get(name, name)
    return asked(extras={name: tensor}, **{flag: True}, **spec)


def in_place(q: Tensor) -> Asked:
    return asked(q=q, out=q)


def _mask(n: int, **more: int) -> Tensor:
    return new(BATCH, 1, n, dtype=torch.bool, **more)


_PAGES = (8, PAGE, KV_HEADS, DIM)
_Q = (BATCH, 1, HEADS, DIM)
_F32: dict[str, Any] = {"dtype": torch.float32}
KINDS: dict[str, Callable[[], Asked]] = {
    "plain": asked,
    "half": lambda: asked(
        paged(k=new(*_PAGES, dtype=torch.half), v=new(*_PAGES, dtype=torch.half)),
        new(*_Q, dtype=torch.half),
        dtype=torch.half,
    ),
    "q off": lambda: asked(q=new(*_Q, shift=1)),
    "q padded": lambda: asked(q=new(*_Q, pad=3)),
    "q strides of 16": lambda: asked(q=new(*_Q, pad=16)),
    "k off": lambda: asked(paged(k=new(*_PAGES, shift=1))),
    "v off": lambda: asked(paged(v=new(*_PAGES, shift=1))),
    "k padded": lambda: asked(paged(k=new(*_PAGES, pad=8))),
    "v padded": lambda: asked(paged(v=new(*_PAGES, pad=1))),
    "k is v": lambda: asked(shared()),
    "HND": lambda: asked(paged(layout=Layout.HND)),
    "int64 table": lambda: asked(paged(block_table=table(torch.int64))),
    "table padded": lambda: asked(paged(block_table=table(pad=16))),
    "table off": lambda: asked(paged(block_table=table(shift=1))),
    "int64 lengths": lambda: asked(paged(seq_lens=lengths(torch.int64))),
    "strided lengths": lambda: asked(
        paged(seq_lens=torch.full((BATCH, 2), PAGE * COLUMNS).int()[:, 0])
    ),
    "in place": lambda: in_place(new(*_Q)),
    "dense": lambda: asked(dense(), page_size=None),
    "dense padded": lambda: asked(dense(pad=1), page_size=None),
    "out off": lambda: asked(out=new(*_Q, shift=1)),
    "out padded": lambda: asked(out=new(*_Q, pad=1)),
    "out of float32": lambda: asked(out=new(*_Q, **_F32)),
    "out transposed": lambda: asked(out=new(BATCH, HEADS, 1, DIM).transpose(1, 2)),
    "lse off": lambda: asked(lse=new(*_Q[:-1], shift=1, **_F32)),
    "lse padded": lambda: asked(lse=new(*_Q[:-1], pad=12, **_F32)),
    "state": lambda: asked(top=new(*_Q[:-1], **_F32)),
    "sinks": lambda: asked(sinks=new(HEADS, **_F32)),
    "sinks of bfloat16": lambda: asked(sinks=new(HEADS)),
    "alibi [H]": lambda: _with("alibi_slopes", new(HEADS, **_F32)),
    "alibi [B, H]": lambda: _with("alibi_slopes", new(BATCH, HEADS, **_F32)),
    "bias": lambda: _with("attn_bias", new(BATCH, HEADS, 1, 8, **_F32)),
    "bias of one": lambda: _with("attn_bias", new(1, 1, 1, 8, **_F32)),
    "bias of one head": lambda: _with("attn_bias", new(BATCH, 1, 1, 8, **_F32)),
    "mask": lambda: _with("attn_mask", _mask(8)),
    "mask of more": lambda: _with("attn_mask", _mask(9)),
    "mask padded": lambda: _with("attn_mask", _mask(8, pad=1)),
    "window": lambda: asked(sliding_window=40),
    "longer window": lambda: asked(sliding_window=41),
    "soft cap": lambda: asked(logits_soft_cap=20.0),
    "scaled": scaled,
    "scaled alike": lambda: scaled(same=True),
    "scale off": lambda: scaled(shift=1),
    "packed": lambda: asked(
        PackedCache(
            new(BATCH * 128, KV_HEADS, DIM),
            new(BATCH * 128, KV_HEADS, DIM),
            torch.tensor([0, 128, 256]).int(),
        ),
        page_size=None,
    ),
    "packed queries": lambda: asked(
        q=new(2, HEADS, DIM),
        extras={"cu_seqlens_q": torch.tensor([0, 1, 2]).int()},
        packed_queries=True,
    ),
}


def wrong_pairs(device: Device, plan: DevicePlan) -> tuple[list[list[str]], int]:
    """Pairs of calls the second of which starts what it would not alone; and how many calls were
    started with nothing of triton's ordinary way.
    """
    first = {name: make() for name, make in KINDS.items()}
    second = {name: make() for name, make in KINDS.items()}
    keys = {
        name: attention.facts(later.call, plan, later.destination, later.sinks)[0]  # type: ignore[index]
        for name, later in second.items()
    }
    wrong, direct = [], 0
    for before, call in first.items():
        memo: dict[object, object] = {}
        device.started(call, plan, memo)
        for name, later in second.items():
            if memo.get(keys[name]) is None:  # nothing was kept that it could be started from
                continue
            device.ordinary = 0
            found = device.started(later, plan, memo.copy())
            direct += device.ordinary == 0
            if found != device.started(later, plan, {}):
                wrong.append([before, name])
    return wrong, direct


def forgetful(forget: Callable[[tuple[object, ...]], tuple[object, ...]]) -> Any:
    """``facts`` without some of them."""
    whole = bound.facts

    def fewer(*arguments: Any) -> Any:
        key, pointers = whole(*arguments)
        return forget(key), pointers

    return patch.object(attention, "facts", fewer)


def without(unwanted: Callable[[object], bool]) -> Callable[[Any], tuple[object, ...]]:
    return lambda key: tuple(fact for fact in key if not unwanted(fact))


FORGOTTEN: dict[str, Callable[[Any], tuple[object, ...]]] = {
    "spec": without(lambda fact: isinstance(fact, DecodeSpec)),
    "layout": without(lambda fact: isinstance(fact, Layout | DecodeSpec)),
    "shapes": without(lambda fact: isinstance(fact, torch.Size)),
    "strides": without(lambda fact: type(fact) is tuple),
    "dtypes": without(lambda fact: isinstance(fact, torch.dtype)),
    "alignments": without(lambda fact: type(fact) is int),
    "whether k is v": lambda key: key[:5] + key[6:],
    "tensors": lambda key: key[:5],
}


def main() -> None:
    device = Device()
    plan = bind(plan_splits(PLAIN, [128] * BATCH, profile=H200, num_splits=2), torch.device("cpu"))
    with pretended(device):
        wrong, direct = wrong_pairs(device, plan)
        found: dict[str, object] = {"kinds": len(KINDS), "wrong": wrong, "direct": direct}
        for name, forget in FORGOTTEN.items():
            with forgetful(forget):
                found[f"without {name}"] = wrong_pairs(device, plan)[0]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
