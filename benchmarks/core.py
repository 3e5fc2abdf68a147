"""Cost of the cache core: creating and removing sequences, looking up prefixes, allocating blocks, simulating seeds.

    python -m benchmarks.core [--json FILE] [--seconds S]

Medians of many repetitions in one process, nothing else of kvforge running; the garbage collector is off, as it is in
the coordinator's loop.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns, time

import numpy as np
from msgspec import structs

from kvforge.coordinator.core.cache.block_pool import BlockPool
from kvforge.coordinator.core.cache.blocks import Blocks
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.cache.hashing import BlockHasher
from kvforge.coordinator.core.cache.kv_cache_manager import KVCacheManager
from kvforge.coordinator.core.cache.prefix_cache import PrefixCache, PrefixStore
from kvforge.coordinator.core.cache.tenants import Tenants
from kvforge.coordinator.core.clock import Clock
from kvforge.coordinator.core.events import Boot, ClientCame, Effect, FromClient, FromWorker, ToWorker, Turn
from kvforge.coordinator.core.limits import Bounds, Limits
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.waits import Waits
from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.coordinator.kv_events.stream import EventStream, ReplayRequest
from kvforge.protocol.messages import (
    Accepted,
    Cancel,
    CreateSequence,
    ModelInfo,
    RemoveSequences,
    SequenceInfo,
    Step,
    Submit,
    WorkerHello,
    WorkerReady,
)

from . import control_plane
from .report import report

VOCABULARY = 100_000
PROMPT_TOKENS = 8192
SEQUENCE_TOKENS = 1000
ADMITTED_TOKENS = 2048
DECODED_ROWS, DECODED_PROMPT = 256, 512
STATE_BLOCKS, PROMPT_CHUNK = 8, 64
STATES_EACH = 3  # of each row: its own, and two checkpoints


def median_us(action: Callable[[], object], seconds: float) -> float:
    """Median microseconds of one call, over as many calls as fit into `seconds` (at least 30)."""
    times: list[int] = []
    end = perf_counter_ns() + int(seconds * 1e9)
    while len(times) < 30 or perf_counter_ns() < end:
        start = perf_counter_ns()
        action()
        times.append(perf_counter_ns() - start)
    return float(np.median(times)) / 1000


def machine() -> Machine:
    """A coordinator's core with one worker of 32,768 blocks of 16 tokens."""
    limits = Limits(bounds=Bounds(sequences_max=256, blocks_max=1 << 16, blocks_per_sequence_max=1024))
    core = Machine(Boot("benchmark", b"key", limits), 0)
    model = ModelInfo(
        name="m", source="", architecture="a", fingerprint="f", vocab_size=VOCABULARY, context_tokens_max=1 << 20
    )
    core.apply(ClientCame(1), 0)
    core.apply(FromWorker(1, WorkerHello(rid=1, name="w", pid=1)), 0)
    ready = WorkerReady(rid=2, model=model, blocks=1 << 15, bytes_per_block=1, kv_dtype="float32", device="none")
    core.apply(FromWorker(1, ready), 0)
    return core


def forget_changes(cache: KVCacheManager) -> None:
    """Clear the recorded changes, as the publisher does after a turn."""
    cache.sequences.changed_rows.clear()
    cache.sequences.changed_lengths.clear()
    cache.sequences.changed_cells.clear()
    cache.blocks.changed.clear()


def create_and_remove(seconds: float) -> float:
    """Create and remove a client sequence of 1,000 tokens by commands; return microseconds."""
    core, tokens = machine(), np.random.default_rng(1).integers(0, VOCABULARY, SEQUENCE_TOKENS).astype(np.int32)

    def once() -> None:
        created = core.apply(FromClient(1, CreateSequence(rid=1, tokens=tokens)), 1).effects[0].message  # type: ignore[union-attr]
        assert isinstance(created, SequenceInfo)
        core.apply(FromClient(1, RemoveSequences(rid=2, sequence_ids=np.array([created.sequence_id]))), 2)
        forget_changes(core.cache)

    return median_us(once, seconds)


def fill(core: Machine, group: Group, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    """Index every full block of `tokens`, as acknowledged steps would, and release the sequence."""
    cache, s = core.cache, core.cache.sequences
    created = core.apply(FromClient(1, CreateSequence(rid=1, tokens=tokens)), 1).effects[0].message  # type: ignore[union-attr]
    assert isinstance(created, SequenceInfo)
    slot = s.find(created.sequence_id)
    s.computed[slot] = s.scheduled[slot] = tokens.size
    cache.indexing.filled(group)
    core.apply(FromClient(1, RemoveSequences(rid=2, sequence_ids=np.array([created.sequence_id]))), 2)
    assert group.pool.cached >= tokens.size // core.limits.cache.block_size


def prefix_lookups(seconds: float) -> tuple[float, float]:
    """Hash and look up an 8,192-token prompt, fully cached and not cached; return microseconds."""
    core, rng = machine(), np.random.default_rng(2)
    group = core.cache.groups[0]
    known = rng.integers(0, VOCABULARY, PROMPT_TOKENS + 1).astype(np.int32)
    unknown = rng.integers(0, VOCABULARY, PROMPT_TOKENS + 1).astype(np.int32)
    fill(core, group, known)
    salt = core.cache.hasher.salt("tenant:default")

    def look(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        placement = core.cache.planner.plan_placement(group, salt, tokens, core.cache.indexing.hashes(salt, tokens))
        return placement.cached_tokens(core.limits.cache.block_size)

    assert (look(known), look(unknown)) == (PROMPT_TOKENS, 0)
    return median_us(lambda: look(known), seconds), median_us(lambda: look(unknown), seconds)


def admissions(seconds: float) -> tuple[float, float]:
    """Admit a hashed prompt of 2,048 tokens, from its Submit to its blocks: not cached, and fully cached."""
    core, rng = machine(), np.random.default_rng(3)
    known = rng.integers(0, VOCABULARY, ADMITTED_TOKENS).astype(np.int32)
    fill(core, core.cache.groups[0], known)
    times: dict[bool, list[int]] = {False: [], True: []}
    end, rid = perf_counter_ns() + int(2 * seconds * 1e9), 0
    while perf_counter_ns() < end or len(times[True]) < 30:
        rid += 1
        cached = rid % 2 == 0
        tokens = known if cached else rng.integers(0, VOCABULARY, ADMITTED_TOKENS).astype(np.int32)
        submit = FromClient(1, Submit(rid=rid, prompt=tokens, max_tokens=16), 7)
        started = perf_counter_ns()
        accepted = core.apply(submit, rid).effects[0].message  # type: ignore[union-attr]
        core.admission.admit()
        times[cached].append(perf_counter_ns() - started)
        assert isinstance(accepted, Accepted)
        request = core.requests.live[accepted.request_id]
        assert request.state == "running"
        assert (request.cached_tokens > ADMITTED_TOKENS - 32) == cached
        core.apply(FromClient(1, Cancel(rid=rid, request_id=request.id)), rid)
        core.apply(Turn(), rid)  # no step is in flight: pending work is applied
        forget_changes(core.cache)
    return float(np.median(times[False])) / 1000, float(np.median(times[True])) / 1000


class NoTransport:
    """A sink for batches of KV events: they are encoded, but have no subscriber."""

    def publish(self, number: bytes, payload: bytes) -> None:
        """Forgets it."""

    def pop_requests(self) -> list[ReplayRequest]:
        """Nothing."""
        return []

    def answer(self, who: bytes, number: bytes, payload: bytes) -> bool | None:
        """Refuse to send."""
        del who, number, payload
        return None


class Decodes:
    """A core and a worker that answers at once: prompts of 512 tokens, then decodes that each fill a 16th of the rows'
    blocks. events: whether changes of the prefix index are published as KV events. states: blocks of the recurrent
    state of a sequence, 0 for a model without one."""

    def __init__(self, steps: int, events: bool = False, states: int = 0) -> None:
        bounds = control_plane.limits(DECODED_ROWS, steps, DECODED_PROMPT)
        more = DECODED_ROWS * states * STATES_EACH
        room = structs.replace(bounds.bounds, blocks_max=bounds.bounds.blocks_max + more)
        bounds = structs.replace(bounds, bounds=room)
        ready = control_plane.ready(bounds)
        if states:
            ready = structs.replace(ready, state_blocks=states, wants_kinds=True, prompt_chunk=PROMPT_CHUNK)
        core, self._answerer = Machine(Boot("benchmark", b"key", bounds), 0), control_plane.Answerer()
        self._core, self._now_us = core, 1
        core.apply(ClientCame(2), 0)
        core.apply(FromWorker(1, WorkerHello(rid=1, name="w", pid=1)), 0)
        core.apply(FromWorker(1, ready), 0)
        for message in control_plane.submissions(DECODED_ROWS, steps, DECODED_PROMPT):
            core.apply(FromClient(2, message, 1), 0)
        self._stream = EventStream(core, NoTransport(), KvEventsSection(), time) if events else None
        self._pending = deque(self._steps(core.apply(Turn(), 1).effects))

    @staticmethod
    def _steps(effects: list[Effect]) -> list[Step]:
        return [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Step)]

    def step(self) -> int | None:
        """Apply a result and the turn after it; return nanoseconds, or None unless the step has decodes only."""
        step = self._pending.popleft()
        event = FromWorker(1, self._answerer.answer(step, 1))
        self._now_us += 1000
        started = perf_counter_ns()
        self._core.apply(event, self._now_us)
        effects = self._core.apply(Turn(), self._now_us).effects
        if self._stream is not None:
            self._stream.turned()
        ended = perf_counter_ns()
        self._pending += self._steps(effects)
        forget_changes(self._core.cache)
        return ended - started if step.slots.size == DECODED_ROWS and step.counts.max() == 1 else None


def decodes(steps: int) -> tuple[float, float, float]:
    """Run decode steps of 256 rows in the core, in turns: as they are, with KV events, and with recurrent states.

    Returns:
        Mean microseconds of each, because only some steps have events or take checkpoints.
    """
    worlds = Decodes(steps), Decodes(steps, events=True), Decodes(steps, states=STATE_BLOCKS)
    taken: tuple[list[int], ...] = [], [], []
    while min(map(len, taken)) < steps:
        for world, times in zip(worlds, taken, strict=True):
            if (ns := world.step()) is not None:
                times.append(ns)
    off, on, states = (float(np.mean(np.sort(times)[: int(len(times) * 0.99)])) / 1000 for times in taken)
    return off, on, states


def allocations(seconds: float, bulk: int) -> float:
    """Allocate and free a million blocks, `bulk` at a time; return nanoseconds for each of the two million
    operations."""
    count, size, waits = 1 << 20, 16, Waits()
    blocks, tenants = Blocks(count, size), Tenants(Limits(bounds=Bounds(blocks_max=count)))
    index = PrefixCache(PrefixStore(count, size), blocks, waits, BlockHasher(size, b"key", 1))
    pool, tenant = BlockPool(Clock(), blocks, tenants, waits, index, 1, 0, count), tenants.intern("a")

    def million() -> None:
        for _ in range(1_000_000 // bulk):
            pool.release(pool.allocate(tenant, bulk), 0)
            blocks.changed.clear()

    return median_us(million, seconds) * 1000 / (1_000_000 // bulk * bulk) / 2


def simulated(seeds: int) -> str:
    """The simulator's own last line for `seeds` seeds of 2,000 events on one core."""
    command = [sys.executable, "-m", "tools.simulation", "--seeds", str(seeds), "--events", "2000", "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return (run.stdout.strip() or run.stderr.strip()).splitlines()[-1].split("\r")[-1]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results here too")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to repeat each measurement")
    parser.add_argument("--decodes", type=int, default=2000, help="decode steps with and without KV events")
    parser.add_argument("--seeds", type=int, default=100, help="seeds to simulate (0: skip the simulator)")
    parser.add_argument("--only-decodes", action="store_true", help="measure decode steps alone")
    options = parser.parse_args()
    gc.disable()
    silent, published, with_states = decodes(options.decodes)
    rows: list[list[object]] = [
        [f"decode step of {DECODED_ROWS} rows, no KV events (mean)", f"{silent:.1f} us", ""],
        ["the same with KV events", f"{published:.1f} us, x {published / silent:.3f}", ""],
        ["the same with recurrent states", f"{with_states:.1f} us, x {with_states / silent:.3f}", "x 1.3"],
    ]
    results: dict[str, object] = {
        "decode_us": silent,
        "decode_kv_events_us": published,
        "decode_states_us": with_states,
    }
    if options.only_decodes:
        report("cache core: decode steps", ["operation", "mean", "at most"], rows, results, options.json)
        return
    created = create_and_remove(options.seconds)
    hit, miss = prefix_lookups(options.seconds)
    each = {bulk: allocations(options.seconds, bulk) for bulk in (256, 4096)}
    admitted, admitted_cached = admissions(options.seconds)
    rows = [
        ["create + remove of a 1,000-token sequence", f"{created:.1f} us", "100 us"],
        ["look up 8,192 tokens, all cached", f"{hit:.1f} us", "1000 us"],
        ["look up 8,192 tokens, none cached", f"{miss:.1f} us", "1000 us"],
        [f"admit a prompt of {ADMITTED_TOKENS:,} tokens, none cached", f"{admitted:.1f} us", "150 us"],
        [f"admit a prompt of {ADMITTED_TOKENS:,} tokens, all cached", f"{admitted_cached:.1f} us", "150 us"],
        *rows,
    ]
    for bulk, ns in each.items():
        rows.append([f"allocate or free a block, {bulk:,} at a time", f"{ns:.1f} ns", "50 ns"])
    results |= {
        "create_remove_us": created,
        "lookup_hit_us": hit,
        "lookup_miss_us": miss,
        "allocate_or_free_ns": each,
        "admit_us": admitted,
        "admit_cached_us": admitted_cached,
    }
    if options.seeds:
        results["simulator"] = simulated(options.seeds)
        rows.append(
            ["simulator, one core", str(results["simulator"]).split("events ")[-1].strip(), "(min) 300 seeds/min"]
        )
    title = "cache core: cost of one operation"
    report(title, ["operation", "median", "at most"], rows, results, options.json)


if __name__ == "__main__":
    main()
