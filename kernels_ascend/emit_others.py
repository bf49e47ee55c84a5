"""Calls of the operators besides FIA as text."""

from textwrap import indent

from splitkv.common.spec import DecodeSpec, Layout
from splitkv.kernels_ascend.emit_text import (
    IN_FRONT,
    MASK,
    UNSEEN,
    ending,
    operator_call,
    pools,
    signature,
)
from splitkv.kernels_ascend.routes import INCRE


def fusion(spec: DecodeSpec) -> str:
    """The training operator, over packed keys."""
    causal = spec.causal and spec.num_queries > 1
    body = IN_FRONT if causal else ""
    body += """\
    kept = [row for row, n in enumerate(seq_lens) if n]  # rows without keys are not documented
    lse = torch.full((q.shape[0], S, H), -math.inf, device=q.device)
    out = torch.zeros(q.shape[0], S, H, DV, device=q.device)
"""
    call = ""
    if spec.layout is not Layout.PACKED:
        row = (
            "[row, : seq_lens[row]]" if spec.layout is Layout.BSND else "[row, :, : seq_lens[row]]"
        )
        turn = "" if spec.layout is Layout.BSND else ".transpose(0, 1)"
        call += "    # one request after the other, which copies them\n"
        call += f"    rows = ([x{row}{turn} for row in kept] for x in (k, v))\n"
        call += "    k, v = map(torch.cat, rows)\n"
    keywords: dict[str, object] = {
        "scale": "SCALE",
        "actual_seq_qlen": "[S * (row + 1) for row in range(len(kept))]",
        "actual_seq_kvlen": "[sum(seq_lens[: row + 1]) for row in kept]",
        "softmax_layout": '"TND"',
    }
    if causal:
        keywords |= {"sparse_mode": "3", "atten_mask": "MASK.to(q.device)"}
    index = "torch.tensor(kept).to(q.device)"
    call += f"    index = {index}\n"
    call += operator_call(
        "npu_fusion_attention",
        'q[index].reshape(-1, H, D), k, v, H, "TND"',
        keywords,
        "found, top, total, *_",
    )
    call += """\
    # max and sum, each 8 times over
    lse[index] = (top[..., 0] + total[..., 0].log()).view(-1, S, H)
    out[index] = found.view(-1, S, H, DV).float()
"""
    body += "    if kept:\n" + indent(call, "    ")
    return (MASK if causal else "") + signature(spec) + body + ending(spec)


def incre(spec: DecodeSpec) -> str:
    """npu_incre_flash_attention."""
    layout = INCRE.layouts[spec.layout][0]
    query = "q[:, 0, None]" if layout == "BSND" else "q[:, 0, :, None]"
    keywords: dict[str, object] = {
        "input_layout": f'"{layout}"',
        "num_heads": "H",
        "num_key_value_heads": "K",
        "scale_value": "SCALE",
        "inner_precise": "0",
        "actual_seq_lengths": "seq_lens",
    }
    body = ""
    if spec.layout.paged:
        body += pools(spec) + "    table = block_table.to(torch.int32).contiguous()\n"
        keywords |= {"block_table": "table", "block_size": "P"}
    body += operator_call("npu_incre_flash_attention", f"{query}, k, v", keywords, "out")
    body += "    out = out.view(-1, 1, H, DV)\n"
    page = f"P = {spec.page_size}\n" if spec.layout.paged else ""
    return page + signature(spec) + body + UNSEEN


def paged_attention(spec: DecodeSpec) -> str:
    """_npu_paged_attention."""
    body = """\
    out = q.new_zeros(q.shape[0], H, DV)  # a row without keys is not written
    torch_npu._npu_paged_attention(
        q[:, 0],
        k,
        v,
        K,
        H,
        SCALE,
        block_table.to(torch.int32).contiguous(),
        torch.tensor(seq_lens, dtype=torch.int32),  # stays on the host
        out,
    )
    return out[:, None], None
"""
    return signature(spec) + body


def prompt(spec: DecodeSpec) -> str:
    """npu_prompt_flash_attention."""
    by_head = spec.layout is Layout.BNSD
    query = "q.transpose(1, 2).contiguous()" if by_head else "q"
    keywords: dict[str, object] = {
        "input_layout": f'"{spec.layout.value}"',
        "num_heads": "H",
        "num_key_value_heads": "K",
        "scale_value": "SCALE",
        "actual_seq_lengths": "[S] * len(seq_lens)",
        "actual_seq_lengths_kv": "seq_lens",
    }
    if spec.causal:
        keywords |= {"sparse_mode": "3", "atten_mask": "MASK.to(q.device)"}
    else:
        keywords |= {"sparse_mode": "0", "next_tokens": "2147483647"}
    body = operator_call("npu_prompt_flash_attention", f"{query}, k, v", keywords, "out")
    body += "    out = out.transpose(1, 2)\n" if by_head else ""
    return (MASK if spec.causal else "") + signature(spec) + body + UNSEEN
