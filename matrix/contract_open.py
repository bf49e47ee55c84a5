"""Contract: what documents contradict each other on, or leave undefined, and a route could use."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from splitkv.kernels_ascend.runtime import operators
from splitkv.matrix.contract import Agrees, Found, as_documented, check, first_line
from splitkv.matrix.contract_calls import (
    BF16,
    absorbed,
    attend,
    call,
    error,
    latent,
    near,
    request,
    rows,
)


def _disputed(attempt: Callable[[], str]) -> Found:
    """Whatever happens is an answer, a refusal too; a gap of the stand-in is none."""
    try:
        return Found(attempt(), Agrees.OPEN)
    except NotImplementedError:
        raise
    except RuntimeError as refusal:
        return Found(f"refused: {first_line(refusal)}", Agrees.OPEN)


@check("Two tokens for one slot of a cache write?", "not guaranteed to be right; docs (4.15)")
def duplicate_slots(device: torch.device) -> Found:
    def attempt() -> str:
        new = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 2, 64).to(BF16).contiguous()
        k, v = (torch.zeros(2, 128, 2, 64, dtype=BF16).to(device) for _ in "kv")
        slots = torch.tensor([5, 5], dtype=torch.int32).to(device)
        tokens = new.to(device)
        operators().npu_scatter_pa_kv_cache(tokens, tokens, k, v, slots, cache_mode="Norm")
        held = sorted(set(k.cpu().flatten(0, 1)[5].flatten().tolist()))
        return f"the slot holds {held}, the tokens are 1 and 2 in that order"

    return _disputed(attempt)


@check(
    "Is a tree mask (sparse_mode 9) taken with grouped heads?",
    "no, with rope only (torch docs), yes (aclnn text of the fourth version) (4.1; 10, row 6)",
)
def tree_mask(device: torch.device) -> Found:
    def attempt() -> str:
        one = request(300, queries=4)
        # two branches of a root: queries 1 and 2 see the root, query 3 sees query 1 and the root
        sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
        hidden = torch.zeros(4, 300, dtype=torch.bool)
        hidden[:, -4:] = ~sees
        out, _ = rows(one, device, sparse_mode=9, atten_mask=~sees[None])
        honoured, causal_instead = (
            near(out, attend(one, hidden=hidden)[0]),
            near(out, attend(one, causal=True)[0]),
        )
        return f"taken; honoured: {honoured}, causal instead: {causal_instead}"

    return _disputed(attempt)


@check(
    "What shape has the output of layout BSND_NBSD?",
    "(B, N, S, D) (docs of v1), (N, B, S, D) (docs of v2, meta functions of both) (10, row 7)",
)
def nbsd_shape(device: torch.device) -> Found:
    def attempt() -> str:
        batch = [latent(keys, 32) for keys in (256, 200)]
        wanted = torch.stack([one.attend()[0] for one in batch])  # [B, N, D]
        said = []
        for version in (1, 2):
            out, _ = absorbed(batch, device, version=version, layout="BSND_NBSD")
            places = {"(B, N, S, D)": wanted, "(N, B, S, D)": wanted.transpose(0, 1)}
            fits = [
                name
                for name, values in places.items()
                if out.shape[:2] == values.shape[:2] and near(out, values)
            ]
            said.append(f"v{version}: {list(out.shape)}, right as {fits or 'neither'}")
        return "; ".join(said)

    return _disputed(attempt)


def _base(lse: Tensor, natural: Tensor) -> str:
    bases = {"e": natural, "2": natural / math.log(2)}
    found = [name for name, values in bases.items() if error(lse, values) < 0.05]
    return f"base {found[0]}" if found else f"neither, {error(lse, natural):.1e} from base e"


@check(
    "Which logarithm is the LSE of ATB's latent attention?",
    "natural by the ring code, no text; in the dtype of q_rope (4.13; 10, row 11)",
)
def atb_latent_lse(device: torch.device) -> Found:
    one = latent(256, 32)
    found = _atb("npu_multi_head_latent_attention")(
        one.q[None].to(device),
        one.q_rope[None].to(device),
        one.k.view(2, 128, 1, 512).to(device),
        one.k_rope.view(2, 128, 1, 64).to(device),
        torch.tensor([[0, 1]], dtype=torch.int32).to(device),
        [256],
        32,
        one.scale,
        1,
        True,  # return_lse, which picks the overload
        calc_type="calc_type_ring",
    )
    out, lse = (part.cpu() for part in found)
    wanted = one.attend()
    said = f"{list(lse.shape)} {lse.dtype}, {_base(lse, wanted[1])}"
    return Found(f"out right: {near(out, wanted[0])}; LSE {said}", Agrees.OPEN)


@check(
    "Which logarithm is the LSE of ATB's ring attention?",
    "natural by the ring code, no text; float32 (N, T) (4.14; 10, row 11)",
)
def atb_ring_lse(device: torch.device) -> Found:
    wide, narrow = (request(64, queries=64, H=8, K=8, D=D) for D in (128, 64))
    q, k = (torch.cat([getattr(wide, n), getattr(narrow, n)], -1).double() for n in ("q", "k"))
    scale = 192**-0.5
    scores = torch.einsum("shd,thd->sht", q, k) * scale
    given = (wide.q, narrow.q, wide.k, narrow.k, wide.v, torch.zeros(512, 512, dtype=BF16))
    out, lse = _atb("npu_ring_mla")(
        *(tensor.to(device) for tensor in given),
        torch.tensor([64], dtype=torch.int32),  # stays on the host
        8,
        8,
        qk_scale=scale,
        kernel_type="kernel_type_high_precision",
        mask_type="no_mask",
        input_layout="type_bsnd",
        calc_type="calc_type_first_ring",
    )
    right = near(out.cpu(), torch.einsum("sht,thd->shd", scores.softmax(-1), wide.v.double()))
    said = f"{list(lse.shape)} {lse.dtype}, {_base(lse.cpu(), scores.logsumexp(-1).T)}"
    return Found(f"out right: {right}; LSE {said}", Agrees.OPEN)


def _atb(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    found: Callable[..., tuple[Tensor, Tensor]] = getattr(operators().atb, name)
    return found


@check(
    "Does the order of a merge matter for an empty row of absorbed MLA?",
    "no: its LSE is +inf, which the update reads as -inf; kernels (2.2, 2.4)",
)
def merge_of_empty_latent(device: torch.device) -> Found:
    batch = [latent(keys, 32) for keys in (256, 0)]
    out, lse = absorbed(batch, device)
    outs = [part.reshape(32, 512).float() for part in out]
    lses = [part.reshape(32).float() for part in lse]
    wanted = batch[0].attend()
    off = []
    for order in ((0, 1), (1, 0)):
        states = [lses[row] for row in order], [outs[row] for row in order]
        merged, total = call("npu_attention_update", device, *states, 1)
        off.append(max(error(merged, wanted[0]), error(total, wanted[1])))
    held = ", ".join(f"{value:.3g}" for value in sorted(set(lses[1].tolist()))[:2])
    right = all(value < 0.03 for value in off) and bool((lses[1] == math.inf).all())
    return as_documented(
        right, f"LSE of the empty row {held}; last {off[0]:.1e} off, first {off[1]:.1e} off"
    )


@check(
    "Which shapes of pse_shift are right for a single query?",
    "(B, N, 1, S) and (1, N, 1, S) (docs); [1, 1, 1, S] was wrong at every length (9, row 1)",
)
def pse_shapes(device: torch.device) -> Found:
    one = request(320)
    bias = torch.linspace(-3, 3, 8 * 320).view(8, 320).to(BF16)
    shapes = {"[1, 8, 1, S]": bias, "[1, 1, 1, S]": bias[:1]}
    said, right = [], {}
    for shape, given in shapes.items():
        out, _ = rows(one, device, pse_shift=given[None, :, None].contiguous())
        right[shape] = near(out, attend(one, bias=given)[0])
        ignored = near(out, attend(one)[0])
        said.append(f"{shape} right: {right[shape]}, ignored: {ignored}")
    return as_documented(right["[1, 8, 1, S]"], "; ".join(said))
