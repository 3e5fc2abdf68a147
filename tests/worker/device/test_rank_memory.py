"""Ranks gather through memory of their host."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

from kvforge.worker.device import rank_memory
from kvforge.worker.device.rank_memory import RankMemory

COUNT = 3


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a place with a path that is too long for a socket."""
    monkeypatch.setattr(rank_memory, "HALF_BYTES", 64)
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    return folder / "meeting"


@pytest.fixture
def ranks(place: Path) -> Iterator[list[RankMemory]]:
    made = [RankMemory(rank, COUNT, place, wait_s=30.0) for rank in range(COUNT)]
    try:
        with ThreadPoolExecutor(COUNT) as threads:
            [*threads.map(RankMemory.connect, made)]
        yield made
    finally:
        for each in made:
            each.close()


def test_parts_come_in_the_order_of_ranks(ranks: list[RankMemory], place: Path) -> None:
    """Parts of every size, larger than the memory too, one exchange after the other."""
    assert not [*place.parent.iterdir()], "connected ranks leave no sockets"
    sizes = [0, 1, 63, 64, 65, 129, 500, *(Random(1).randrange(300) for _ in range(300))]
    random = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 256, (COUNT, size), dtype=torch.uint8, generator=random) for size in sizes]

    def play(rank: RankMemory) -> list[torch.Tensor]:
        rank.set_timeout(30.0)
        found = [torch.empty_like(part) for part in parts]
        for part, into in zip(parts, found, strict=True):
            rank.gather(part[rank.rank], into)
        return found

    with ThreadPoolExecutor(COUNT) as threads:
        for found in threads.map(play, ranks):
            assert all(map(torch.equal, found, parts))


def test_a_rank_that_ends_is_noticed(ranks: list[RankMemory]) -> None:
    ranks[1].close()
    part, found = torch.zeros(3, dtype=torch.uint8), torch.empty(COUNT, 3, dtype=torch.uint8)
    for rank in (ranks[0], ranks[2]):
        rank.set_timeout(30.0)
        with pytest.raises(ConnectionError):
            rank.gather(part, found)


def test_the_wait_for_a_rank_has_a_limit(ranks: list[RankMemory]) -> None:
    ranks[0].set_timeout(0.05)
    with pytest.raises(BlockingIOError):
        ranks[0].gather(torch.zeros(3, dtype=torch.uint8), torch.empty(COUNT, 3, dtype=torch.uint8))


def test_a_rank_that_does_not_arrive_is_given_up(place: Path) -> None:
    with pytest.raises(TimeoutError):
        _closed_after(RankMemory(0, 2, place, wait_s=0.05))
    with pytest.raises(FileNotFoundError):
        _closed_after(RankMemory(1, 2, place))
    assert not [*place.parent.iterdir()]


def test_a_place_in_use_is_refused_and_kept(place: Path) -> None:
    first = RankMemory(0, 2, place)
    try:
        with pytest.raises(OSError, match="in use"):
            RankMemory(0, 2, place)
        assert [*place.parent.iterdir()], "the other's socket stays"
    finally:
        first.close()
    assert not [*place.parent.iterdir()]


def _closed_after(memory: RankMemory) -> None:
    try:
        memory.connect()
    finally:
        memory.close()
