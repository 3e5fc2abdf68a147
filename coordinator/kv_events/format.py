"""Encoding of prefix index changes in the format of vLLM's event stream (`vllm/distributed/kv_events.py`).

A batch is a MessagePack array: time in Unix seconds, events, data-parallel rank. An event has one of two encodings of
the same fields. "array", a tag and values in order, is that of vLLM up to 0.23. "map", a tag under `type` and values by
name, is that of later versions (vllm-project/vllm#42892; recorded batches of 0.26). vLLM has a prefix index for each
data-parallel rank; here each pool has one, and its number is the rank.

Blocks of a salted chain carry a name for their salt in the fields of an adapter (`lora_name`, `lora_id`), because every
router distinguishes these, and in `extra_keys` of a first block, where vLLM has a cache salt. The name is a keyed hash
and does not reveal the salt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from ..core.cache.changes import Change, Cleared, Removed, Stored

BATCH_BLOCKS_MAX = 1024
MEDIUM = "GPU"  # vLLM's name for the engine's own memory, also on a CPU
LORA_IDS = (1 << 31) - 1
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
# By tag: the fields in order, and how many trailing ones a map omits if they are None.
FIELDS: dict[str, tuple[tuple[str, ...], int]] = {
    STORED: (
        (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
        4,
    ),
    REMOVED: (("block_hashes", "medium", "group_idx"), 1),
    CLEARED: ((), 0),
}
Values = tuple[Any, ...]
Packed = Callable[[str, Values], Any]


def as_array(tag: str, values: Values) -> list[Any]:
    """Return an event as an array; missing trailing values are None."""
    return [tag, *values, *[None] * (len(FIELDS[tag][0]) - len(values))]


def as_map(tag: str, values: Values) -> dict[str, Any]:
    """Return an event as a map."""
    names, optional = FIELDS[tag]
    must = len(names) - optional
    given = zip(names, values, strict=False)
    return {"type": tag} | {name: value for i, (name, value) in enumerate(given) if i < must or value is not None}


PACKED: dict[str, Packed] = {"array": as_array, "map": as_map}


class Format:
    """Encodes batches. Chains with `plain_salt` carry no name."""

    def __init__(self, encoding: str, plain_salt: int) -> None:
        self._packed, self._plain_salt = PACKED[encoding], plain_salt
        self._encoder = msgspec.msgpack.Encoder()

    def batches(self, changes: Iterable[Change], at_s: float) -> Iterator[bytes]:
        """Encode the changes in order, in batches of one pool and a bounded number of blocks."""
        events: list[Any] = []
        pool, blocks = -1, 0
        for change in _cut(_joined(changes)):
            count = 0 if isinstance(change, Cleared) else len(change.hashes)
            if events and (change.pool != pool or blocks + count > BATCH_BLOCKS_MAX):
                yield self._encoder.encode([at_s, events, pool])
                events, blocks = [], 0
            pool, blocks = change.pool, blocks + count
            events.append(self._event(change))
        if events:
            yield self._encoder.encode([at_s, events, pool])

    def _event(self, change: Change) -> Any:
        if isinstance(change, Cleared):
            return self._packed(CLEARED, ())
        hashes = change.hashes
        if isinstance(change, Removed):
            return self._packed(REMOVED, (hashes, MEDIUM))
        parent, salt, tokens = change.parent, change.salt, change.tokens
        size = len(tokens) // len(hashes)
        if salt == self._plain_salt:
            return self._packed(STORED, (hashes, parent, tokens, size, None, MEDIUM, None))
        name = salt_name(salt)
        extra = [[name], *[None] * (len(hashes) - 1)] if parent is None else None
        return self._packed(STORED, (hashes, parent, tokens, size, salt % LORA_IDS + 1, MEDIUM, name, extra))


def salt_name(salt: int) -> str:
    """Return the name that distinguishes the blocks of a salted chain."""
    return f"kvforge-salt-{salt:016x}"


def _joined(changes: Iterable[Change]) -> Iterator[Change]:
    """Merge consecutive removals, which come one block at a time."""
    run: list[Removed] = []
    for change in changes:
        if run and not (isinstance(change, Removed) and change.pool == run[0].pool):
            yield _one(run)
            run = []
        if isinstance(change, Removed):
            run.append(change)
        else:
            yield change
    if run:
        yield _one(run)


def _one(run: list[Removed]) -> Removed:
    return run[0] if len(run) == 1 else Removed(run[0].pool, [h for one in run for h in one.hashes])


def _cut(changes: Iterable[Change]) -> Iterator[Change]:
    """Split events so that each has a bounded number of blocks."""
    for change in changes:
        if isinstance(change, Cleared) or len(change.hashes) <= BATCH_BLOCKS_MAX:
            yield change
            continue
        for first in range(0, len(change.hashes), BATCH_BLOCKS_MAX):
            part = slice(first, first + BATCH_BLOCKS_MAX)
            if isinstance(change, Removed):
                yield Removed(change.pool, change.hashes[part])
            else:
                parent = change.hashes[first - 1] if first else change.parent
                size = len(change.tokens) // len(change.hashes)
                tokens = change.tokens[part.start * size : part.stop * size]
                yield Stored(change.pool, change.salt, parent, change.hashes[part], tokens)
