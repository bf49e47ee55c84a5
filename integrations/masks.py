"""What hides keys from a layer's queries, and the shortest way to say it.

A mask of transformers is bool [B, 1, S, T], True may be seen. Reading one waits for the device;
the answer is kept on the mask itself, which all layers of a step share, so a step waits once.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

_KEPT = "_splitkv_kept"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """What a layer's queries may not see.

    mask: bool [B, 1, S, T]; with it, ``causal`` and ``window`` count only where it is found to say
    no more than they do. bias: [B or 1, H or 1, S, T], added to the scaled scores. window:
    positions seen, the own one included.
    """

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    window: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """Keys [start, stop) hold everything that some query sees.

    mask: bool [B or 1, S, stop - start] where that range is not the whole story; None where every
    query sees all of it, or all up to its own position if ``causal`` (bottom-right: query t of S
    sits at stop - S + t).
    """

    start: int
    stop: int
    mask: Tensor | None = None
    causal: bool = False


def read_mask(mask: Tensor, start: int, stop: int) -> Visible:
    """The shortest statement of the rows [start, stop) of ``mask``, bool [B, 1, S, T]."""
    return remember(mask, ("rows", start, stop), lambda: _read(mask[:, 0, start:stop]))


def _read(rows: Tensor) -> Visible:
    seen = rows.any(dim=1).any(dim=0).nonzero().flatten().tolist()
    if not seen:
        return Visible(0, 0)
    start, stop = seen[0], seen[-1] + 1
    inside = rows[:, :, start:stop]
    if bool(inside.all()):
        return Visible(start, stop)
    if bool((inside == band(inside.shape[1], stop - start, None, rows.device)).all()):
        return Visible(start, stop, causal=True)
    return Visible(start, stop, inside)


def all_visible(hidden: Hidden, queries: int, keys: int, device: torch.device) -> Visible:
    """What ``queries`` of a layer with ``keys`` keys see."""
    if hidden.mask is not None:
        return read_mask(hidden.mask, 0, queries)
    if hidden.causal and hidden.window is not None and hidden.window < keys:
        return _read(band(queries, keys, hidden.window, device)[None])
    return Visible(0, keys, causal=hidden.causal and queries > 1)


def band(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Causal mask of the last ``queries`` of ``keys`` positions, within a window, bool [S, T]."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


def fit(hidden: Hidden, keys: int) -> Hidden:
    """``hidden`` for a layer of ``keys`` keys, perhaps not the number that its mask was made for.

    Layers whose keys were evicted to different lengths share a mask of one layer's width. It says
    something about each of them only as long as it hides nothing but the future: then it is
    dropped.

    Raises:
        ValueError: the widths differ and the mask hides keys, or a bias has another width.
    """
    if hidden.bias is not None and hidden.bias.shape[-1] != keys:
        raise ValueError(
            f"an additive mask or bias must have {keys} columns, got {hidden.bias.shape[-1]}"
        )
    if hidden.mask is None or hidden.mask.shape[-1] == keys:
        return hidden
    queries, width = hidden.mask.shape[2:]
    visible = read_mask(hidden.mask, 0, queries)
    plain = visible.mask is None and (visible.start, visible.stop) == (0, width)
    if plain and (visible.causal or queries == 1):
        return replace(hidden, mask=None)
    raise ValueError(
        f"attention_mask has {width} columns and hides some of them, this layer holds {keys} keys, "
        "so it is unknown which are meant; evict without padding, or keep all layers equally long"
    )


def remember(mask: Tensor, question: Hashable, answer: Callable[[], _Answer]) -> _Answer:
    """``answer()``, asked once per mask and question, and again after the mask was written to."""
    if mask.is_inference():
        return answer()  # an inference tensor does not count its writes
    written, known = getattr(mask, _KEPT, (None, None))
    if known is None or written != mask._version:
        known = {}
        setattr(mask, _KEPT, (mask._version, known))
    if question not in known:
        known[question] = answer()
    return cast(_Answer, known[question])
