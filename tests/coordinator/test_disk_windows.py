"""The disk tier with windows: window blocks go down and come back with the blocks that they hang on."""

from __future__ import annotations

import numpy as np
import pytest

from kvforge.coordinator.core.cache.host_parts import part_number
from kvforge.protocol.messages import DISK_DAMAGED, DISK_READ
from tests.coordinator.test_disk_tier import DiskDriver, DiskWorker, Slot
from tests.coordinator.test_host_tier import HostFile, books
from tests.coordinator.test_host_windows import FIRST, FULL, IN_SIGHT, SECOND
from tests.coordinator.test_windows import PAGES, RING, SIZE, WINDOW_TOKENS, WindowWorker


class DiskWindowWorker(DiskWorker, WindowWorker):
    """A worker with a disk and layers with a window."""


class DiskWindowDriver(DiskDriver):
    """A driver with such workers."""

    worker_type = DiskWindowWorker

    def only_on_disk(self) -> None:
        """Serve two prompts: the first is on the disk alone then."""
        for prompt in (FIRST, SECOND):
            assert self.serve(prompt) == 0
        for node_id in sorted(self.tier.cached_nodes(), reverse=True):  # parts before their entries
            self.tier.drop(node_id)
        assert not self.tier.cached

    def start(self, file: HostFile) -> None:
        """Start a worker with a file, and announce its disk."""
        self.files["w"] = file
        self.add_worker(24, "w")
        self.turn()
        self.announce()
        self.turn()


def with_disk(host: int = 40) -> DiskWindowDriver:
    """A driver. Its worker has room for one prompt, above a disk that is announced."""
    driver = DiskWindowDriver()
    driver.window = (WINDOW_TOKENS, PAGES, RING)
    driver.start(HostFile(host))
    return driver


def parts(driver: DiskWindowDriver) -> int:
    """Return how many window blocks are on the disk."""
    return sum(part_number(node.tokens) >= 0 and node.written for node in driver.books.nodes.values())


def parents_first(disk: dict[int, Slot]) -> dict[int, Slot]:
    """Return what is on a disk in the order in which a worker announces it."""
    found: dict[int, Slot] = {}
    while len(found) < len(disk):
        known = [each[0] for each in found.values()]
        found |= {slot: each for slot, each in disk.items() if each[2] or each[1] in known}
    return found


# behaviour: a prefix that has left the host tier comes back from the disk with its window
def test_a_prefix_comes_back_with_its_window() -> None:
    driver = with_disk()
    driver.only_on_disk()
    assert parts(driver) >= IN_SIGHT * PAGES
    assert driver.serve(FIRST) == FULL * SIZE
    assert driver.books.loaded_total >= IN_SIGHT * PAGES + 1
    assert not driver.disk_copies.loads and books(driver.books)[2:] == (0, 0) and driver.tier.referenced == 0


# behaviour: after a restart of the host, announced window blocks are hits, at their own place alone
@pytest.mark.parametrize("moved", [False, True])
def test_announced_window_blocks_are_hits_at_their_place(*, moved: bool) -> None:
    driver = with_disk()
    driver.only_on_disk()
    if moved:  # each window block says that it belongs to another entry
        rows = [slot for slot, each in driver.disk.items() if part_number(np.int32(each[3]).tobytes()) >= 0]
        parents = [driver.disk[slot][1] for slot in rows]
        for slot, parent in zip(rows, parents[PAGES:] + parents[:PAGES], strict=True):
            value, _, *rest = driver.disk[slot]
            driver.disk[slot] = (value, parent, *rest)  # type: ignore[assignment]
    driver.disk = parents_first(driver.disk)
    driver.lose(driver.only)
    driver.start(HostFile(40, "of another boot"))
    assert driver.serve(FIRST) == (0 if moved else FULL * SIZE)
    assert (driver.books.pruned_total > 0) == moved


def test_a_damaged_window_block_is_a_miss() -> None:
    driver = with_disk()
    driver.only_on_disk()
    driver.outcomes[DISK_READ] = (DISK_DAMAGED, 0)
    assert driver.serve(FIRST) < FULL * SIZE
    assert driver.books.missed_checksums_total > 0
    driver.outcomes.clear()
    assert books(driver.books)[2:] == (0, 0) and driver.tier.referenced == 0


@pytest.mark.parametrize("host", [1, 2, 4, 8])
def test_a_host_tier_that_is_too_small_keeps_no_request(host: int) -> None:
    driver = with_disk(host)
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        driver.serve(prompt)
    assert sum(books(driver.tier)) == host and driver.tier.referenced == 0
