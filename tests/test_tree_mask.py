"""Masks of draft trees from their parents, against a walk to the root."""

import pytest
import torch
from torch import Tensor

from backends_in_reach import InReach, every_backend
from histories import random_history, random_queries
from splitkv.layers.trees import tree_mask


def walked(parents: list[int]) -> Tensor:
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        at = node
        while at != -1:
            seen[node, at] = True
            at = parents[at]
    return seen


def random_parents(batch: int, nodes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [int(torch.randint(-1, node, (), generator=generator)) if node else -1 for node in range(n)]
        for n in [nodes] * batch
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(batch, nodes)


@pytest.mark.parametrize("nodes", [0, 1, 2, 3, 7, 33, 64])
def test_a_node_sees_itself_and_its_ancestors(nodes: int) -> None:
    parents = random_parents(3, nodes, nodes)
    for dtype in (torch.int32, torch.int64):
        mask = tree_mask(parents.to(dtype))
        assert mask.dtype == torch.bool
        assert mask.shape == (3, nodes, nodes)
        for row, own in zip(mask, parents.tolist(), strict=True):
            assert torch.equal(row, walked(own))


@pytest.mark.parametrize("nodes", [2, 3, 5, 9, 17, 64, 65])
def test_a_chain_is_the_causal_mask_however_long(nodes: int) -> None:
    chain = torch.arange(-1, nodes - 1)[None]
    assert torch.equal(tree_mask(chain)[0], torch.ones(nodes, nodes).tril() > 0)


@pytest.mark.parametrize(
    ("parents", "words"),
    [
        ([[-1, 1]], r"parents\[0, 1\] is 1, allowed are -1 \(a root\) to 0"),
        ([[-1, 0], [1, 0]], r"parents\[1, 0\] is 1, allowed are -1 \(a root\) to -1"),
        ([[-1, 0, 5]], r"parents\[0, 2\] is 5"),
        ([[-2]], r"parents\[0, 0\] is -2"),
    ],
)
def test_cycles_and_parents_behind_their_node_are_refused(
    parents: list[list[int]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        tree_mask(torch.tensor(parents))


@pytest.mark.parametrize("parents", [torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3)])
def test_parents_are_integers_by_request(parents: Tensor) -> None:
    with pytest.raises(ValueError, match=r"parents must be int32 or int64 \[B, n\]"):
        tree_mask(parents)


@every_backend
def test_a_leaf_attends_as_its_branch_alone_would(on: InReach) -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, -1, 0, 1, 3, 3]])
    history = random_history([30, 6], 1, 16)
    q = random_queries(2, 6, 2, 16)
    out, lse = on.decode(q, **history.dense(), attn_mask=tree_mask(parents))
    for b, own in enumerate(parents.tolist()):
        branch = torch.nonzero(walked(own)[5]).flatten()
        before = len(history.k[b]) - 6
        kept = torch.cat([torch.arange(before), before + branch])
        alone = {
            "k": history.k[b][kept][None],
            "v": history.v[b][kept][None],
            "seq_lens": torch.tensor([len(kept)], dtype=torch.int32),
            "layout": "BSND",
        }
        want, want_lse = on.decode(q[b : b + 1, 5:], **alone)
        assert torch.allclose(out[b, 5], want[0, 0], atol=1e-5)
        assert torch.allclose(lse[b, 5], want_lse[0, 0], atol=1e-5)
