"""Pieces of what ``emit`` prints."""

from splitkv.common.spec import DecodeSpec, Layout

REPAIR = '''

def repair(out, lse):
    """Three ways of saying "nothing seen" (+inf, -3.4e38, -inf) become lse -inf and out 0."""
    out = out.float()
    nothing = ((lse == math.inf) & (out == 0).all(-1)) | (lse <= -1e30)
    return torch.where(nothing[..., None], 0.0, out), torch.where(nothing, -math.inf, lse)
'''

MERGE = '''

def merge(parts):
    """(out, lse) of the same queries over disjoint keys; a row that nobody saw stays (0, -inf)."""
    lse = torch.stack([lse for _, lse in parts])
    top = lse.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    out = sum(weight[..., None] * out for weight, (out, _) in zip(weights, parts))
    return out / torch.where(total == 0, 1.0, total)[..., None], top + torch.log(total)
'''

SINKS = """\
    # the sinks enter here and nowhere else: once, after everything is merged
    with_sinks = torch.logaddexp(lse, sinks.float())
    out, lse = out * torch.exp(lse - with_sinks)[..., None], with_sinks
"""

MASK = """
# sparse modes 2, 3 and 4 want this mask whatever the lengths; True hides
MASK = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
"""

IN_FRONT = """\
    if any(0 < n < S for n in seq_lens):
        raise ValueError(f"{S} queries in front of the first key: lengths are 0 or at least {S}")
"""

ROWS = '''

def rows_of(seq_lens):
    """Keys that each query's row sees: one row per query, [B * S]."""
    return [{row} for n in seq_lens for t in range(S)]
'''


UNSEEN = """\
    # what the operator leaves in a row without keys is not kept
    seen = torch.tensor([n > 0 for n in seq_lens]).to(out.device)
    return torch.where(seen[:, None, None, None], out, 0.0), None
"""


def signature(spec: DecodeSpec, tensors: str = "k, v") -> str:
    """The first line of ``decode``."""
    table = ", block_table" if spec.layout.paged else ""
    sinks = ", sinks" if spec.sinks else ""
    return f"\n\ndef decode(q, {tensors}{table}, seq_lens{sinks}):\n"


def ending(spec: DecodeSpec) -> str:
    """Shapes, sinks and dtypes as they are returned."""
    return (
        "    out, lse = out.view(-1, S, H, DV), lse.view(-1, S, H)\n"
        + (SINKS if spec.sinks else "")
        + "    return out.to(q.dtype), lse\n"
    )


def pools(spec: DecodeSpec, indent: str = "    ") -> str:
    """An NHD pool in its 3-D form."""
    if spec.layout is Layout.NHD:
        return f"{indent}k, v = k.flatten(2), v.flatten(2)  # [pages, P, K * D], no copy\n"
    return ""


def operator_call(name: str, tensors: str, keywords: dict[str, object], result: str) -> str:
    """A call, one keyword a line."""
    lines = [f"    {result} = torch_npu.{name}(", f"        {tensors},"]
    lines += [f"        {key}={value}," for key, value in keywords.items()]
    return "\n".join([*lines, "    )\n"])


def v1_keywords(layout: str, lengths: str, pages: str | None = None) -> dict[str, object]:
    """FIA v1's keywords."""
    paging = {} if pages is None else {"block_table": pages, "block_size": "P"}
    return {
        "input_layout": f'"{layout}"',
        "num_heads": "H",
        "num_key_value_heads": "K",
        "scale": "SCALE",
        "softmax_lse_flag": "True",
        "actual_seq_lengths_kv": lengths,
        **paging,
    }


def v2_keywords(
    lengths: str, ends: str, *, paged: bool, causal: bool, sinks: bool
) -> dict[str, object]:
    """FIA v2's keywords in layout TND."""
    keywords: dict[str, object] = {
        "input_layout": '"TND"',
        "num_query_heads": "H",
        "num_key_value_heads": "K",
        "softmax_scale": "SCALE",
        "return_softmax_lse": "True",
        "actual_seq_qlen": ends,
        "actual_seq_kvlen": lengths,
    }
    if paged:
        keywords |= {"block_table": "table", "block_size": "P"}
    if causal:
        keywords |= {"sparse_mode": "3", "atten_mask": "MASK.to(q.device)"}
    if sinks:
        keywords |= {"learnable_sink": "sinks.to(q.dtype)"}
    return keywords
