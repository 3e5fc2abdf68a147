"""Pairs are sorted by expert without a host read, and blocks cover each pair once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from kvforge.worker.device.targets import TARGETS
from kvforge.worker.kernels.expert_sort import RANKED_MAX, Blocks, blocks_max, sort_by_expert
from kvforge.worker.kernels.launching import LaunchSettings
from kvforge.worker.kernels.router import AWAY

pytestmark = pytest.mark.skipif(not knobs.runtime.interpret, reason="only under Triton's interpreter")
LAUNCH = LaunchSettings(TARGETS["sm_90"])


def covered(found: Blocks, experts: torch.Tensor, size: int, first: int = 0) -> None:
    """Check the order and the blocks of pairs of these experts. first: of the pairs of the first block."""
    assert torch.equal(found.order.long(), experts.sort(stable=True).indices)
    places: list[int] = []
    for expert, begin, end, _ in found.blocks.tolist():
        if expert < 0:
            continue
        assert 0 < end - begin <= size
        assert set(experts[found.order[begin:end].long()].tolist()) == {expert}
        places += range(begin, end)
    assert places == [*range(first, len(experts)), *range(first)]


# Up to FEW pairs, and more; up to so many as are counted at a time, and more.
@pytest.mark.parametrize(
    ("tokens", "width", "experts"),
    [(2, 1, 1), (2, 8, 8), (70, 3, 5), (65, 1, 128), (9, 2, 200), (64, 8, 128), (130, 4, 300), (520, 4, 6)],
)
@pytest.mark.parametrize("size", [16, 64])
def test_pairs_are_sorted(tokens: int, width: int, experts: int, size: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(width).indices.int()
    covered(sort_by_expert(LAUNCH, chosen, experts, size), chosen.flatten().long(), size)


@pytest.mark.parametrize("experts", [[3] * 40, [0] * 17 + [7] * 3, [7, 0] * 20])
def test_crowded_experts(experts: list[int]) -> None:
    chosen = torch.tensor(experts, dtype=torch.int32)[:, None]
    covered(sort_by_expert(LAUNCH, chosen, 8, 16), chosen.flatten().long(), 16)


@pytest.mark.parametrize("tokens", [40, 600])
def test_pairs_of_other_ranks_come_first_and_are_in_no_block(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, 7, generator=generator).topk(2).indices.int() - 3
    chosen[chosen < 0] = AWAY
    found, flat = sort_by_expert(LAUNCH, chosen, 4, 16), chosen.flatten().long()
    assert torch.equal(found.order.long(), flat.sort(stable=True).indices)
    used = found.blocks[found.blocks[:, 0] >= 0].tolist()
    places = [place for _, begin, end, _ in used for place in range(begin, end)]
    assert places == list(range(int((flat < 0).sum()), len(flat)))
    assert all(set(flat[found.order[begin:end].long()].tolist()) == {expert} for expert, begin, end, _ in used)


def test_many_pairs_are_sorted_by_torch() -> None:
    chosen = torch.randint(0, 5, (RANKED_MAX + 1, 1), generator=torch.Generator().manual_seed(0)).int()
    covered(sort_by_expert(LAUNCH, chosen, 5, 64), chosen.flatten().long(), 64)


@pytest.mark.parametrize("experts", [3, 8, 200])
@pytest.mark.parametrize(("tokens", "shared"), [(2, 1), (70, 2), (300, 1), (RANKED_MAX, 1)])
def test_shared_experts_are_behind_the_others_in_blocks_before_them(tokens: int, shared: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(2).indices.int()
    every = torch.cat((chosen, torch.arange(experts, experts + shared).int().expand(tokens, -1)), dim=1)
    found = sort_by_expert(LAUNCH, every, experts, 16, shared)
    covered(found, every.flatten().long(), 16, first=2 * tokens)


def test_a_single_token_needs_no_sort() -> None:
    chosen = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    found = sort_by_expert(LAUNCH, chosen, 16, 16)
    assert found.alone and found.count == 3 and found.blocks is chosen


def test_blocks_suffice_for_any_choice() -> None:
    for pairs in range(1, 80):
        for experts in (1, 2, 7, 100):
            used = min(pairs, experts)
            worst = (pairs - used) // 16 + used  # one pair each, and the rest in blocks that are full
            assert worst <= blocks_max(pairs, experts, 16) <= pairs
