"""What the fused operators refuse, by their documentation: dtypes, head dims, lengths, pages,
masks, sinks.
"""

import torch

from splitkv.kernels_ascend.standin.fused_call import TND_FAMILY, FusedCall
from splitkv.kernels_ascend.standin.refusal import StandinGapError

MAX_BATCH, MAX_HEADS, MAX_GROUP, MAX_HEAD_DIM = 65536, 256, 64, 512
MAX_SINGLE_QUERY_KEYS, MAX_TND_REQUESTS, MAX_CACHE_ROW = 262144, 4096, 65535
TEMPLATE_HEAD_DIMS, SPLIT_FUSE_MAX_HEAD_DIM = (64, 128, 192), 256
COMPRESSED_MASK = 2048
_QUERY_RANK = {"BSH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4, "TND": 3, "NTD": 3, "NTD_TND": 3}


def check(call: FusedCall) -> None:
    """Raise RuntimeError with the first reason why the operator would not take ``call``."""
    _check_tensors(call)
    _check_heads(call)
    _check_lengths(call)
    if call.paged:
        _check_pages(call)
    _check_head_dim(call)
    _check_mask(call)
    _check_inner_precise(call)
    if call.sink is not None:
        _check_sink(call)
    if call.query_rope is not None or call.key_rope is not None:
        _check_rope(call)


def _check_rope(call: FusedCall) -> None:
    """Absorbed MLA only: D 512, rope 64, one kv head, values are the latent."""
    query, key = call.query_rope, call.key_rope
    if query is None or key is None:
        call.refuse("query_rope and key_rope go together")
    if call.layout == "BSH" or call.packed:
        raise StandinGapError(f"{call.operator}: the stand-in models rope in BSND and BNSD only")
    wanted = (*call.query.shape[:-1], 64), (*call.key.shape[:-1], 64)
    if (tuple(query.shape), tuple(key.shape)) != wanted:
        call.refuse(f"rope parts {list(query.shape)}, {list(key.shape)} are not {wanted}")
    if not (query.is_contiguous() and key.is_contiguous()):
        call.refuse("query_rope or key_rope is not contiguous")
    if call.query.shape[-1] != 512 or call.num_kv_heads != 1:
        call.refuse(f"rope goes with D 512 and 1 kv head, got {call.query.shape[-1]}")
    if call.num_heads not in (1, 2, 4, 8, 16, 32, 64, 128):  # quirk: mla-heads
        call.refuse(f"num_heads {call.num_heads} is no power of two up to 128")
    if call.value.data_ptr() != call.key.data_ptr():
        raise StandinGapError(f"{call.operator}: the stand-in wants the latent for key and value")


def max_queries(call: FusedCall) -> int:
    """S: the most queries of one request."""
    if not call.packed:
        return int(call.padded_query().shape[1])
    ends = call.query_lens or [0]
    return max(end - start for start, end in zip([0, *ends], ends, strict=False))


def batch_size(call: FusedCall) -> int:
    if call.packed:
        return len(call.query_lens or [])
    return int(call.query.shape[0])


def _check_tensors(call: FusedCall) -> None:
    tensors = {"query": call.query, "key": call.key, "value": call.value}
    if call.query.dim() != _QUERY_RANK[call.layout]:
        call.refuse(f"query of layout {call.layout} cannot have shape {list(call.query.shape)}")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16):  # quirk: sixteen-bit-only
            call.refuse(f"{name} dtype {tensor.dtype} is not float16 or bfloat16")
        if tensor.dtype != call.query.dtype:
            call.refuse(f"{name} dtype {tensor.dtype} differs from the query's {call.query.dtype}")
    for name, other in (
        *tensors.items(),
        ("block_table", call.block_table),
        ("atten_mask", call.mask),
    ):
        if other is not None and not other.is_contiguous():  # quirk: contiguous
            call.refuse(f"{name} is not contiguous (strides {list(other.stride())})")
    if call.key.shape[:-1] != call.value.shape[:-1]:
        call.refuse(f"key {list(call.key.shape)} and value {list(call.value.shape)} do not agree")
    if call.key.numel() >= 2**31:
        call.refuse(f"key has {call.key.numel()} elements, the limit is 2**31 - 1")


def _check_heads(call: FusedCall) -> None:
    heads, kv_heads = call.num_heads, call.num_kv_heads
    if not 0 < heads <= MAX_HEADS or kv_heads <= 0 or heads % kv_heads:
        call.refuse(f"num_heads {heads} and num_key_value_heads {kv_heads} do not fit together")
    if heads // kv_heads > MAX_GROUP and call.query_rope is None:  # quirk: group-64
        call.refuse(
            f"num_heads / num_key_value_heads is {heads // kv_heads}, the limit is {MAX_GROUP}"
        )
    if call.layout == "BSH":
        if call.query.shape[-1] % heads:
            call.refuse(f"H {call.query.shape[-1]} is not a multiple of num_heads {heads}")
    elif _query_heads(call) != heads:
        call.refuse(f"query has {_query_heads(call)} heads, num_heads is {heads}")
    if not call.paged and call.key.dim() != call.query.dim():
        call.refuse(f"key has {call.key.dim()} dimensions, query has {call.query.dim()}")
    if not call.paged and call.key.numel() and call.layout != "BSH":
        got = call.key.shape[_head_axis(call)]
        if got != kv_heads:
            call.refuse(f"key has {got} heads, num_key_value_heads is {kv_heads}")


def _head_axis(call: FusedCall) -> int:
    return {"BSND": 2, "BNSD": 1, "BNSD_BSND": 1, "TND": 1, "NTD": 0, "NTD_TND": 0}[call.layout]


def _query_heads(call: FusedCall) -> int:
    return int(call.query.shape[_head_axis(call)])


def _check_lengths(call: FusedCall) -> None:
    if call.packed:
        _check_packed_lengths(call)
    batch = batch_size(call)
    if batch > MAX_BATCH:
        call.refuse(f"batch {batch} is above {MAX_BATCH}")
    for name, lengths in (("query", call.query_lens), ("key", call.kv_lens)):
        if lengths is None:
            continue
        if (
            not call.packed and len(lengths) != 1 and len(lengths) < batch
        ):  # quirk: length-list-size
            call.refuse(f"{len(lengths)} {name} lengths for a batch of {batch}")
        if any(length < 0 for length in lengths):
            call.refuse(f"{name} lengths must not be negative, got {lengths}")
    if not call.packed and not call.paged and call.key.numel():
        capacity = _dense_capacity(call)
        if any(length > capacity for length in call.kv_lens or []):
            call.refuse(f"key lengths {call.kv_lens} exceed S_kv {capacity}")
        if call.key.shape[0] != batch:
            call.refuse(f"key has batch {call.key.shape[0]}, query has {batch}")
        if max_queries(call) == 1 and capacity > MAX_SINGLE_QUERY_KEYS:
            call.refuse(f"S_kv {capacity} is above {MAX_SINGLE_QUERY_KEYS}")


def _dense_capacity(call: FusedCall) -> int:
    return int(call.key.shape[1 if call.layout in ("BSH", "BSND") else 2])


def _check_packed_lengths(call: FusedCall) -> None:
    ends, kv_lens = call.query_lens, call.kv_lens
    if ends is None or kv_lens is None:
        call.refuse(f"layout {call.layout} needs the query's and the key's lengths")
    if len(ends) != len(kv_lens):  # quirk: length-list-size
        call.refuse(f"{len(ends)} query lengths and {len(kv_lens)} key lengths")
    if len(ends) > MAX_TND_REQUESTS:
        call.refuse(f"{len(ends)} requests are above {MAX_TND_REQUESTS}")
    _check_rising(call, "query", ends)  # quirk: query-lengths-cumulative
    tokens = call.packed_query().shape[0]
    if tokens != (ends[-1] if ends else 0):  # quirk: query-lengths-end-at-T
        call.refuse(f"T {tokens} differs from the last query length {ends[-1] if ends else 0}")
    if not call.paged:
        _check_rising(call, "key", kv_lens)  # quirk: kv-lengths-per-request-when-paged
        rows = call.key.shape[0 if call.layout == "TND" else 1]
        if kv_lens and kv_lens[-1] > rows:
            call.refuse(f"last key length {kv_lens[-1]} exceeds the key's {rows} tokens")


def _check_rising(call: FusedCall, name: str, ends: list[int]) -> None:
    if any(end < start for start, end in zip([0, *ends], ends, strict=False)):
        call.refuse(f"{name} lengths of layout {call.layout} are running sums, got {ends}")


def _check_pages(call: FusedCall) -> None:
    assert call.block_table is not None
    if call.kv_lens is None:  # quirk: paged-needs-lengths
        call.refuse("block_table is given without key lengths")
    if call.block_table.dtype != torch.int32 or call.block_table.dim() != 2:
        call.refuse(f"block_table must be int32 (B, blocks), got {call.block_table.dtype}")
    if call.block_table.shape[0] != batch_size(call):
        call.refuse(
            f"block_table has {call.block_table.shape[0]} rows, batch is {batch_size(call)}"
        )
    _check_cache_form(call)
    page, queries = call.block_size, max_queries(call)
    step = 16 if queries <= 1 else 128  # quirk: page-size
    if not 0 < page <= 512 or page % step:
        call.refuse(
            f"block_size {page} with {queries} queries is not a multiple of {step} up to 512"
        )
    room = call.block_table.shape[1] * page
    if any(length > room for length in call.kv_lens or []):
        call.refuse(f"key lengths {call.kv_lens} exceed the block table's {room} positions")


def _check_cache_form(call: FusedCall) -> None:  # quirk: cache-forms
    if call.key.dim() == 5:
        raise StandinGapError(f"{call.operator}: the stand-in does not model the 5-D NZ cache")
    if call.key.dim() == 3:
        page, row = call.key.shape[1:]
        if row > MAX_CACHE_ROW or row % call.num_kv_heads:
            call.refuse(f"cache row {row} is above {MAX_CACHE_ROW} or no multiple of the kv heads")
    elif call.key.dim() == 4:
        page = call.key.shape[2]
        if call.layout not in ("BNSD", "BNSD_BSND", *TND_FAMILY):
            call.refuse(f"a 4-D (blocks, N, P, D) cache does not go with layout {call.layout}")
        if call.key.shape[1] != call.num_kv_heads:
            call.refuse(
                f"cache has {call.key.shape[1]} heads, num_key_value_heads is {call.num_kv_heads}"
            )
    else:
        call.refuse(f"a paged cache cannot have shape {list(call.key.shape)}")
    if page != call.block_size:
        call.refuse(f"block_size {call.block_size} differs from the cache's page of {page}")


def head_dims(call: FusedCall) -> tuple[int, int, int]:
    """D of query, key and value."""
    query = call.packed_query() if call.packed else call.padded_query()
    flat = call.layout == "BSH" if not call.paged else call.key.dim() == 3
    divisor = call.num_kv_heads if flat else 1
    return query.shape[-1], call.key.shape[-1] // divisor, call.value.shape[-1] // divisor


def _check_head_dim(call: FusedCall) -> None:
    if not call.key.numel():
        return
    q_dim, k_dim, v_dim = head_dims(call)
    if q_dim != k_dim:
        call.refuse(f"head dim of query is {q_dim}, of key {k_dim}")
    if q_dim % 16 or v_dim % 16 or not 0 < max(q_dim, v_dim) <= MAX_HEAD_DIM:  # quirk: head-dim
        call.refuse(f"head dims {q_dim}, {v_dim} must be multiples of 16 up to {MAX_HEAD_DIM}")
    if call.layout in ("NTD", "NTD_TND") or (call.layout == "BNSD_BSND" and max_queries(call) == 1):
        if q_dim not in (64, 128) or v_dim != q_dim:
            call.refuse(f"layout {call.layout} takes head dim 64 or 128, got {q_dim}, {v_dim}")
    elif call.layout == "TND":
        if takes_split_fuse(call) and q_dim == v_dim <= SPLIT_FUSE_MAX_HEAD_DIM:
            return
        if (q_dim, v_dim) != (192, 128) and (q_dim not in TEMPLATE_HEAD_DIMS or v_dim != q_dim):
            # quirk: head-dim-by-cache-form
            call.refuse(
                f"head dim {q_dim}, {v_dim} is not 64, 128 or 192 on this route of layout TND"
            )
    elif q_dim != v_dim:
        call.refuse(
            f"layout {call.layout} needs key and value of one head dim, got {q_dim}, {v_dim}"
        )


def takes_split_fuse(call: FusedCall) -> bool:
    """Whether a TND call goes the split-fuse route (CheckSpecConditions in
    fused_infer_attention_score_tiling_v3.cpp).
    """
    grouped = call.num_heads != call.num_kv_heads
    slow_half = call.query.dtype == torch.bfloat16 and call.inner_precise == 1
    masked_default = call.sparse_mode == 0 and call.mask is not None
    precise = call.inner_precise == 0 if grouped else not slow_half and not masked_default
    small_page = not call.paged or (call.block_size % 16 == 0 and call.block_size <= 512)
    form = not call.paged or call.key.dim() == 3
    odd_sink = (
        call.sink is not None and call.sink.dtype == torch.bfloat16 and call.query.shape[-1] == 64
    )
    return call.sparse_mode in (0, 3, 4) and precise and small_page and form and not odd_sink


def _check_mask(call: FusedCall) -> None:
    mode, mask = call.sparse_mode, call.mask
    if mode not in (0, 1, 2, 3, 4):
        raise StandinGapError(f"{call.operator}: the stand-in does not model sparse_mode {mode}")
    if mask is not None and mask.dtype not in (torch.bool, torch.int8, torch.uint8):
        call.refuse(f"atten_mask dtype {mask.dtype} is not bool, int8 or uint8")
    if call.legacy_window_dropped:
        return
    if mode == 1 and mask is None:
        call.refuse("sparse_mode 1 needs a mask")
    if mode in (2, 3, 4):
        _check_compressed_mask(call)
    if mode == 4:
        queries, keys = max_queries(call), _longest_key(call)
        pre, post = call.pre_tokens, call.next_tokens
        if pre < -queries or post < -keys or pre + post < 0:
            call.refuse(f"pre_tokens {pre} and next_tokens {post} leave an empty band")
    if mode in (0, 1) and mask is not None:
        _check_full_mask(call)


def _longest_key(call: FusedCall) -> int:
    if call.kv_lens is not None:
        return max(call.kv_lens, default=0)
    return _dense_capacity(call)


def _check_compressed_mask(call: FusedCall) -> None:  # quirk: compressed-mask
    mask, side = call.mask, COMPRESSED_MASK
    shapes = [(side, side), (1, side, side), (1, 1, side, side)]
    if mask is None or tuple(mask.shape) not in shapes:
        got = None if mask is None else list(mask.shape)
        call.refuse(f"sparse_mode {call.sparse_mode} needs a {side} x {side} mask, got {got}")
    upper = torch.ones(side, side, dtype=torch.bool).triu(1)
    if not torch.equal(mask.bool().reshape(side, side), upper):
        raise StandinGapError(
            "the compressed mask is not strictly upper triangular: a device reads it unchecked "
            "and answers wrongly"
        )


def _check_full_mask(call: FusedCall) -> None:
    assert call.mask is not None
    if call.packed and call.num_heads != call.num_kv_heads:
        call.refuse("layout TND with grouped heads takes sparse_mode 0 without a mask only")
    if call.packed:
        raise StandinGapError(
            f"{call.operator}: the stand-in does not model a full mask in layout {call.layout}"
        )
    batch, queries = call.padded_query().shape[:2]
    shape = tuple(call.mask.shape)
    columns = shape[-1]
    allowed = [(1, queries, columns), (batch, 1, queries, columns), (1, 1, queries, columns)]
    if not call.paged:
        allowed.append((batch if queries == 1 else queries, columns))
    if shape not in allowed:
        call.refuse(f"atten_mask {list(shape)} is none of {allowed}")
    needed = (
        call.block_table.shape[1] * call.block_size
        if call.block_table is not None
        else _dense_capacity(call)
    )
    if columns < needed:
        call.refuse(f"atten_mask has {columns} columns, {needed} are needed")
    if (call.pre_tokens, call.next_tokens) != (2147483647, 2147483647) and not call.legacy:
        raise StandinGapError(
            "the stand-in does not model a full mask together with pre_tokens and next_tokens"
        )


def _check_inner_precise(call: FusedCall) -> None:
    allowed = (0, 1) if max_queries(call) <= 1 else (0, 1, 2, 3)
    if call.inner_precise not in allowed:
        call.refuse(f"inner_precise {call.inner_precise} is not one of {allowed} for this S")


def _check_sink(call: FusedCall) -> None:  # quirk: sink-v2-only
    assert call.sink is not None
    if call.layout not in ("TND", "NTD_TND"):
        call.refuse(f"learnable_sink needs layout TND or NTD_TND, got {call.layout}")
    if tuple(call.sink.shape) != (call.num_heads,) or call.sink.dtype != call.query.dtype:
        call.refuse(
            f"learnable_sink must be [{call.num_heads}] {call.query.dtype}, "
            f"got {list(call.sink.shape)} {call.sink.dtype}"
        )
    if call.inner_precise != 0:
        call.refuse(f"learnable_sink needs inner_precise 0, got {call.inner_precise}")
    if call.key.numel() and head_dims(call)[2] > 128:
        call.refuse(f"learnable_sink needs a value head dim up to 128, got {head_dims(call)[2]}")
