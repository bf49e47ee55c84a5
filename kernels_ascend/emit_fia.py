"""FIA calls as text."""

from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.emit_text import (
    IN_FRONT,
    MASK,
    MERGE,
    REPAIR,
    ROWS,
    SINKS,
    ending,
    operator_call,
    pools,
    signature,
    v1_keywords,
    v2_keywords,
)
from splitkv.kernels_ascend.routes import FIA_ROWS, MLA_LATENT, MLA_ROPE


def rows(spec: DecodeSpec) -> str:
    """Rows of one query, and windows."""
    if spec.sliding_window is not None:
        return _windowed(spec)
    layout = FIA_ROWS.layouts[spec.layout][0]
    row = "max(n - S + 1 + t, 0)" if spec.causal else "n"
    query = "q[:, None]" if layout == "BSND" else "q[:, :, None]"
    body = "    q = q.reshape(-1, H, D)\n"
    if spec.layout.paged:
        body += pools(spec)
        body += "    table = block_table.to(torch.int32).repeat_interleave(S, 0).contiguous()\n"
    elif spec.num_queries > 1:
        body += "    # each query is a row of its own here, so that dense keys are repeated\n"
        body += "    k, v = k.repeat_interleave(S, 0), v.repeat_interleave(S, 0)\n"
    keywords = v1_keywords(layout, "rows_of(seq_lens)", "table" if spec.layout.paged else None)
    body += operator_call("npu_fused_infer_attention_score", f"{query}, k, v", keywords, "out, lse")
    body += "    out, lse = repair(out.flatten(1, 2), lse[..., 0, 0])  # lse is (rows, H, 1, 1)\n"
    page = f"P = {spec.page_size}\n" if spec.layout.paged else ""
    rows = ROWS.format(row=row)
    return page + REPAIR + rows + signature(spec) + body + ending(spec)


def _windowed(spec: DecodeSpec) -> str:
    """Anchors from the first page on, the window's head copied out of its first page, the rest
    from the next page on by a shifted table: all seen whole, merged.
    """
    layout = FIA_ROWS.layouts[spec.layout][0]
    query = "q[:, None]" if layout == "BSND" else "q[:, :, None]"
    end = "max(n - S + 1 + t, 0)"
    numbers = f"P, W, ANCHORS = {spec.page_size}, {spec.sliding_window}, {spec.anchor_tokens}\n"
    token = "k[page, offset], v[page, offset]"
    if spec.layout is Layout.HND:
        token = "k[page, :, offset], v[page, :, offset]"
    high = end if spec.causal else "n"
    spans = f'''

def spans_of(seq_lens):
    """What each query's row sees besides the anchors: [start, end), one row per query."""
    ends = [({end}, {high}) for n in seq_lens for t in range(S)]
    return [(min(max(own - W, ANCHORS), end), end) for own, end in ends]


def from_pages(q, k, v, table, lengths):
{pools(spec)}'''
    spans += operator_call(
        "npu_fused_infer_attention_score",
        f"{query}, k, v",
        v1_keywords(layout, "lengths", "table"),
        "out, lse",
    )
    spans += "    return repair(out.flatten(1, 2), lse[..., 0, 0])\n"
    spans += "\n\ndef copied(q, k, v, table, spans, stops):\n"
    spans += f"""\
    lengths = [stop - start for (start, _), stop in zip(spans, stops)]
    step = torch.arange(max(max(lengths), 1))
    start = torch.tensor([start for start, _ in spans])[:, None]
    last = torch.tensor([max(stop - 1, 0) for stop in stops])[:, None]
    position = torch.minimum(start + step, last).clamp(min=0).to(q.device)
    row = torch.arange(len(spans), device=q.device)[:, None]
    # a row without keys has no page to look up, and reads none
    seen = torch.tensor([n > 0 for n in lengths]).to(q.device)[:, None]
    page = torch.where(seen, table[row, position // P], 0).long()
    offset = position % P
    k, v = {token}
    k, v = k.contiguous(), v.contiguous()
"""
    spans += operator_call(
        "npu_fused_infer_attention_score",
        "q[:, None], k, v",
        v1_keywords("BSND", "lengths"),
        "out, lse",
    )
    spans += "    return repair(out.flatten(1, 2), lse[..., 0, 0])\n"
    body = """\
    q = q.reshape(-1, H, D)
    table = block_table.to(torch.int32).repeat_interleave(S, 0).contiguous()
    spans = spans_of(seq_lens)
    stops = [min(-(-start // P) * P, end) for start, end in spans]
    firsts = [stop // P if stop < end else 0 for (_, end), stop in zip(spans, stops)]
    lengths = [end - stop for (_, end), stop in zip(spans, stops)]
    columns = max(-(-max(lengths) // P), 1)
    blocks = [-(-end // P) for _, end in spans]
    steps = [
        [min(first + step, max(block - 1, 0)) for step in range(columns)]
        for first, block in zip(firsts, blocks)
    ]
    shifted = table.gather(1, torch.tensor(steps).to(table.device))
    parts = [copied(q, k, v, table, spans, stops), from_pages(q, k, v, shifted, lengths)]
"""
    if spec.anchor_tokens:
        body += "    anchors = [min(ANCHORS, end) for _, end in spans]\n"
        body += "    parts.append(from_pages(q, k, v, table, anchors))\n"
    body += "    out, lse = merge(parts)\n"
    return numbers + REPAIR + MERGE + spans + signature(spec) + body + ending(spec)


def tnd(spec: DecodeSpec) -> str:
    """Layout TND."""
    if spec.sliding_window is not None:
        return _windowed(spec)
    return packed(spec, hands_sinks=False)


def packed(spec: DecodeSpec, *, hands_sinks: bool) -> str:
    """Layout TND without a window."""
    causal = spec.causal and spec.num_queries > 1
    body = IN_FRONT if causal and hands_sinks else ""
    body += "    ends = [S * (row + 1) for row in range(len(seq_lens))]  # running sums\n"
    lengths = "seq_lens"
    if spec.layout.paged:
        body += pools(spec) + "    table = block_table.to(torch.int32).contiguous()\n"
    else:
        body += "    sums = [sum(seq_lens[: row + 1]) for row in range(len(seq_lens))]\n"
        lengths = "sums"
    keywords = v2_keywords(
        lengths, "ends", paged=spec.layout.paged, causal=causal, sinks=hands_sinks
    )
    name = "npu_fused_infer_attention_score_v2"
    body += operator_call(name, "q.reshape(-1, H, D), k, v", keywords, "out, lse")
    body += "    out, lse = repair(out, lse[..., 0])  # lse is (queries, H, 1)\n"
    last = ending(spec)
    if hands_sinks:
        body += (
            "    # the operator has added the sinks, once, but to requests that have keys only\n"
            "    empty = torch.tensor([n == 0 for n in seq_lens]).to(q.device)\n"
            "    empty = empty.repeat_interleave(S)[:, None]\n"
            "    lse = torch.where(empty, sinks.float()[None], lse)\n"
            "    out = torch.where(empty[..., None], 0.0, out)\n"
        )
        last = last.replace(SINKS, "")
    page = f"P = {spec.page_size}\n" if spec.layout.paged else ""
    mask = MASK if causal else ""
    return page + mask + REPAIR + signature(spec) + body + last


def latent(spec: DecodeSpec) -> str:
    """Absorbed MLA, over pools of latent and rope part."""
    row = "max(n - S + 1 + t, 0)" if spec.causal else "n"
    latent, rope = MLA_LATENT, MLA_ROPE
    body = "    q = q.reshape(-1, 1, H, D)\n"
    paged = spec.layout.paged
    if paged:
        shape = "latent.shape[0], P"
        body += f"    latent, rope = latent.view({shape}, {latent}), rope.view({shape}, {rope})\n"
        body += "    table = block_table.to(torch.int32).repeat_interleave(S, 0).contiguous()\n"
    else:
        body += f"    latent = latent.view(latent.shape[0], -1, 1, {latent})\n"
        body += f"    rope = rope.view(rope.shape[0], -1, 1, {rope})\n"
        if spec.num_queries > 1:
            body += "    latent, rope = (x.repeat_interleave(S, 0) for x in (latent, rope))\n"
    keywords = v1_keywords("BSND", "rows_of(seq_lens)", "table" if paged else None)
    keywords |= {"query_rope": f"q[..., {latent}:].contiguous()", "key_rope": "rope"}
    query = f"q[..., :{latent}].contiguous(), latent, latent"
    body += operator_call("npu_fused_infer_attention_score", query, keywords, "out, lse")
    body += "    out, lse = repair(out.flatten(1, 2), lse[..., 0, 0])\n"
    page = f"P = {spec.page_size}\n" if paged else ""
    rows = ROWS.format(row=row)
    return page + REPAIR + rows + signature(spec, "latent, rope") + body + ending(spec)
