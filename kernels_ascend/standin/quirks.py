"""What the operators do that a first adapter gets wrong: one entry per behaviour, each with where
it was read.

Sections refer to the contract sheet that this stand-in was written from; the source behind the
sheet's sentence follows. Tags: doc (vendor documentation), code (host checks or kernels, as of CANN
9.1's development), issue (a user's report), wheel (torch_npu 2.14.0), inferred (nobody wrote it
down: test on a device before relying on it). None was seen on a device.

``# quirk: <name>`` marks the line that models an entry; ``tests/test_standin.py`` holds, per entry,
one test of the contract and one of the adapter that somebody would write first.
"""

QUIRKS = {
    "scale-default": ("scale is 1.0 unless given, not D**-0.5 (4.1, 4.4; wheel)"),
    "num-heads-default": (
        "num_heads is 1 unless given: a BSH query is then read as one wide head (4.1; wheel)"
    ),
    "num-kv-heads-default": (
        "num_key_value_heads=0 means as many as query heads, not 'look at the key' (4.1; wheel)"
    ),
    "softmax-mask-true-hides": (
        "a mask hides where it is True or 1, the opposite of scaled_dot_product_attention (4.1; "
        "doc)"
    ),
    "lse-shape": (
        "LSE is (T, N, 1) in the TND family and (B, N, S, 1) in every other layout, BSH and "
        "BSND included (2.1; doc, code)"
    ),
    "lse-flag-off": (
        "without the flag the second output is a float32 tensor of shape [0] (2.1; code; the "
        "documentation says one zero)"
    ),
    "output-is-rounded": (
        "the output has the query's dtype, so each partial result is rounded to 16 bits (4.1; doc)"
    ),
    "empty-kv": (
        "a key without elements gives out 0 and LSE +inf for every row (2.2; doc V4, "
        "fia_kernel_empty_tensor.h)"
    ),
    "empty-row": (
        "a length of 0 gives out 0 and LSE +inf on every path but the legacy one (2.2; code "
        "fia_kernel_nonquant.h)"
    ),
    "empty-row-legacy": (
        "a length of 0 on the legacy path (BSH, BSND or BNSD with S = 1) gives LSE -3.4e38, a "
        "finite number (2.2; code)"
    ),
    "invalid-row": (
        "a row whose band holds no key (S > S_kv under sparse 3, a band outside) gives out 0 "
        "and LSE +inf (2.2; code)"
    ),
    "full-mask-row": (
        "a row that an explicit mask hides entirely gives the plain average of the hidden "
        "values and a finite LSE of about -1e12 + log n, because the mask enters as the score "
        "-1e12; inner_precise bit 1 corrects it (2.2; code)"
    ),
    "legacy-drops-window": (
        "the legacy path sets sparse_mode to 0 and pre/next_tokens to their maximum, silently "
        "(2.2; doc V4, fused_infer_attention_score_tiling_info_parser.cpp)"
    ),
    "legacy-drops-query-lengths": (
        "S = 1 outside the TND family ignores the query's lengths: a padded row is computed all "
        "the same (2.2, 4.1; code)"
    ),
    "band-inclusive": (
        "both ends of a band are visible: W keys are pre_tokens = W - 1, next_tokens = 0 (4.1; "
        "vendor test, code)"
    ),
    "compressed-mask": (
        "sparse modes 2, 3 and 4 need the 2048 x 2048 strictly upper triangular mask, whatever "
        "the lengths (4.1; doc)"
    ),
    "mask-under-ranked": (
        "a (1, 1, 1, S) mask on a paged single query is ignored from key 512 on (9 #1; issue "
        "vllm-ascend 15503)"
    ),
    "hidden-nan-leaks": (
        "a hidden key inside the length enters with weight 0, and 0 * NaN is NaN; nothing past "
        "the length is read (inferred)"
    ),
    "host-lengths": (
        "lengths are host integers, baked in at launch; a device tensor is refused here, a real "
        "call would wait for it (4.1; doc)"
    ),
    "query-lengths-cumulative": (
        "query lengths of the TND family are running sums without the leading 0 (4.1; doc)"
    ),
    "query-lengths-end-at-T": (
        "the last query length of the TND family equals T, padding included (4.1, 9 #7; doc, issue)"
    ),
    "kv-lengths-per-request-when-paged": (
        "key lengths of the TND family are running sums, unless there is a block table: then "
        "one length per request (4.1; doc)"
    ),
    "length-list-size": (
        "a length list is one entry for all or one per request; a shorter one is refused (9 #5, "
        "#6; issue)"
    ),
    "paged-needs-lengths": ("with a block table the key lengths are mandatory (4.1; doc)"),
    "block-table-unchecked": (
        "block ids are not checked: another request's page is read, and an id outside the pool "
        "is out-of-bounds (4.1; doc)"
    ),
    "cache-forms": (
        "a paged cache is (blocks, P, K * D) or (blocks, K, P, D); (blocks, P, K, D) with P = K "
        "is read the wrong way round, and 4-D goes with BNSD and TND only (4.1; doc)"
    ),
    "head-dim": ("D is a multiple of 16 and at most 512 (4.1; doc)"),
    "head-dim-by-cache-form": (
        "in TND (documented for 128 and 192 in bfloat16 only) a 4-D cache takes D 64, 128 and "
        "192 only; the same data as 3-D takes any multiple of 16 up to 256, where the split- "
        "fuse route serves it (4.1; code fused_infer_attention_score_tiling_v3.cpp)"
    ),
    "group-64": (
        "at most 64 query heads per kv head, by the torch documentation (4.1; newer CANN lifts it)"
    ),
    "page-size": (
        "a page is a multiple of 16 up to 512 for S = 1 and a multiple of 128 up to 512 for S > "
        "1 (4.1; doc)"
    ),
    "sixteen-bit-only": ("query, key and value are float16 or bfloat16, all the same (4.1; doc)"),
    "contiguous": ("inputs are contiguous: the operator does not copy (4.1, 9 #14; doc, issue)"),
    "sink-v2-only": (
        "learnable_sink exists in v2 only, for TND layouts, in the query's dtype (4.2; doc, code)"
    ),
    "sink-in-lse": (
        "the LSE contains the sink's share, so a sink given to every split is counted once per "
        "split (4.2; code, not documented)"
    ),
    "incre-lengths-are-keys": (
        "actual_seq_lengths of npu_incre_flash_attention are the key lengths (4.4; doc)"
    ),
    "incre-no-lse": (
        "npu_incre_flash_attention returns one tensor, no LSE, and its inner_precise is 1 "
        "unless given (4.4; wheel)"
    ),
    "rope-not-legacy": (
        "with query_rope a single query does not take the legacy path: an empty row has LSE +inf, "
        "and D 512 goes with it (2.2; code GetLegacyIfaFlag)"
    ),
    "mla-heads": (
        "absorbed MLA takes a power of two of query heads up to 128; 12 were refused (4.1, 9 #11; "
        "doc, issue vllm-ascend 14126)"
    ),
    "prompt-no-lse": ("npu_prompt_flash_attention returns one tensor, no LSE (4.5; wheel)"),
    "prompt-next-default": (
        "next_tokens of npu_prompt_flash_attention is 0 unless given, so that a band hides what "
        "comes after each query (4.5; wheel)"
    ),
    "atb-unwritten-row": (
        "_npu_paged_attention skips a request of length 0: its row of out keeps what it held (2.3; "
        "code paged_attention_decoder_nd_common.cce)"
    ),
    "atb-lengths-on-host": (
        "context_lens of _npu_paged_attention are an int32 tensor in host memory; on the device "
        "they are refused (4.12; code 'tensor.hostData is null')"
    ),
    "fusion-eightfold": (
        "softmax_max and softmax_sum of npu_fusion_attention have a last dimension of 8 that "
        "repeats one value (4.6; doc)"
    ),
    "fusion-by-head": (
        "in layout TND these lie by request, then head, then query, unless softmax_layout='TND' "
        "(4.6; doc)"
    ),
    "fusion-lengths-end-at-T": (
        "the last lengths of layout TND equal the rows of query and key: a batch shorter than its "
        "tensors is refused or crashes on CANN 9.0 (4.6, 9 #15; issue vllm-ascend 10956)"
    ),
    "capture-bakes-lengths": (
        "host lengths are baked in at capture: a replay computes the captured lengths until "
        "NPUGraph.update hands over others (5.1, 9 #17; issue, wheel)"
    ),
    "capture-update-count": (
        "NPUGraph.update wants one entry for all recorded operators or one each, and a graph "
        "captured with auto_dispatch_capture=True (5.3, 9 #19; wheel)"
    ),
    "capture-no-wait": (
        "a copy between host and device during capture is refused (5.8, 9 #11; issue)"
    ),
    "out-workspace-unchecked": (
        "the .out form takes the workspace at its word: one sized for shorter lengths is read and "
        "written past its end, refused here (4.3; code)"
    ),
    "update-flat": (
        "npu_attention_update takes flat float32 LSEs [R] and outputs [R, D]; FIA's (B, N, S, "
        "1) LSE and a BSND output flatten in different orders (4.7; doc)"
    ),
    "update-plus-inf": (
        "npu_attention_update reads an LSE of +inf as -inf (2.4, 4.7; code); -3.4e38 is an "
        "ordinary number to it"
    ),
    "update-all-invalid": (
        "a row that is invalid in every shard comes out of npu_attention_update as NaN (2.4; code)"
    ),
    "update-shards": (
        "npu_attention_update takes 1 to 16 shards, D from 8 to 512 in multiples of 8 (4.7; "
        "torch documentation)"
    ),
    "update-type-0": ("update_type 0 leaves the second output undefined (4.7; doc)"),
    "scatter-default-is-nz": (
        "npu_scatter_pa_kv_cache writes the NZ format unless cache_mode='Norm' or None; on an ND "
        "cache that is garbage, refused here (4.15; wheel)"
    ),
    "scatter-negative-slot": (
        "a negative slot is skipped by both cache writes; nothing checks the upper end (4.15; "
        "code, not documented)"
    ),
    "scatter-duplicate-slot": ("two tokens for one slot are undefined, refused here (4.15; doc)"),
    "scatter-one-dtype": (
        "keys, values and both caches of npu_scatter_pa_kv_cache have one dtype; it takes float32 "
        "too, which _npu_reshape_and_cache does not (4.15; doc)"
    ),
    "scatter-value-dim": (
        "values may have another head dim than keys, not other heads (4.15; doc)"
    ),
    "reshape-slots-int32": ("_npu_reshape_and_cache takes int32 slots only (4.15; doc)"),
    "one-device": ("operands on the host and on the NPU do not mix (inferred from torch)"),
}
"""Name -> what happens, and where that was read."""
