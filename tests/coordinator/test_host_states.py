"""The host tier with recurrent states: a hit needs the KV of the whole prefix, and a checkpoint just behind it."""

from __future__ import annotations

from typing import Any

from kvforge.coordinator.core.cache.host_parts import CHECKPOINT, part_number
from kvforge.protocol.messages import Step, StepResult
from tests.coordinator.driver import continuation
from tests.coordinator.test_host_tier import SIZE, HostDriver, HostFile, HostWorker
from tests.coordinator.test_states import BLOCKS, CHUNK, StatefulWorker

FIRST, SECOND = [7 * i % 50 + 1 for i in range(30)], [11 * i % 47 + 2 for i in range(30)]
END = 24  # the last multiple of a chunk before the last token


class StateFile(HostFile):
    """A file that keeps blocks of states too: their tags, and what they hold."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.states: dict[int, tuple[list[int], tuple[int, int, int]]] = {}


class HostStateWorker(HostWorker, StatefulWorker):
    """A worker with a host file and a recurrent state."""

    def execute(self, step: Step) -> StepResult:
        """Copy blocks with a part of a state too."""
        file = self.file
        assert isinstance(file, StateFile)
        for block, host, *tag in step.host_writes.reshape(-1, 4).tolist():
            file.states.pop(host, None)
            if block in self.states:
                file.states[host] = tag, self.states[block]
                for offset in range(SIZE):
                    self.kv.setdefault((block, offset), 0)
        for block, host, *tag in step.host_reads.reshape(-1, 4).tolist():
            self.states.pop(block, None)
            if host in file.states:
                found, self.states[block] = file.states[host]
                assert found == tag, "a step reads a state of another position"
        return super().execute(step)


class StateHostDriver(HostDriver):
    """A driver with such workers."""

    worker_type = HostStateWorker


def hosted(blocks: int = 14, host: int = 60, **limits: Any) -> tuple[StateHostDriver, HostStateWorker]:
    """A driver with a worker that has room for one prompt, its state and a checkpoint, and a file."""
    driver = StateHostDriver(**limits)
    driver.wants_kinds, driver.state_blocks, driver.prompt_chunk = True, BLOCKS, CHUNK
    driver.files["w"] = StateFile(host)
    worker = driver.add_worker(blocks, "w")
    assert isinstance(worker, HostStateWorker)
    return driver, worker


def checkpoints(driver: StateHostDriver, prompt: list[int]) -> dict[int, int]:
    """Return the nodes of a prompt's checkpoints on the host, the first block of each, by the tokens before it."""
    nodes, entries = driver.tier.nodes, driver.found(prompt)
    firsts = [node_id for node_id, node in nodes.items() if part_number(node.tokens) == CHECKPOINT]
    return {
        SIZE * (entries.index(nodes[node_id].parent) + 1): node_id
        for node_id in firsts
        if nodes[node_id].parent in entries
    }


# behaviour: an evicted prefix comes back with the checkpoint behind it
def test_an_evicted_prefix_comes_back_with_its_checkpoint() -> None:
    driver, _ = hosted()
    assert (driver.serve(FIRST), driver.serve(SECOND)) == (0, 0)
    assert set(checkpoints(driver, FIRST)) == {END}
    assert driver.serve(FIRST) == END
    assert driver.tier.loaded_total >= BLOCKS + 1 and driver.tier.referenced == 0
    assert driver.serve([*FIRST[:26], 3, 4, 5]) == END, "another prompt goes on from there"


def test_kv_without_a_checkpoint_just_behind_it_is_no_hit() -> None:
    driver, _ = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    assert len(driver.found(FIRST)) == len(FIRST) // SIZE
    driver.tier.drop(checkpoints(driver, FIRST)[END])
    assert driver.serve(FIRST) == 0, "a part of the checkpoint is gone"


def test_a_checkpoint_behind_other_tokens_is_no_hit() -> None:
    driver, _ = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    assert driver.serve([*FIRST[: END - 1], 60, 61, 62]) == 0


def test_a_flipped_bit_of_a_checkpoint_is_a_miss() -> None:
    driver, worker = hosted()
    driver.serve(FIRST)
    driver.serve(SECOND)
    node = driver.tier.nodes[checkpoints(driver, FIRST)[END]]
    driver.files["w"].flipped.add(node.block)
    request = driver.submit(FIRST, 2)
    driver.turn()
    result = worker.execute(worker.inbox.popleft())
    assert result.host_missed.size
    driver.report(worker, result)
    driver.run_until_idle()
    assert driver.answer_of(request) == continuation(FIRST, 2) and driver.request(request).preemptions == 1
    assert driver.tier.missed_checksums_total == 1 and driver.tier.referenced == 0


# behaviour: a worker's successor goes on from the last checkpoint that was written back
def test_a_successor_goes_on_from_a_checkpoint_that_was_written_back() -> None:
    again = {}
    for writeback in (0, 4):
        driver, worker = hosted(blocks=60, host_writeback_blocks=writeback, checkpoint_tokens=8)
        request = driver.submit(FIRST, 24)
        s = driver.machine.cache.sequences
        while s.length.max() < len(FIRST) + 18:
            driver.turn()
            driver.answer(worker)
        driver.lose(worker)
        driver.add_worker(60, "w")
        driver.run_until_idle()
        assert driver.answer_of(request) == continuation(FIRST, 24)
        again[writeback] = driver.machine.requests.recomputed_tokens_total
    assert again[0] >= len(FIRST) + 17 and again[4] <= 16
