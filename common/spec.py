"""What is fixed for a layer: head counts, head dims, dtypes, cache layout, masking, quantisation.

Shape letters used everywhere: B requests, S queries per request, H query heads, K kv heads, G = H /
K, D and Dv head dims, T cached tokens, P page size, N splits.
"""

import math
from ctypes import c_float
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial

import torch


class Layout(Enum):
    """How K and V lie in memory; never guessed."""

    BSND = "BSND"
    """dense [B, T, K, D]"""
    BNSD = "BNSD"
    """dense [B, K, T, D]"""
    PACKED = "packed"
    """[sum of T, K, D] with cu_seqlens_k [B + 1]"""
    NHD = "NHD"
    """pages [pages, P, K, D] with a block table"""
    HND = "HND"
    """pages [pages, K, P, D] with a block table"""

    @property
    def paged(self) -> bool:
        return self in (Layout.NHD, Layout.HND)


class Feature(Enum):
    """One row of the support matrix; the value is the row's text."""

    DENSE = "dense cache (BSND, BNSD)"
    PACKED = "packed cache (cu_seqlens_k)"
    PAGED = "paged cache (NHD, HND)"
    MULTI_QUERY = "several queries per request (S > 1)"
    PACKED_QUERIES = "ragged queries (cu_seqlens_q)"
    NON_CAUSAL = "no causal mask (causal=False, S > 1)"
    SLIDING_WINDOW = "sliding window"
    WINDOW_BLOCKS = "window that begins at blocks (chunked attention)"
    ANCHORS = "anchor tokens with a window"
    KV_START = "per-request start of the visible history"
    SOFT_CAP = "logit soft cap"
    ALIBI = "ALiBi slopes"
    ATTN_BIAS = "additive bias"
    ATTN_MASK = "boolean mask (trees)"
    SINKS = "learned sinks"
    HEAD_DIM_V = "value head dim other than the key's"
    MIXED_DTYPE = "cache dtype other than the query's"
    KV_SCALES = "quantised cache with scales"
    KV_FINE_SCALES = "quantised cache: scales per token or channel"
    KV_ZERO_POINTS = "quantised cache: zero points"
    KV_INT4 = "quantised cache: int4, two codes a byte, scales per group"
    STATE = "partial state (max, lse, out) returned"


class ScaleKind(Enum):
    """How finely a quantised K or V is scaled; ``splitkv.common.quantised`` has the formula."""

    TENSOR = "one scale"
    HEAD = "one per kv head, [K]"
    REQUEST_HEAD = "one per request and kv head, [B, K]"
    TOKEN = "one per token and kv head, laid out like the cache without its head dim"
    CHANNEL = "one per kv head and element of the head dim, [K, D] or [K, Dv]"
    GROUP = "one per token, kv head and group of the head dim, of int4 codes"


FINE_SCALES = (ScaleKind.TOKEN, ScaleKind.CHANNEL, ScaleKind.GROUP)
"""Kinds that do not scale all that one query head reads alike."""
INT4 = torch.uint8
"""Two codes a byte: k is [.., D / 2] and v [.., Dv / 2]; torch has no dtype of its own for it."""
SMALLEST_GROUP = 16
"""Elements of the head dim that share a scale of int4 codes, at least."""
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, INT4)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


MOST_TOKENS = 2**31 - 1
"""Positions are 32-bit on devices; offsets are not."""


def codes_per_item(dtype: torch.dtype) -> int:
    """Elements of the head dim that an item of a cache of ``dtype`` holds."""
    return 2 if dtype == INT4 else 1


def _in_float32(value: float) -> float:
    """``value`` as the kernels see it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"sm_scale and logits_soft_cap must be numbers, got {value!r}")
    return c_float(value).value


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSpec:
    """The static facts of one layer's decode attention.

    Units: ``sliding_window``, ``window_block`` and ``anchor_tokens`` in tokens, the query's own
    position counted in the window; what a window of blocks shows is said in
    ``splitkv.common.visibility``. ``sm_scale=None`` is ``head_dim ** -0.5``,
    ``head_dim_v=None`` is ``head_dim``, ``kv_dtype=None`` is ``dtype``; all three hold their
    resolved value after construction. ``num_queries`` is S (with ``packed_queries`` the largest S
    of the batch). The flags ``kv_start``, ``alibi``, ``attn_bias``, ``attn_mask``, ``sinks``,
    ``k_zero`` and ``v_zero`` say that the call will bring such a tensor, so that a backend can be
    chosen before there is one.

    Raises:
        ValueError: a field contradicts another or is out of its range; the text names the field,
        value and limit.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    layout: Layout
    head_dim_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    page_size: int | None = None
    num_queries: int = 1
    packed_queries: bool = False
    causal: bool = True
    sm_scale: float | None = None
    sliding_window: int | None = None
    window_block: int = 1
    anchor_tokens: int = 0
    kv_start: bool = False
    logits_soft_cap: float | None = None
    alibi: bool = False
    attn_bias: bool = False
    attn_mask: bool = False
    sinks: bool = False
    k_scale: ScaleKind | None = None
    v_scale: ScaleKind | None = None
    k_zero: bool = False
    v_zero: bool = False
    plan_key: tuple[object, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # resolves defaults once; the instance is frozen for everybody else
        set_ = object.__setattr__
        set_(self, "layout", Layout(self.layout))
        set_(self, "head_dim_v", self.head_dim_v or self.head_dim)
        set_(self, "kv_dtype", self.kv_dtype or self.dtype)
        if 0 in (self.num_q_heads, self.num_kv_heads):
            raise ValueError(
                f"num_q_heads {self.num_q_heads} and num_kv_heads {self.num_kv_heads} must be 1 or "
                "more"
            )
        for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "num_queries"):
            _positive(name, getattr(self, name))
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads {self.num_q_heads} is not divisible by num_kv_heads "
                f"{self.num_kv_heads}"
            )
        if self.sm_scale is None:
            set_(self, "sm_scale", self.head_dim**-0.5)
        set_(self, "sm_scale", float(self.sm_scale))  # type: ignore[arg-type]
        if not math.isfinite(_in_float32(self.scale)):
            raise ValueError(f"sm_scale must be finite in float32, got {self.sm_scale}")
        flags = ("packed_queries", "causal", "kv_start", "alibi", "attn_bias", "attn_mask", "sinks")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("k_scale", "v_scale"):
            kind = getattr(self, name)
            if kind is not None and not isinstance(kind, ScaleKind):
                raise ValueError(f"{name} must be a ScaleKind or None, got {kind!r}")
        for name in ("k_zero", "v_zero"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._check_layout()
        self._check_masking()
        self._check_dtypes()
        key = (self.num_q_heads, self.num_kv_heads, self.head_dim, self.head_dim_v, self.page_size)
        set_(self, "plan_key", (*key, *self._range_key, self.kv_dtype))
        compared = tuple(getattr(self, entry.name) for entry in fields(self) if entry.compare)
        set_(self, "_hash", hash(compared))

    def __reduce__(self) -> tuple[object, ...]:
        # made anew elsewhere: a hash holds for one process
        given = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        return partial(DecodeSpec, **given), ()

    def __hash__(self) -> int:
        return self._hash  # hashed once: a bound plan looks its spec up at every call

    @property
    def _range_key(self) -> tuple[object, ...]:
        window = (self.sliding_window, self.window_block, self.anchor_tokens)
        return (self.num_queries, self.causal, *window)

    def _check_layout(self) -> None:
        if self.layout.paged:
            if self.page_size is None:
                raise ValueError(f"layout {self.layout.value} needs page_size, got None")
            _positive("page_size", self.page_size)
        elif self.page_size is not None:
            raise ValueError(
                f"page_size {self.page_size} has no meaning for layout {self.layout.value}"
            )

    def _check_masking(self) -> None:
        if self.sliding_window is not None:
            _positive("sliding_window", self.sliding_window)
            if self.sliding_window > MOST_TOKENS:
                raise ValueError(
                    f"sliding_window is at most {MOST_TOKENS} (None: unlimited), "
                    f"got {self.sliding_window}"
                )
        _positive("window_block", self.window_block)
        if self.window_block > 1 and (self.sliding_window or 1) % self.window_block:
            raise ValueError(
                f"window_block {self.window_block} needs a sliding_window that is a multiple of it "
                f"(of chunked attention both are the chunk), got {self.sliding_window}"
            )
        anchors = self.anchor_tokens
        whole = isinstance(anchors, int) and not isinstance(anchors, bool)
        if not whole or not 0 <= anchors <= MOST_TOKENS:
            raise ValueError(
                f"anchor_tokens must be an integer of 0 to {MOST_TOKENS}, got {anchors!r}"
            )
        cap = self.logits_soft_cap
        if cap is not None and not 0 < _in_float32(cap) < math.inf:
            raise ValueError(f"logits_soft_cap must be finite and above 0 (None: off), got {cap}")

    def _check_dtypes(self) -> None:
        if self.dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype (of q) must be one of {FLOAT_DTYPES}, got {self.dtype}")
        if self.kv_dtype not in FLOAT_DTYPES + QUANTISED_DTYPES:
            raise ValueError(
                f"kv_dtype must be one of {FLOAT_DTYPES + QUANTISED_DTYPES}, got {self.kv_dtype}"
            )
        scaled = self.k_scale is not None or self.v_scale is not None
        if scaled and self.kv_dtype not in QUANTISED_DTYPES:
            raise ValueError(
                f"k_scale and v_scale need a quantised cache {QUANTISED_DTYPES}, kv_dtype is "
                f"{self.kv_dtype}"
            )
        self._check_groups()
        for name, zero, kind in (
            ("k_zero", self.k_zero, self.k_scale),
            ("v_zero", self.v_zero, self.v_scale),
        ):
            if zero and (kind is None or self.kv_dtype not in (torch.int8, INT4)):
                raise ValueError(
                    f"{name} needs an int8 cache with a scale (8-bit floats are symmetric): "
                    f"kv_dtype is {self.kv_dtype}, {name[0]}_scale {kind}"
                )

    def _check_groups(self) -> None:
        """int4 codes have scales of groups, and nothing else has."""
        for part, kind, dim in (
            ("k", self.k_scale, self.head_dim),
            ("v", self.v_scale, self.head_dim_v),
        ):
            if (kind is ScaleKind.GROUP) != (self.kv_dtype == INT4):
                raise ValueError(
                    f"int4 codes ({INT4}, two a byte) and scales of kind GROUP go together: "
                    f"kv_dtype is {self.kv_dtype}, {part}_scale {kind}"
                )
            if kind is ScaleKind.GROUP and dim % SMALLEST_GROUP:
                name = "head_dim" if part == "k" else "head_dim_v"
                raise ValueError(
                    f"{name} of int4 codes must be a multiple of {SMALLEST_GROUP}, the smallest "
                    f"group of one scale, got {dim}; use int8"
                )

    @property
    def group(self) -> int:
        """G, the query heads that share one kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """``sm_scale`` with its default resolved."""
        assert self.sm_scale is not None
        return self.sm_scale

    @property
    def cache_dtype(self) -> torch.dtype:
        """``kv_dtype`` with its default resolved."""
        assert self.kv_dtype is not None
        return self.kv_dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token, all kv heads."""
        items = (self.head_dim + self.head_dim_v) // codes_per_item(self.cache_dtype)
        return self.num_kv_heads * items * self.cache_dtype.itemsize

    @property
    def features(self) -> tuple[Feature, ...]:
        """The matrix rows that this spec touches, in the enum's order."""
        several = self.num_queries > 1
        touched = {
            Feature.DENSE: self.layout in (Layout.BSND, Layout.BNSD),
            Feature.PACKED: self.layout is Layout.PACKED,
            Feature.PAGED: self.layout.paged,
            Feature.MULTI_QUERY: several,
            Feature.PACKED_QUERIES: self.packed_queries,
            Feature.NON_CAUSAL: several and not self.causal,
            Feature.SLIDING_WINDOW: self.sliding_window is not None,
            Feature.WINDOW_BLOCKS: self.window_block > 1,
            Feature.ANCHORS: self.anchor_tokens > 0 and self.sliding_window is not None,
            Feature.KV_START: self.kv_start,
            Feature.SOFT_CAP: self.logits_soft_cap is not None,
            Feature.ALIBI: self.alibi,
            Feature.ATTN_BIAS: self.attn_bias,
            Feature.ATTN_MASK: self.attn_mask,
            Feature.SINKS: self.sinks,
            Feature.HEAD_DIM_V: self.head_dim_v != self.head_dim,
            Feature.MIXED_DTYPE: self.cache_dtype is not self.dtype
            and self.cache_dtype not in QUANTISED_DTYPES,
            Feature.KV_SCALES: self.cache_dtype in QUANTISED_DTYPES,
            Feature.KV_FINE_SCALES: not {self.k_scale, self.v_scale}.isdisjoint(FINE_SCALES),
            Feature.KV_ZERO_POINTS: self.k_zero or self.v_zero,
            Feature.KV_INT4: self.cache_dtype == INT4,
        }
        return tuple(feature for feature in Feature if touched.get(feature, False))
