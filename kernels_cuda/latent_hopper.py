"""Absorbed MLA on Hopper: 64 rows of one query against tiles of 64 tokens, two in shared memory.

The schedule is written out (Gluon), since Triton's own gives each of the two warpgroups the whole
first product and starts loading a tile no earlier than the one before it has been summed. Here the
warpgroups share the tokens of the first product and the columns of the second, and the next tile
is on its way for all of the time that one takes.
"""
# Layouts are constexprs that only Gluon's compiler can tell from what they hold.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false

from dataclasses import replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from splitkv.common.call import DecodeCall
from splitkv.kernels_cuda.launch import Launch
from splitkv.kernels_cuda.masks import tile_bounds, tokens_seen
from splitkv.kernels_cuda.primitives import (
    finite_or_zero_top,
    let_merge_start,
    narrow,
    normalise,
    span,
    table_entries,
    token_offsets,
    weight_of,
)
from splitkv.kernels_cuda.rows import finish_scores, load_item, store

ROWS, TOKENS = 64, 64
"""A tile: queries and two tiles of keys take 226 KiB, and a block of Hopper has 227."""

_HEAD, _REST = 512, 64


@gluon.jit
def _copy_tile(
    head_tile,  # shared memory [N, HEAD] and [N, REST]
    rest_tile,
    tokens,  # [N], pointers to keys
    seen,
    HEAD: gl.constexpr,
    REST: gl.constexpr,
    COPY: gl.constexpr,
):
    """Start to copy keys; those that no row sees become 0."""
    d = gl.arange(0, HEAD, gl.SliceLayout(0, COPY))
    rest = HEAD + gl.arange(0, REST, gl.SliceLayout(0, COPY))
    seen = seen[:, None]
    async_copy.async_copy_global_to_shared(head_tile, tokens[:, None] + d[None, :], mask=seen)
    async_copy.async_copy_global_to_shared(rest_tile, tokens[:, None] + rest[None, :], mask=seen)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=[
        "capacity",
        "window",
        "anchors",
        "row_tiles",
        "kv_heads",
        "most_queries",
    ],
    do_not_specialize_on_alignment=[
        "items",
        "seq_lens",
        "cu_seqlens_q",
        "block_table",
        "alibi_slopes",
        "sinks",
    ],
)
def latent_hopper_kernel(
    q,  # [B, S, H, D] or [tokens, H, D]
    k,
    items,  # int32 [5, capacity]: request, start, end, opens the window, slot
    seq_lens,  # [B], or cu_seqlens_k [B + 1]
    cu_seqlens_q,  # None, or [B + 1]
    block_table,  # None, or [B, columns]
    alibi_slopes,  # None, or [B, H]
    sinks,  # None, or [H]
    out,  # [B, S, H, Dv] or [tokens, H, Dv]
    out_lse,  # [B, S, H] or [tokens, H]
    out_top,  # None, or like out_lse
    part_out,  # [slots, S * H, Dv]
    part_lse,  # [slots, S * H]
    part_top,
    q_strides,  # request, query, head, dim
    k_strides,  # page or request, slot or row, head, 1
    table_strides,
    alibi_strides,
    out_strides,  # request, query, head, dim
    lse_strides,
    top_strides,
    capacity,
    sm_scale,
    cap,
    window,
    anchors,
    row_tiles,
    kv_heads,
    most_queries,  # S, of packed queries the largest
    GROUP: gl.constexpr,  # a multiple of BLOCK_M
    HEAD: gl.constexpr,  # Dv: values are these first columns of the keys
    REST: gl.constexpr,  # D - Dv
    PAGE_SIZE: gl.constexpr,  # 0: not paged
    PACKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    WINDOW_BLOCK: gl.constexpr,  # 1: the window begins at any token
    SOFT_CAP: gl.constexpr,
    WIDE_ROWS: gl.constexpr,  # a page, or a tile of a cache without pages, spans 2**31 elements
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    EARLY: gl.constexpr,
):
    PRODUCTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    SUMMED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, HEAD // 2, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    WRITE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, PRODUCTS)
    OF_TOKENS: gl.constexpr = gl.SliceLayout(0, PRODUCTS)

    program = gl.program_id(0)
    row_tile = program % row_tiles  # neighbours read the same keys: once from memory
    kv_head = (program // row_tiles % kv_heads).to(gl.int64)
    request, planned_start, planned_end, opens_window, slot = load_item(
        items, program // row_tiles // kv_heads, capacity
    )
    if request < 0:  # the plan has fewer items than its capacity
        return
    if PACKED:
        first_token, length = span(seq_lens, request, True)
    else:
        first_token = request * 0
        length = gl.load(seq_lens + request).to(gl.int32)
    first_query = request * 0
    queries = most_queries
    if cu_seqlens_q is not None:
        first_query, queries = span(cu_seqlens_q, request, True)
    step = row_tile * BLOCK_M // GROUP
    if step >= queries:
        return
    at_step = length - queries + step
    start, _full_start, _full_end, end = tile_bounds(
        planned_start,
        planned_end,
        opens_window,
        length,
        at_step,
        at_step,
        length,
        window,
        anchors,
        most_queries,
        CAUSAL,
        WINDOW,
        BLOCK_N,
        WINDOW_BLOCK,
    )
    query = first_query + step
    first_head = kv_head * GROUP + row_tile * BLOCK_M % GROUP
    k += kv_head * k_strides[2]

    # Queries go to shared memory; so does every tile of keys.
    q_row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
    q_at = q + request * q_strides[0] + query * q_strides[1] + first_head * q_strides[2]
    q_at = q_at + q_row[:, None].to(gl.int64) * q_strides[2]
    d = gl.arange(0, HEAD, gl.SliceLayout(0, COPY)).to(gl.int64)
    rest = HEAD + gl.arange(0, REST, gl.SliceLayout(0, COPY)).to(gl.int64)
    DTYPE: gl.constexpr = k.dtype.element_ty
    q_head = gl.allocate_shared_memory(DTYPE, [BLOCK_M, HEAD], SHARED)
    q_rest = gl.allocate_shared_memory(DTYPE, [BLOCK_M, REST], SHARED)
    q_head.store(gl.load(q_at + d[None, :] * q_strides[3]))
    q_rest.store(gl.load(q_at + rest[None, :] * q_strides[3]))
    heads = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, HEAD], SHARED)
    rests = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, REST], SHARED)
    weight_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_M, BLOCK_N], SHARED)

    slope = None
    if alibi_slopes is not None:
        head = first_head + gl.arange(0, BLOCK_M, OF_ROWS)
        slopes = alibi_slopes + request * alibi_strides[0] + head * alibi_strides[1]
        slope = gl.load(slopes).to(gl.float32)
    position = at_step + gl.arange(0, BLOCK_M, OF_ROWS) * 0
    asked = position == at_step
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, OF_ROWS)
    total = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PRODUCTS)
    summed = gl.zeros([BLOCK_M, HEAD], gl.float32, SUMMED)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PRODUCTS)

    at = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    seen = tokens_seen(at, end, at_step, window, anchors, WINDOW, WINDOW_BLOCK)
    page = table_entries(at, seen, request, block_table, table_strides, PAGE_SIZE)
    offsets = token_offsets(page, at, start, first_token, k_strides, PAGE_SIZE, WIDE_ROWS)
    _copy_tile(heads.index(0), rests.index(0), k + offsets, seen, HEAD, REST, COPY)
    at += BLOCK_N
    seen = tokens_seen(at, end, at_step, window, anchors, WINDOW, WINDOW_BLOCK)
    page = table_entries(at, seen, request, block_table, table_strides, PAGE_SIZE)
    buffer = 0
    for first in range(start, end, BLOCK_N):
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        keys = heads.index(buffer)
        products = warpgroup_mma(
            q_head, keys.permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        products = warpgroup_mma(
            q_rest, rests.index(buffer).permute((1, 0)), products, is_async=True
        )
        offsets = token_offsets(
            page, at, first + BLOCK_N, first_token, k_strides, PAGE_SIZE, WIDE_ROWS
        )
        _copy_tile(
            heads.index(1 - buffer),
            rests.index(1 - buffer),
            k + offsets,
            seen,
            HEAD,
            REST,
            COPY,
        )
        at += BLOCK_N
        seen = tokens_seen(at, end, at_step, window, anchors, WINDOW, WINDOW_BLOCK)
        page = table_entries(at, seen, request, block_table, table_strides, PAGE_SIZE)

        products = warpgroup_mma_wait(0, deps=(products,))
        token = first + gl.arange(0, BLOCK_N, OF_TOKENS)
        scores, _visible = finish_scores(
            products,
            token,
            tokens_seen(token, end, at_step, window, anchors, WINDOW, WINDOW_BLOCK),
            position,
            asked,
            slope,
            None,
            None,
            None,
            None,
            0,
            0,
            sm_scale,
            cap,
            window,
            anchors,
            False,
            WINDOW,
            WINDOW_BLOCK,
            SOFT_CAP,
            False,
        )
        # as online_softmax, but sums stay apart until the end: each would cost a barrier
        new_top = gl.maximum(top, gl.max(scores, 1))
        base = finite_or_zero_top(new_top)
        weights = weight_of(scores - base[:, None], False)
        decay = weight_of(top - base, False)
        top = new_top
        total = total * decay[:, None] + weights
        weight_tile.store(narrow(weights, DTYPE))
        summed *= gl.convert_layout(decay, gl.SliceLayout(1, SUMMED))[:, None]
        fence_async_shared()
        gl.thread_barrier()
        summed = warpgroup_mma(weight_tile, keys, summed, is_async=True)
        summed = warpgroup_mma_wait(0, deps=(summed,))
        buffer = 1 - buffer
    async_copy.wait_group(0)
    let_merge_start(EARLY)

    WRITE_ROWS: gl.constexpr = gl.SliceLayout(1, WRITE)
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SUMMED))
    top = gl.convert_layout(top, gl.SliceLayout(1, SUMMED))
    lse, result = normalise(top, total, summed)
    top = gl.convert_layout(top, WRITE_ROWS)
    lse = gl.convert_layout(lse, WRITE_ROWS)
    head = first_head + gl.arange(0, BLOCK_M, WRITE_ROWS)
    asked = head >= 0
    dv = gl.arange(0, HEAD, gl.SliceLayout(0, WRITE))
    result = gl.convert_layout(result, WRITE)
    store(
        slot,
        part_out,
        part_lse,
        part_top,
        out,
        out_lse,
        out_top,
        sinks,
        out_strides,
        lse_strides,
        top_strides,
        request,
        query,
        step,
        head,
        most_queries,
        kv_heads * GROUP,
        asked,
        dv,
        top,
        lse,
        result,
        HEAD,
    )


def takes(call: DecodeCall, *, shared: bool) -> bool:
    """Whether the kernel is made for ``call``: absorbed MLA in 16 bits, of 64 heads or a multiple,
    whose tokens lie in whole pieces of 16 bytes; masks may tell queries apart, but not heads.

    shared: v is the view k[..., :512].
    """
    spec, k = call.spec, call.cache.k
    wide = (spec.head_dim, spec.head_dim_v) == (_HEAD + _REST, _HEAD) and spec.dtype.itemsize == 2
    masked = spec.attn_mask or spec.attn_bias
    aligned = k.stride(-1) == 1 and k.data_ptr() % 16 == 0
    aligned = aligned and all(stride % 16 == 0 for stride in k.stride()[:-1])
    return shared and wide and aligned and not masked and spec.group % ROWS == 0


def hopper_launch(launch: Launch) -> Launch:
    """``launch`` of the kernel for any device, with the same arguments, as one of this kernel."""
    taken = {name: launch.arguments[name] for name in _PASSED_ON}
    arguments = taken | {"HEAD": _HEAD, "REST": _REST}
    return replace(launch, kernel=latent_hopper_kernel, arguments=arguments)


_PASSED_ON = tuple(name for name in latent_hopper_kernel.arg_names if name not in ("HEAD", "REST"))
