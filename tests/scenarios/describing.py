"""Formats messages and states as text, with the names that a scenario gave to sequences and requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.coordinator.core.cache.blocks import FREE
from kvforge.coordinator.core.machine import Machine
from kvforge.protocol.layout import BLOCK_STATES
from kvforge.protocol.messages import (
    Accepted,
    Appended,
    BlockCount,
    BlockInfo,
    Done,
    Explanation,
    Forked,
    Message,
    PoolRegistered,
    Purged,
    Refused,
    Removed,
    RequestInfo,
    SequenceInfo,
    SequenceTokens,
    Stats,
    Step,
    Stream,
)


class Names:
    """Two-way mapping between a scenario's names and the core's ids."""

    def __init__(self) -> None:
        self._sequences: dict[str, int] = {}
        self._requests: dict[str, int] = {}
        self._awaited: list[str] = []
        self._slots: dict[int, int] = {}
        self._sampled: dict[str, int] = {}

    def expect_sequences(self, names: list[str]) -> None:
        """Assign these names to the sequence ids in the next answer."""
        self._awaited = names

    def expect_request(self, name: str) -> None:
        """Assign this name to the request id in the next answer."""
        self._awaited = [name]

    def learn_sequences(self, numbers: list[int]) -> None:
        """Record the ids of the awaited sequences."""
        self._sequences.update(zip(self._awaited, numbers, strict=True))
        self._awaited = []

    def learn_request(self, number: int) -> None:
        """Record the id of the awaited request."""
        self._requests[self._awaited[0]] = number
        self._awaited = []

    @property
    def awaits(self) -> bool:
        """Return whether the next answer assigns a name."""
        return bool(self._awaited)

    def sequence(self, name: str) -> int:
        """Return the id of a sequence; digits stand for themselves."""
        return self._sequences[name] if name in self._sequences else int(name)

    def request(self, name: str) -> int:
        """Return the id of a request; digits stand for themselves."""
        return self._requests[name] if name in self._requests else int(name)

    def sequence_name(self, number: int) -> str:
        """Return the name of a sequence, or its number in parentheses if it has none."""
        return next((name for name, n in self._sequences.items() if n == number), f"(sequence {number})")

    def request_name(self, number: int) -> str:
        """Return the name of a request, or its number in parentheses if it has none."""
        return next((name for name, n in self._requests.items() if n == number), f"(request {number})")

    def begin(self, step: Step) -> None:
        """Record the request in each slot that the step begins."""
        for row in step.begins:
            self._slots[row.slot] = row.request_id

    def in_slot(self, step: Step, slot: int) -> str:
        """Return the name of the request in a slot."""
        self.begin(step)
        return self.request_name(self._slots[slot])

    def next_token(self, request: str) -> int:
        """Return the next default token of a request: 100n, 100n + 1, ..."""
        count = self._sampled.get(request, 0)
        self._sampled[request] = count + 1
        return 100 * self._requests[request] + count


def _list(values: Any) -> str:
    return ",".join(str(value) for value in values.tolist()) or "-"


def _step(step: Step, names: Names) -> list[str]:
    names.begin(step)
    lines = [f"step {step.step_id}"]
    copies = step.copies.reshape(-1, 3).tolist()
    lines += [f"  copy {count} tokens of block {source} to block {target}" for source, target, count in copies]
    start = 0
    rows = zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist(), strict=True)
    for slot, first, count, samples in rows:
        fed = _list(step.tokens[start : start + count]).replace("-1", "(sampled)")
        start += count
        sampled = ", samples" if samples else ""
        lines.append(f"  {names.in_slot(step, slot)} positions {first} to {first + count - 1}: {fed}{sampled}")
    return lines


def _stream(stream: Stream, names: Names) -> list[str]:
    rows = zip(stream.request_ids.tolist(), stream.offsets.tolist(), stream.tokens.tolist(), strict=True)
    lines = [f"stream {names.request_name(request)}[{offset}] = {token}" for request, offset, token in rows]
    for ended in stream.ended:
        why = f" ({ended.error.message})" if ended.error else ""
        cached = f", {ended.cached_tokens} cached" if ended.cached_tokens else ""
        request = names.request_name(ended.request_id)
        lines.append(f"{request} ended by {ended.reason}: {ended.generated_tokens} tokens{cached}{why}")
    return lines


def describe(message: Message, names: Names) -> list[str]:
    """Format a message as one or more lines."""
    m: Any = message
    match message:
        case Accepted():
            names.learn_request(m.request_id)
            return [f"accepted {names.request_name(m.request_id)}"]
        case Refused():
            return [f"refused: {m.error.code}: {m.error.message}"]
        case SequenceInfo():
            if names.awaits:
                names.learn_sequences([m.sequence_id])
            where = f"{m.blocks} blocks on {m.worker}" if m.resident else "not resident"
            return [f"{names.sequence_name(m.sequence_id)}: {m.length} tokens, {m.computed_tokens} with KV, {where}"]
        case Forked():
            names.learn_sequences(m.sequence_ids.tolist())
            return [f"forked {' '.join(names.sequence_name(number) for number in m.sequence_ids.tolist())}"]
        case RequestInfo():
            return [f"{names.request_name(m.request_id)} is {m.state} {m.reason}: {_list(m.tokens)}"]
        case BlockInfo():
            held = ", ".join(holder.name for holder in m.holders) or "none"
            return [f"block {m.block_id} is {m.state}, generation {m.generation}, held by {held}"]
        case Stats():
            r = m.requests
            return [f"requests: {r.pending} pending, {r.running} running, {r.finished_total} finished in all"]
        case Step():
            return _step(message, names)
        case Stream():
            return _stream(message, names)
    short: dict[type[Message], Callable[[], str]] = {
        Appended: lambda: f"lengths {_list(m.lengths)}",
        SequenceTokens: lambda: f"tokens {_list(m.tokens)}",
        Removed: lambda: f"removed, {m.freed_blocks} blocks freed",
        BlockCount: lambda: f"block {m.block_id} is {m.state}, {m.refcount} holders, generation {m.generation}",
        Purged: lambda: f"{m.count} purged",
        PoolRegistered: lambda: f"pool registered from block {m.base_block} on, epoch {m.epoch}",
        Done: lambda: "done",
    }
    if isinstance(message, Explanation):
        return list(message.sentences)
    return [short[type(message)]()]


def describe_state(machine: Machine, names: Names) -> list[str]:
    """Format the pools, the blocks that are not free, the sequences, and the queue."""
    cache, lines = machine.cache, []
    for group in cache.groups.values():
        pool = group.pool
        lines.append(
            f"pool {group.name}: {pool.free} free, {pool.cached} cached, {pool.referenced} referenced, "
            f"{pool.quarantined} quarantined of {pool.count}"
        )
        for block in range(pool.base, pool.base + pool.count):
            state, blocks = int(cache.blocks.state[block]), cache.blocks
            if state != FREE:
                indexed = ", indexed" if blocks.indexed[block] else ""
                count = f" by {blocks.refcount[block]}" if blocks.refcount[block] else ""
                lines.append(f"  block {block}: {BLOCK_STATES[state]}{count}{indexed}")
    s = cache.sequences
    for number, slot in s.slot_of.items():
        used = _list(s.blocks_of(slot))
        lines.append(
            f"{names.sequence_name(number)}: tokens {_list(s.text(slot))}; {s.computed[slot]} with KV; blocks {used}"
        )
    waiting = [names.request_name(request.id) for request in machine.admission.waiting]
    running = [names.request_name(int(s.request[slot])) for slot in np.flatnonzero(s.running).tolist()]
    lines.append(f"running: {' '.join(running) or '-'}; waiting: {' '.join(waiting) or '-'}")
    return lines
