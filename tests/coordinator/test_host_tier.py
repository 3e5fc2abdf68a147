"""The host tier: what is evicted from the device is found on the host, and only what a worker has acknowledged."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvforge.coordinator.core.cache import host_copies
from kvforge.coordinator.core.cache.host_copies import HostCopies
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.host_tiers import HostTiers
from kvforge.coordinator.core.events import FromWorker, ToWorker
from kvforge.coordinator.core.reporting.statistics import pool_row
from kvforge.protocol.messages import (
    MISSED_CHECKSUM,
    MISSED_TAG,
    GetHealth,
    Refused,
    Step,
    StepResult,
    WorkerHello,
    WorkerReady,
)
from kvforge.protocol.meters import POOL_COUNTS
from tests.coordinator.driver import Driver, FakeWorker, continuation, model_info

SIZE = 4
FIRST, SECOND = [7 * i % 50 + 1 for i in range(17)], [11 * i % 47 + 2 for i in range(17)]
Content = tuple[list[int], list[int | None]]


class HostFile:
    """A file of blocks with tags, as workers of one name map it: in the order of their lives."""

    def __init__(self, blocks: int, identity: str = "file") -> None:
        self.blocks, self.identity = blocks, identity
        self.content: dict[int, Content] = {}
        self.flipped: set[int] = set()


class HostWorker(FakeWorker):
    """A worker with a host file, which copies as steps say and acknowledges what it has copied."""

    file: HostFile

    def execute(self, step: Step) -> StepResult:
        """Make the copies to the host first, then those from it, then the step."""
        size, copied = self.machine.limits.cache.block_size, []
        for host in step.host_wipes.tolist():
            self.file.content.pop(host, None)
        for block, host, *tag in step.host_writes.reshape(-1, 4).tolist():
            self.file.flipped.discard(host)
            self.file.content[host] = (tag, [self.kv.get((block, offset)) for offset in range(size)])
            copied.append(host)
        missed: list[int] = []
        for block, host, *tag in step.host_reads.reshape(-1, 4).tolist():
            found, content = self.file.content[host]
            if host in self.file.flipped:
                missed += [host, MISSED_CHECKSUM]
                content = [-1] * size
            assert found == tag, "a step reads a host block with other content"
            assert None not in content, "a block without KV was saved"
            self.kv.update({(block, offset): value for offset, value in enumerate(content) if value is not None})
            copied.append(host)
        copied += step.host_wipes.tolist()
        acknowledged = {"host_copied": np.array(copied, np.int32), "host_missed": np.array(missed, np.int32)}
        return msgspec.structs.replace(super().execute(step), **acknowledged)


class HostDriver(Driver):
    """A driver with workers that have host files, by their names."""

    worker_type = HostWorker

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.files: dict[str, HostFile] = {}

    def ready(self, worker: FakeWorker) -> WorkerReady:
        """Announce the worker's file."""
        assert isinstance(worker, HostWorker)
        worker.file = self.files.setdefault(worker.name, HostFile(8))
        file = worker.file
        return msgspec.structs.replace(
            super().ready(worker), host_blocks=file.blocks, host_identity=file.identity, host_new=not file.content
        )

    @property
    def copies(self) -> HostCopies:
        """The host copies of the only worker."""
        (group,) = self.machine.cache.groups.values()
        assert group.host is not None
        return group.host

    @property
    def tier(self) -> HostTier:
        """The books of the only file."""
        (tier,) = self.machine.cache.host_tiers.tiers.values()
        return tier

    def found(self, prompt: list[int]) -> tuple[int, ...]:
        """Return the host entries of a prompt that are hits now."""
        roots = [node.parent for node in self.tier.nodes.values() if node.parent < 0]
        tokens, salt = np.array(prompt, np.int32), -roots[0] - 1
        return self.copies.match(salt, tokens, self.machine.cache.indexing.hashes(salt, tokens), 0, len(prompt) // SIZE)

    def serve(self, prompt: list[int], max_tokens: int = 2) -> int:
        """Return the tokens that a request with this prompt found; its answer must be right."""
        request = self.submit(prompt, max_tokens)
        self.run_until_idle()
        assert self.answer_of(request) == continuation(prompt, max_tokens)
        return self.request(request).cached_tokens


def books(tier: HostTier) -> tuple[int, int, int, int]:
    """Free, cached, referenced and quarantined blocks."""
    return tier.free, tier.cached, tier.referenced, tier.quarantined


def hosted(blocks: int = 6, host: int = 8, **limits: Any) -> tuple[HostDriver, HostWorker]:
    """A driver with a worker that has room for one prompt, and a file."""
    driver = HostDriver(**limits)
    driver.files["w"] = HostFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostWorker)
    return driver, worker


def evicted(driver: HostDriver) -> None:
    """Serve two prompts, of which the second takes the blocks of the first."""
    assert driver.serve(FIRST) == 0
    assert driver.serve(SECOND) == 0


# behaviour: a prefix that was evicted from the device is found on the host
def test_an_evicted_prefix_is_found_on_the_host_with_the_same_answer() -> None:
    driver, worker = hosted()
    evicted(driver)
    assert driver.tier.saved_total == 4  # three were evicted; the first block came with them
    assert driver.serve(FIRST) == 16
    assert driver.tier.loaded_total >= 3
    assert any(step.host_reads.size for step in worker.steps)


def test_what_is_on_the_device_is_not_read_from_the_host() -> None:
    driver, worker = hosted(blocks=16)
    assert [driver.serve(FIRST) for _ in range(3)] == [0, 16, 16]
    assert not any(step.host_reads.size or step.host_writes.size for step in worker.steps)
    assert books(driver.tier) == (8, 0, 0, 0)


def test_a_block_that_is_on_the_host_already_is_not_copied_again() -> None:
    driver, worker = hosted(host=16)
    evicted(driver)
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        assert driver.serve(prompt) == 16
    tags = [tuple(copy[2:]) for step in worker.steps for copy in step.host_writes.reshape(-1, 4).tolist()]
    assert len(tags) == len(set(tags)) == driver.tier.saved_total


# behaviour: an entry is a hit only once the step that writes it is acknowledged
def test_a_copy_that_is_not_acknowledged_is_no_hit() -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    driver.submit(SECOND, 2)
    driver.turn()
    assert worker.inbox and worker.inbox[0].host_writes.size
    writes = worker.inbox[0].host_writes.size // 4
    assert books(driver.tier) == (8 - writes, 0, writes, 0)
    assert driver.found(FIRST) == ()
    driver.run_until_idle()
    assert driver.tier.referenced == 0 and len(driver.found(FIRST)) == 4


@pytest.mark.parametrize("copied", [[], [0], [7, 6, 5, 4, 3]])
def test_a_result_that_acknowledges_other_copies_ends_the_worker(copied: list[int]) -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    request = driver.submit(SECOND, 2)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    assert result.host_copied.size and result.host_copied.tolist() != copied
    driver.report(worker, msgspec.structs.replace(result, host_copied=np.array(copied, np.int32)))
    assert "host_copied acknowledges" in worker.dropped
    assert driver.tier.cached == 0
    driver.add_worker(6, "w")
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(SECOND, 2)


# behaviour: a block with other bytes than were saved is a miss: its sequence begins again, and other entries stay
@pytest.mark.parametrize("flipped", [1, 2, 3])
def test_a_flipped_bit_is_a_miss(flipped: int) -> None:
    driver, worker = hosted()
    evicted(driver)
    nodes = driver.found(FIRST)
    block = driver.tier.nodes[nodes[flipped]].block
    driver.files["w"].flipped.add(block)
    request = driver.submit(FIRST, 2)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 2) and not worker.dropped
    assert driver.request(request).preemptions == 1
    tier = driver.tier
    assert (tier.missed_tags_total, tier.missed_checksums_total, tier.loaded_total) == (0, 1, 1 + flipped), (
        "the first is on the device"
    )
    assert tier.referenced == 0
    driver.serve(SECOND)
    assert driver.serve(FIRST) == 16


def test_what_was_computed_from_missed_blocks_does_not_count() -> None:
    """Also the steps behind that one, which are in flight by then."""
    driver, worker = hosted()
    evicted(driver)
    driver.files["w"].flipped.add(driver.tier.nodes[driver.found(FIRST)[2]].block)
    request = driver.submit(FIRST, 4)
    driver.turn()
    driver.turn()
    assert worker.inbox[0].host_reads.size
    driver.report(worker, worker.execute(worker.inbox.popleft()))
    assert not len(driver.request(request).tokens) and driver.tier.missed_checksums_total == 1
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 4)


def test_two_sequences_that_read_a_missed_block_both_begin_again() -> None:
    driver, _ = hosted(blocks=12, host=40)
    driver.serve(FIRST)
    for number in range(4):
        driver.serve([100 * number + 100 + token for token in SECOND])
    assert len(driver.found(FIRST)) == 4
    driver.files["w"].flipped.add(driver.tier.nodes[driver.found(FIRST)[1]].block)
    requests = [driver.submit(FIRST, 2) for _ in range(2)]
    driver.run_until_idle()
    assert [driver.answer_of(request) for request in requests] == [continuation(FIRST, 2)] * 2
    assert driver.tier.missed_checksums_total >= 1 and driver.tier.referenced == 0


@pytest.mark.parametrize("missed", [[-1, 2], [7, 1, 3], [0, 0], [99, MISSED_TAG]])
def test_a_result_that_misses_what_was_not_read_ends_the_worker(missed: list[int]) -> None:
    driver, worker = hosted()
    evicted(driver)
    request = driver.submit(FIRST, 2)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    driver.report(worker, msgspec.structs.replace(result, host_missed=np.array(missed, np.int32)))
    assert "host_missed names what step" in worker.dropped
    driver.add_worker(6, "w")
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 2)


# behaviour: statistics, health, shared tables and explanations show the tier
def test_the_numbers_of_the_tier() -> None:
    driver, _ = hosted()
    evicted(driver)
    driver.files["w"].flipped.add(driver.tier.nodes[driver.found(FIRST)[2]].block)
    driver.serve(FIRST)
    tier, (group,) = driver.tier, driver.machine.cache.groups.values()
    (pool,) = driver.stats().pools
    assert (pool.host_blocks, pool.host_free, pool.host_cached, pool.host_quarantined) == (8, *books(tier)[:2], 0)
    assert (pool.host_saved_total, pool.host_loaded_total) == (tier.saved_total, tier.loaded_total)
    assert (pool.host_evicted_total, pool.host_unsaved_total) == (tier.evicted_total, tier.unsaved_total)
    assert (pool.host_missed_tags_total, pool.host_missed_checksums_total) == (0, 1)
    (health,) = driver.ask(GetHealth(rid=driver.rid())).workers
    assert (health.host_blocks, health.host_cached, health.host_missed_total) == (8, tier.cached, 1)
    assert (health.host_saved_total, health.host_loaded_total) == (tier.saved_total, tier.loaded_total)
    row = dict(zip(POOL_COUNTS, pool_row(driver.machine.cache, group), strict=True))
    assert row["host_missed_checksums"] == 1 and row["host_hit_tokens"] == SIZE * tier.loaded_total > 0
    assert row["host_cached"] == tier.cached and row["host_saved"] == tier.saved_total
    plain = Driver()
    plain.add_worker(8)
    (group,) = plain.machine.cache.groups.values()
    assert len(pool_row(plain.machine.cache, group)) == len(POOL_COUNTS)


def test_an_explanation_says_where_a_block_is_and_why_it_moves() -> None:
    driver, _ = hosted()
    evicted(driver)
    request = driver.submit(FIRST, 2)
    driver.turn()
    said = driver.explain(request_id=request).sentences
    assert any("tokens of its prefix come from the host tier with step" in sentence for sentence in said)
    driver.run_until_idle()
    found = [driver.explain(block_id=block).sentences for block in range(6)]
    assert any("of the host tier too" in sentence for sentences in found for sentence in sentences)


def test_a_worker_without_a_file_cannot_acknowledge_copies() -> None:
    driver = Driver()
    worker = driver.add_worker(8)
    driver.submit(FIRST, 2)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    driver.report(worker, msgspec.structs.replace(result, host_copied=np.array([0], np.int32)))
    assert "host_copied acknowledges 1 copies" in worker.dropped


# behaviour: KV that comes from the host is no hit before its step is acknowledged
def test_blocks_that_are_filled_from_the_host_are_not_indexed_early() -> None:
    driver, worker = hosted(blocks=16, host=16, steps_in_flight_max=2)
    for start in range(4):
        driver.serve([start + 1, *FIRST])
    driver.serve(SECOND)
    other = driver.submit([40, 41, 42], 8)
    driver.turn()
    request = driver.submit([1, *FIRST], 2)
    driver.answer(worker)
    driver.turn()
    assert len(worker.inbox) == 2
    (load,) = driver.copies.loads.values()
    slot = next(iter(driver.copies.loads))
    s = driver.machine.cache.sequences
    assert load.step == worker.inbox[-1].step_id > worker.inbox[0].step_id
    assert s.computed[slot] < load.end <= s.scheduled[slot]
    table = s.blocks_of(slot)[int(s.computed[slot]) // SIZE : load.end // SIZE]
    driver.answer(worker)  # the step before
    assert not driver.machine.cache.blocks.indexed[table].any() and driver.copies.loads
    driver.answer(worker)
    assert driver.machine.cache.blocks.indexed[table].all() and not driver.copies.loads
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation([1, *FIRST], 2)
    assert driver.answer_of(other) == continuation([40, 41, 42], 8)


@pytest.mark.parametrize("sent", [False, True])
def test_a_request_that_is_cancelled_while_its_blocks_come_leaves_nothing(sent: bool) -> None:
    driver, worker = hosted()
    evicted(driver)
    request = driver.submit(FIRST, 2)
    if sent:
        driver.turn()
        assert worker.inbox[0].host_reads.size
    driver.cancel(request)
    driver.run_until_idle()
    assert books(driver.tier)[2:] == (0, 0) and not driver.copies.loads
    assert driver.serve(FIRST) == 16


# behaviour: a worker that dies leaves the file; its successor maps it and hits
def test_a_successor_finds_what_its_predecessor_left() -> None:
    driver, worker = hosted()
    evicted(driver)
    saved = driver.tier.cached
    driver.lose(worker)
    assert driver.tier.epoch == 0 and driver.tier.cached == saved
    driver.add_worker(6, "w")
    assert driver.serve(FIRST) == 16


def test_blocks_in_the_making_are_quarantined_until_a_successor_has_the_file() -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    driver.submit(SECOND, 2)
    driver.turn()
    writes = worker.inbox[0].host_writes.size // 4
    driver.lose(worker)
    assert books(driver.tier) == (8 - writes, 0, 0, writes)
    driver.add_worker(6, "w")
    assert driver.tier.quarantined == 0
    driver.run_until_idle()
    assert driver.serve(FIRST) == 0


def test_entries_that_a_lost_worker_was_reading_are_not_tried_again() -> None:
    driver, worker = hosted()
    evicted(driver)
    driver.submit(FIRST, 2)
    driver.turn()
    hosts = set(worker.inbox[0].host_reads[1::4].tolist())
    read = len(hosts)
    assert read
    before = driver.tier.cached + driver.tier.referenced
    driver.lose(worker)
    assert driver.tier.cached <= before - read
    again = driver.add_worker(6, "w")
    driver.run_until_idle()
    assert hosts.isdisjoint(host for step in again.steps for host in step.host_reads[1::4].tolist())


# behaviour: another model, layout or file misses
def test_another_identity_misses() -> None:
    driver, worker = hosted()
    evicted(driver)
    driver.lose(worker)
    driver.files["w"] = HostFile(8, "another")
    driver.add_worker(6, "w")
    assert driver.serve(FIRST) == 0


def test_a_prompt_under_another_salt_misses() -> None:
    driver, _ = hosted()
    evicted(driver)
    request = driver.submit(FIRST, 2, salt="other")
    driver.run_until_idle()
    assert driver.request(request).cached_tokens == 0


def test_two_workers_cannot_have_one_file() -> None:
    driver, _ = hosted()
    second = HostWorker(driver.machine, 9, "second", 6, model_info())
    driver.workers.append(second)
    driver.files["second"] = driver.files["w"]
    driver.report(second, WorkerHello(rid=1, name="second", pid=1))
    effects = driver.report(second, driver.ready(second))
    refusals = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert "host file of another worker" in (second.dropped or refusals[0].error.message)
    assert len(driver.machine.cache.groups) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"host_blocks": -1}, "host_blocks -1"),
        ({"host_blocks": 1 << 21}, "host_blocks 2097152"),
        ({"host_identity": ""}, "host_identity has 0 characters"),
        ({"host_identity": "x" * 65}, "host_identity has 65 characters"),
    ],
)
def test_an_impossible_announcement_is_refused(fields: dict[str, Any], problem: str) -> None:
    driver = HostDriver()
    worker = HostWorker(driver.machine, 1, "w", 6, model_info())
    driver.workers.append(worker)
    driver.apply(FromWorker(1, WorkerHello(rid=1, name="w", pid=1)))
    driver.report(worker, msgspec.structs.replace(driver.ready(worker), **fields))
    assert problem in worker.dropped


# behaviour: the oldest entry gives way, and every block is accounted for
def test_the_least_recently_used_entry_gives_its_block() -> None:
    driver, _ = hosted(host=5)
    for prompt in (FIRST, SECOND, [9, *FIRST], [9, *SECOND]):
        driver.serve(prompt)
    assert driver.tier.evicted_total > 0
    assert books(driver.tier) == (0, 5, 0, 0)
    assert driver.serve(FIRST) == 0


def test_a_file_whose_blocks_are_all_in_use_saves_nothing_more() -> None:
    tier = HostTiers(1, 8).new("file", 1)
    first, second = tier.add(-1, 10, b"a" * 16), tier.add(-1, 11, b"b" * 16)
    assert first is not None and second is not None
    assert tier.give_block(first) and not tier.give_block(second)
    tier.written(first)
    assert tier.give_block(second)
    assert first not in tier.nodes


def test_a_node_that_takes_the_block_of_its_only_child_stays() -> None:
    tier = HostTiers(1, 8).new("file", 1)
    parent = tier.add(-1, 10, b"a" * 16)
    assert parent is not None
    child = tier.add(parent, 11, b"b" * 16)
    assert child is not None and tier.give_block(child)
    tier.written(child)
    assert tier.give_block(parent)
    tier.written(parent)
    tier.check_invariants()
    assert list(tier.nodes) == [parent] and books(tier) == (0, 1, 0, 0)


# behaviour: what comes from the host for an idle sequence does not wait for a request
def test_a_step_without_rows_carries_copies() -> None:
    driver, worker = hosted()
    evicted(driver)
    driver.create(FIRST)
    assert driver.machine.busy
    driver.turn()
    (step,) = worker.inbox
    assert not step.slots.size and step.host_reads.size
    (slot,) = driver.copies.loads
    driver.answer(worker)
    assert driver.machine.cache.sequences.computed[slot] == 16 and not driver.copies.loads


def test_nodes_are_bounded() -> None:
    tier = HostTiers(1, 2).new("file", 1)
    nodes = [tier.add(-1, value, b"a" * 16) for value in range(7)]
    assert [node is None for node in nodes] == [False] * 6 + [True]


def test_an_equal_hash_of_other_content_is_no_entry() -> None:
    tier = HostTiers(1, 8).new("file", 2)
    node = tier.add(-1, 10, b"a" * 16)
    assert node is not None and tier.add(-1, 10, b"b" * 16) is None and tier.add(-2, 10, b"a" * 16) is None
    assert tier.add(-1, 10, b"a" * 16) == node


def test_books_of_files_that_no_worker_maps_are_bounded() -> None:
    tiers = HostTiers(2, 8)
    for epoch in range(1, 5):
        tiers.attach(str(epoch), 1, epoch).epoch = 0
    assert list(tiers.tiers) == ["3", "4"]


# behaviour: the copies of a step are bounded, and so is its message
def test_a_step_reads_and_writes_a_bounded_number_of_host_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "WRITES_MAX", 2)
    driver, worker = hosted()
    evicted(driver)
    assert driver.tier.unsaved_total > 0
    monkeypatch.undo()
    for prompt in (FIRST, SECOND, FIRST, SECOND):
        driver.serve(prompt)
    monkeypatch.setattr(host_copies, "READS_MAX", 1)
    before = len(worker.steps)
    driver.serve(FIRST)
    reads = [step.host_reads.size // 4 for step in worker.steps[before:]]
    assert max(reads) == 1


# behaviour: statistics show the tier
def test_statistics_have_the_books_of_the_host_file() -> None:
    driver, _ = hosted()
    evicted(driver)
    driver.serve(FIRST)
    (pool,) = driver.stats().pools
    tier = driver.tier
    assert (pool.host_blocks, pool.host_free, pool.host_cached) == (8, tier.free, tier.cached)
    assert (pool.host_saved_total, pool.host_loaded_total) == (tier.saved_total, tier.loaded_total)
    assert pool.host_saved_total > 0 < pool.host_loaded_total
