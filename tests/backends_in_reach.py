"""The backends that this machine can run, one line each, and one way to call any of them.

A test decorated with ``every_backend`` runs once per backend and gets it as ``on``. Tensors go in
and come out on the CPU. A backend that declares a refusal is not skipped: the call is made,
UnsupportedError with every declared reason is demanded, and only then does the test end.
"""

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import splitkv
from splitkv.backends import registry
from splitkv.backends.base import Backend
from splitkv.backends.cuda import InterpretedCudaBackend
from splitkv.backends.registry import backend_named
from splitkv.common.spec import INT4, DecodeSpec, Layout, ScaleKind
from splitkv.common.visibility import window_from
from splitkv.kernels_ascend import standin

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is first imported

HOST_ARGUMENTS = ("seq_lens", "cu_seqlens_q", "cu_seqlens_k")
Arguments = dict[str, Any]


class RefusedAsDeclaredError(Exception):
    """A call was refused with the declared words; ``every_backend`` ends the test there."""


@dataclass(frozen=True, slots=True)
class InReach:
    """One backend as the tests call it.

    takes_everything: a refusal is a failure. place: moves a tensor to the backend's device with its
    strides and offset. active: entered around every call.
    """

    name: str
    backend: Backend
    takes_everything: bool = False
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor
    active: Callable[[], AbstractContextManager[object]] = nullcontext

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, *, tile: int | None = None, **arguments: Any
    ) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of ``splitkv.decode_attention``; ``tile``: with ``plan`` for that tile."""
        with self.active():
            placed = self._placed(q, k, v, tile, arguments)
            self._expect_declared_refusal(splitkv.decode_attention, placed, arguments)
            out, lse = splitkv.decode_attention(
                **placed, return_lse=True, backend=self.backend.name
            )
        return out.cpu(), lse.cpu()

    @contextmanager
    def may_refuse(self, words: str) -> Iterator[None]:
        """For tensors (strides, capacities) that a backend may refuse, in these words."""
        try:
            yield
        except splitkv.UnsupportedError as refusal:
            if self.takes_everything or words not in str(refusal):
                raise
            raise RefusedAsDeclaredError from refusal

    def out_alone(self, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        """``out`` of a call that does not ask for the lse."""
        with self.active():
            placed = self._placed(q, k, v, None, arguments)
            out = splitkv.decode_attention(**placed, backend=self.backend.name)
        assert isinstance(out, Tensor)
        return out.cpu()

    def decode_as(
        self,
        spec: DecodeSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_table: Tensor,
        seq_lens: Tensor,
        layout: str,
        ring: bool = False,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor]:
        """``splitkv.decode`` over pages (``ring``: in a circle) with a spec of the caller's."""
        with self.active():
            q, k, v, block_table = map(self.place, (q, k, v, block_table))
            kind = splitkv.RingCache if ring else splitkv.PagedCache
            cache = kind(k, v, block_table, seq_lens, Layout(layout))
            placed = {name: self._placed_argument(name, value) for name, value in arguments.items()}
            placed["backend"] = self.backend.name
            self._expect_refusal(spec, lambda: splitkv.decode(q, cache, spec, **placed))
            out, lse = splitkv.decode(q, cache, spec, **placed)
        return out.cpu(), lse.cpu()

    def partial(
        self, q: Tensor, k: Tensor, v: Tensor, *, tile: int | None = None, **arguments: Any
    ) -> splitkv.PartialState:
        """``splitkv.partial_attention``; arguments as for ``decode``."""
        with self.active():
            placed = self._placed(q, k, v, tile, arguments)
            self._expect_declared_refusal(splitkv.partial_attention, placed, arguments)
            state = splitkv.partial_attention(**placed, backend=self.backend.name)
        return splitkv.PartialState(state.max.cpu(), state.lse.cpu(), state.out.cpu())

    def merge(
        self, states: list[splitkv.PartialState] | splitkv.PartialState
    ) -> splitkv.PartialState:
        """The backend's merge of states that live on the CPU."""
        with self.active():
            if isinstance(states, splitkv.PartialState):
                merged = self.backend.merge(self._placed_state(states))
            else:
                merged = self.backend.merge([self._placed_state(state) for state in states])
        return splitkv.PartialState(merged.max.cpu(), merged.lse.cpu(), merged.out.cpu())

    def plan(
        self,
        spec: DecodeSpec,
        seq_lens: list[int],
        *,
        tile: int | None = None,
        num_splits: int | None = None,
        split_size: int | None = None,
        capacity: int | None = None,
    ) -> splitkv.SplitPlan:
        """A plan by the backend's profile; with ``tile``, one that cuts small requests too: on
        multiples of so many tokens, for many cores and at no cost of merging.
        """
        profile = self.backend.profile()
        if tile is not None:
            profile = replace(
                profile, tile_tokens=tile, workers=132, launch_seconds=0.0, merge_seconds=0.0
            )
        return splitkv.plan_splits(
            spec,
            seq_lens,
            profile=profile,
            num_splits=num_splits,
            split_size=split_size,
            capacity=capacity,
        )

    def _placed_state(self, state: splitkv.PartialState) -> splitkv.PartialState:
        return splitkv.PartialState(*map(self.place, (state.max, state.lse, state.out)))

    def _placed(
        self, q: Tensor, k: Tensor, v: Tensor, tile: int | None, arguments: Arguments
    ) -> Arguments:
        given = {"q": q, "k": k, "v": v, **arguments}
        placed = {name: self._placed_argument(name, value) for name, value in given.items()}
        if tile is not None:
            splits = {name: placed.pop(name, None) for name in ("num_splits", "split_size")}
            spec = spec_of(**given)
            placed["plan"] = self.plan(spec, _host_lengths(given), tile=tile, **splits)
        return placed

    def _expect_declared_refusal(
        self, function: Callable[..., object], placed: Arguments, arguments: Arguments
    ) -> None:
        given = {name: placed[name] for name in ("q", "k", "v")} | arguments
        self._expect_refusal(
            spec_of(**given), lambda: function(**placed, backend=self.backend.name)
        )

    def _expect_refusal(self, spec: DecodeSpec, call: Callable[[], object]) -> None:
        declared = self.backend.refusals(spec)
        if not declared:
            return
        assert not self.takes_everything, declared
        with pytest.raises(splitkv.UnsupportedError) as refusal:
            call()
        for reason in declared:
            assert reason in str(refusal.value)
        raise RefusedAsDeclaredError

    def _placed_argument(self, name: str, value: Any) -> Any:
        on_host = name in HOST_ARGUMENTS or not isinstance(value, Tensor)
        return value if on_host else self.place(value)


@contextmanager
def _interpreting() -> Iterator[None]:
    """The interpreted CUDA backend in the place of the one for GPUs: public calls reach it."""
    others = [backend for backend in registry.BACKENDS if backend.name != INTERPRETED_CUDA.name]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # NumPy, which computes there, warns of log(0) and inf - inf
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.*")
        patch.setattr(registry, "BACKENDS", (INTERPRETED_CUDA, *others))
        yield


@contextmanager
def _imitating() -> Iterator[None]:
    """The stand-in for torch_npu, without the warning of page sizes that are rarely run there."""
    with standin.installed(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="page size")
        yield


def _on_npu(tensor: Tensor) -> Tensor:
    with standin.installed():
        return tensor if tensor.device.type == "npu" else standin.NpuTensor(tensor)


def _on_gpu(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cuda":
        return tensor
    storage: Any = tensor.untyped_storage().cuda()
    moved = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return moved.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


CUDA_INTERPRETED = "cuda (interpreter)"
ASCEND_IMITATED = "ascend (stand-in)"
INTERPRETED = (CUDA_INTERPRETED,)
NOT_NATIVE = (CUDA_INTERPRETED, ASCEND_IMITATED)
"""For ``backends(slow=...)``."""

INTERPRETED_CUDA = InterpretedCudaBackend()
IN_REACH = (
    InReach("cpu", backend_named("cpu"), takes_everything=True),
    InReach("cuda", backend_named("cuda"), place=_on_gpu)
    if torch.cuda.is_available()
    else InReach(CUDA_INTERPRETED, INTERPRETED_CUDA, active=_interpreting),
    InReach(ASCEND_IMITATED, backend_named("ascend"), place=_on_npu, active=_imitating),
)


def every_backend(test: Callable[..., None]) -> Callable[..., None]:
    """Run ``test(on=...)`` once for every backend in reach."""
    return backends()(test)


def backends(
    *, slow: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``every_backend`` with the runs of those named in ``slow`` marked slow.

    without: backends for which the test would show nothing, or take an hour.
    """
    parameters = [
        pytest.param(on, id=on.name, marks=[pytest.mark.slow] if on.name in slow else [])
        for on in IN_REACH
        if on.name not in without
    ]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            try:
                test(**arguments)
            except RefusedAsDeclaredError:
                return

        return pytest.mark.parametrize("on", parameters)(run)

    return decorate


def spec_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **arguments: Any,
) -> DecodeSpec:
    """The spec that the one-call form makes of these arguments, stated independently of it."""
    kind = Layout.PACKED if cu_seqlens_k is not None else Layout(layout)
    token_axis = {Layout.NHD: 1, Layout.HND: 2}.get(kind)
    head_axis = {Layout.PACKED: 1, Layout.BSND: 2, Layout.NHD: 2}.get(kind, 1)
    queries = q.shape[1] if q.ndim == 4 else 1
    if cu_seqlens_q is not None:
        queries = max(int(cu_seqlens_q.cpu().diff().max()), 1)
    return DecodeSpec(
        num_q_heads=q.shape[-2],
        num_kv_heads=k.shape[head_axis],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1] * (2 if v.dtype == INT4 else 1),
        layout=kind,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        page_size=None if token_axis is None else k.shape[token_axis],
        num_queries=queries,
        packed_queries=cu_seqlens_q is not None,
        causal=arguments.get("causal", True),
        sm_scale=arguments.get("sm_scale"),
        sliding_window=window_from(arguments.get("sliding_window"), arguments.get("window_left")),
        window_block=arguments.get("window_block", 1),
        anchor_tokens=arguments.get("anchor_tokens", 0),
        kv_start=arguments.get("kv_start") is not None,
        logits_soft_cap=arguments.get("logits_soft_cap"),
        alibi=arguments.get("alibi_slopes") is not None,
        attn_bias=arguments.get("attn_bias") is not None,
        attn_mask=arguments.get("attn_mask") is not None,
        sinks=arguments.get("sinks") is not None,
        k_scale=_scale_kind(arguments.get("k_scale"), k),
        v_scale=_scale_kind(arguments.get("v_scale"), v),
        k_zero=arguments.get("k_zero") is not None,
        v_zero=arguments.get("v_zero") is not None,
    )


def _scale_kind(scale: Tensor | float | None, part: Tensor) -> ScaleKind | None:
    if scale is None:
        return None
    if part.dtype == INT4:
        return ScaleKind.GROUP
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return ScaleKind.TENSOR
    if scale.shape == part.shape[:-1]:
        return ScaleKind.TOKEN
    if scale.ndim == 2 and scale.shape[1] == part.shape[-1]:
        return ScaleKind.CHANNEL
    return ScaleKind.HEAD if scale.ndim == 1 else ScaleKind.REQUEST_HEAD


def _host_lengths(given: Arguments) -> list[int]:
    if (offsets := given.get("cu_seqlens_k")) is not None:
        return torch.diff(offsets).tolist()
    lengths = given.get("seq_lens")
    if lengths is None:
        return [given["k"].shape[1 if given["layout"] == "BSND" else 2]] * given["k"].shape[0]
    return lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
