"""Trees of draft tokens, given compactly, as masks."""

import torch
from torch import Tensor


def tree_mask(parents: Tensor) -> Tensor:
    """``attn_mask`` of draft trees: a node sees itself and its ancestors, and all earlier tokens.

    parents: int [B, n], the index of each node's parent, -1 for a root; parents come before their
    children. Returns bool [B, n, n] on the same device, for a call whose S = n queries are the
    nodes, in this order, and whose seq_lens count them. Windows and ALiBi slopes go by place in
    that order, not by depth in the tree. Values are read, so a device is waited for.

    Raises:
        ValueError: not integers, not two-dimensional, or a parent that is not below its node (which
            a cycle has somewhere).
    """
    if parents.ndim != 2 or parents.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"parents must be int32 or int64 [B, n], got {parents.dtype} {list(parents.shape)}"
        )
    nodes = torch.arange(parents.shape[1], device=parents.device)
    bad = (parents < -1) | (parents >= nodes)
    if bool(bad.any()):
        request, node = bad.nonzero()[0].tolist()
        raise ValueError(
            f"parents[{request}, {node}] is {int(parents[request, node])}, allowed are -1 (a root) "
            f"to {node - 1}: order the nodes so that parents come first"
        )
    seen = (nodes == nodes[:, None]) | (parents[..., None] == nodes)
    for _ in range(max(parents.shape[1] - 1, 0).bit_length()):  # twice as many generations a turn
        steps = seen.float()  # counts of up to n paths: exact
        seen = steps @ steps > 0
    return seen
