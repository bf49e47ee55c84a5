"""Attention of transformers models, served by splitkv.

``register()`` installs an attention function together with its mask function;
``model.set_attn_implementation("splitkv")`` uses them. Which queries go where:

- queries with a history (a decode step, or up to ``max_queries`` that follow cached tokens):
  ``splitkv.decode``, in splits;
- queries without one (a prompt), and longer runs: torch's scaled_dot_product_attention, the same
  mathematics unsplit;
- with soft cap or sinks, which torch's function lacks, and runs that continue a paged cache:
  ``splitkv.decode`` in blocks of ``max_queries``.

What is hidden follows from the mask that transformers builds: padding, windows, chunks, packed
sequences, the empty tail of a static cache. A step reads each mask on the host once, for all
layers. Refused with an error: a missing mask function, attention weights (``output_attentions``),
dropout, gradients. Continuous batching of transformers takes no attention function of others.
Under ``torch.compile`` the attention is a graph break.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from splitkv.backends.decode import decode
from splitkv.backends.registry import select
from splitkv.common.plan import SplitPlan, plan_splits
from splitkv.common.profile import DeviceProfile
from splitkv.common.spec import DecodeSpec
from splitkv.integrations.blocks import PAGES, Block, Pages, dense_blocks
from splitkv.integrations.masks import Hidden, all_visible, fit
from splitkv.integrations.prefill import prefill

_UNREAD = ("output_attentions", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k")
"""Keywords that ask for another result and that nothing here reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How decode steps are cut and who computes them: the arguments of ``register``."""

    num_splits: int | None
    split_size: int | None
    backend: str | None
    profile: DeviceProfile | None
    max_queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """What one layer's attention means, apart from what it may see."""

    sm_scale: float
    soft_cap: float | None
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        """Nothing in it that torch's own attention lacks."""
        return self.soft_cap is None and self.sinks is None


def register(
    name: str = "splitkv",
    *,
    num_splits: int | None = None,
    split_size: int | None = None,
    backend: str | None = None,
    profile: DeviceProfile | None = None,
    max_queries: int = 16,
) -> None:
    """Make ``name`` an attention implementation: attention function and mask function together.

    num_splits, split_size, backend: as for ``splitkv.decode``. profile: how the planner sees the
    device (None: as the backend does); its ``tile_tokens`` is the finest cut. max_queries: the most
    queries of one ``splitkv.decode`` call. Registering a name again replaces it.

    Raises:
        ValueError: a name that transformers reads in its own way, or an argument below 1.
    """
    for taken in ("flash", "/", "|"):
        if taken in name:
            raise ValueError(
                f"name {name!r} contains {taken!r}, which names a kernel of transformers' own"
            )
    if name in ("eager", "sdpa", "flex_attention"):
        raise ValueError(f"name {name!r} is transformers' own; choose another")
    if profile is not None and not isinstance(profile, DeviceProfile):
        raise ValueError(f"profile must be a DeviceProfile or None, got {profile!r}")
    if num_splits is not None and split_size is not None:
        raise ValueError(
            f"give num_splits or split_size, not both: got {num_splits} and {split_size}"
        )
    for argument, value in (
        ("num_splits", num_splits),
        ("split_size", split_size),
        ("max_queries", max_queries),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{argument} must be 1 or more, got {value}")
    splitting = Splitting(
        num_splits=num_splits,
        split_size=split_size,
        backend=backend,
        profile=profile,
        max_queries=max_queries,
    )
    AttentionInterface.register(name, attention_function(name, splitting))
    AttentionMaskInterface.register(name, mask_function)


def mask_function(
    *,
    kv_length: int,
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of torch's attention, bool [B, 1, S, T].

    None only where nothing is hidden from one query, or nothing but the future from a prompt that
    brings all keys. The mask is made at once and keeps no reference to its arguments: a static
    cache moves its offset on in place.
    """
    where: dict[str, Any]
    if q_length is not None:
        queries, where = q_length, {"q_length": q_length}
    else:  # before transformers 5.2
        assert cache_position is not None
        queries, where = cache_position.shape[0], {"cache_position": cache_position}
    # transformers also drops the mask of a prompt in an empty static cache: None would have to
    # mean top-left alignment there.
    skip = allow_is_causal_skip and queries in (1, kv_length)
    return sdpa_mask(kv_length=kv_length, allow_is_causal_skip=skip, **where, **kwargs)


def attention_function(name: str, splitting: Splitting) -> Callable[..., tuple[Tensor, None]]:
    """The attention function that ``register`` installs as ``name``, with transformers' arguments.

    It takes query [B, H, S, D], key [B, K, T, D], value [B, K, T, Dv] and attention_mask: bool
    [B or 1, 1 or H, S, T], True may be seen, or a float one that is added to the scores; it returns
    ([B, S, H, Dv], None).
    """

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        _refuse(query, dropout, kwargs)
        semantics = Semantics(
            sm_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            soft_cap=softcap,
            sinks=s_aux,
        )
        if attention_mask is None:
            _check_mask_function(name, module)
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            if sliding_window is not None and not causal and sliding_window <= key.shape[2]:
                raise ValueError(
                    f"sliding_window {sliding_window} of attention that is not causal needs a mask"
                )
        else:  # an additive mask has causality and window in it
            causal = attention_mask.dtype == torch.bool
        mask, bias = _mask_and_bias(attention_mask, position_bias, query.shape[0])
        hidden = Hidden(mask, bias, causal, sliding_window if causal else None)
        pages: Pages | None = kwargs.get(PAGES)
        if pages is None:
            out = _attend_dense(query, key, value, hidden, semantics, splitting)
        else:
            out = _attend_pages(query, key, value, pages, hidden, semantics, splitting)
        return out, None

    return cast(Callable[..., tuple[Tensor, None]], torch.compiler.disable(attention))


def _attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    hidden: Hidden,
    semantics: Semantics,
    splitting: Splitting,
) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    hidden = fit(hidden, keys)
    if queries > 1 and semantics.plain:
        visible = all_visible(hidden, queries, keys, query.device)
        if queries > splitting.max_queries or visible.stop - visible.start <= queries:
            return prefill(query, key, value, visible, hidden.bias, semantics.sm_scale)
    blocks = dense_blocks(key, value, hidden, queries, splitting.max_queries)
    return _decode(query, blocks, semantics, splitting)


def _attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Pages,
    hidden: Hidden,
    semantics: Semantics,
    splitting: Splitting,
) -> Tensor:
    queries = query.shape[2]
    first = pages.append(key, value, hidden.mask)
    if first and queries > 1 and semantics.plain:
        visible = all_visible(hidden, queries, queries, query.device)
        return prefill(query, key, value, visible, hidden.bias, semantics.sm_scale)
    blocks = pages.blocks(hidden, queries, splitting.max_queries)
    return _decode(query, blocks, semantics, splitting)


def _decode(
    query: Tensor, blocks: Iterator[Block], semantics: Semantics, splitting: Splitting
) -> Tensor:
    """``splitkv.decode`` of each block; query [B, H, S, D], returns [B, S, H, Dv]."""
    outs = []
    for block in blocks:
        spec = _spec(query, block, semantics)
        out, _ = decode(
            query[:, :, block.start : block.stop].transpose(1, 2),
            block.cache,
            spec,
            plan=_plan(spec, block.lengths, splitting, query.device),
            attn_mask=block.mask,
            attn_bias=block.bias,
            sinks=semantics.sinks,
            backend=splitting.backend,
        )
        outs.append(out)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def _spec(query: Tensor, block: Block, semantics: Semantics) -> DecodeSpec:
    cache = block.cache
    return _known_spec(
        num_q_heads=query.shape[1],
        num_kv_heads=cache.num_kv_heads,
        head_dim=query.shape[-1],
        head_dim_v=cache.v.shape[-1],
        layout=cache.layout,
        dtype=query.dtype,
        kv_dtype=cache.k.dtype,
        page_size=cache.page_size,
        num_queries=block.stop - block.start,
        causal=block.causal,
        sm_scale=semantics.sm_scale,
        sliding_window=block.window,
        logits_soft_cap=semantics.soft_cap,
        attn_mask=block.mask is not None,
        attn_bias=block.bias is not None,
        sinks=semantics.sinks is not None,
    )


@lru_cache(maxsize=64)
def _known_spec(**fields: Any) -> DecodeSpec:
    return DecodeSpec(**fields)


@lru_cache(maxsize=64)
def _plan(
    spec: DecodeSpec, lengths: tuple[int, ...], splitting: Splitting, device: torch.device
) -> SplitPlan:
    """One plan for all layers of a step that are alike: the first one's call binds it."""
    profile = splitting.profile or select(spec, device, splitting.backend).profile_for(spec)
    return plan_splits(
        spec,
        lengths,
        profile=profile,
        num_splits=splitting.num_splits,
        split_size=splitting.split_size,
    )


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, batch: int
) -> tuple[Tensor | None, Tensor | None]:
    """The boolean part [B, 1, S, T] and the additive part [B or 1, H or 1, S, T] of a mask."""
    if attention_mask is None:
        return None, position_bias
    if attention_mask.ndim != 4:
        raise ValueError(
            f"attention_mask must be [B, 1, S, T], got {list(attention_mask.shape)}; "
            "is another mask function registered?"
        )
    if attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1:
        if attention_mask.shape[0] != batch:
            attention_mask = attention_mask.expand(batch, -1, -1, -1)
        return attention_mask, position_bias
    bias = attention_mask
    if attention_mask.dtype == torch.bool:  # a mask for each head
        bias = torch.zeros_like(attention_mask, dtype=torch.float32)
        bias = bias.masked_fill(~attention_mask, float("-inf"))
    return None, bias if position_bias is None else bias + position_bias


def _refuse(query: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout must be 0, got {dropout}: for inference only; call model.eval()")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("query requires grad: for inference only; use torch.no_grad()")
    for keyword in _UNREAD:
        if kwargs.get(keyword) not in (None, False):
            raise ValueError(f"{keyword} is given, and splitkv's attention does not read it")


def _check_mask_function(name: str, module: torch.nn.Module) -> None:
    """Without its mask function transformers masks nothing, and padding would be attended."""
    config = getattr(module, "config", None)
    used = getattr(config, "_attn_implementation", None) or name
    if ALL_MASK_ATTENTION_FUNCTIONS.get(used) is not mask_function:
        raise ValueError(
            f"attention_mask is None and {used!r} has no mask function of splitkv, so padding and "
            f"windows would be ignored; splitkv.integrations.transformers.register({used!r}) "
            "registers both"
        )
