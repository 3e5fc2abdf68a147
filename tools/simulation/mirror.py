"""A router's side of the KV events: vLLM's message types, and a mirror of each rank's prefix index."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvforge.coordinator.core.cache.blocks import KV
from kvforge.coordinator.core.cache.groups import Group
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.kv_events.format import salt_name
from kvforge.protocol.messages import GENERATED

# Fields and encodings of vllm/distributed/kv_events.py: arrays up to 0.23, maps after it.


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A batch of events of one rank, in vLLM's field order."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Base of the array-encoded events of vLLM up to 0.23."""


class BlockStored(KVCacheEvent):
    """Blocks that entered the index."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that left the index."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """All blocks left the index."""


class KVEventBatch(EventBatch):
    """A batch of array-encoded events."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class NamedEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the map-encoded events of vLLM after 0.23."""


class NamedStored(NamedEvent, tag="BlockStored"):
    """Blocks that entered the index, map-encoded."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class NamedRemoved(NamedEvent, tag="BlockRemoved"):
    """Blocks that left the index, map-encoded."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class NamedCleared(NamedEvent, tag="AllBlocksCleared"):
    """All blocks left the index, map-encoded."""


class NamedBatch(EventBatch):
    """A batch of map-encoded events."""

    events: list[NamedStored | NamedRemoved | NamedCleared]


DECODERS: dict[str, Any] = {"array": msgspec.msgpack.Decoder(KVEventBatch), "map": msgspec.msgpack.Decoder(NamedBatch)}


class Known(NamedTuple):
    """A router's entry for a block; `name` is that of the chain, None for the plain one."""

    parent: int | None
    tokens: tuple[int, ...]
    name: str | None


class Mirror:
    """Mirror of one coordinator's prefix indexes, built from its events, by rank and block hash.

    Asserts that the events are consistent.
    """

    def __init__(self, encoding: str = "array") -> None:
        self._decode = DECODERS[encoding].decode
        self.blocks: dict[int, dict[int, Known]] = {}

    def apply(self, payload: bytes) -> None:
        """Apply the next batch."""
        batch = self._decode(payload)
        assert batch.events, "a batch without events"
        assert batch.data_parallel_rank is not None
        held = self.blocks.setdefault(batch.data_parallel_rank, {})
        for event in batch.events:
            if isinstance(event, BlockStored | NamedStored):
                _store(held, event)
            elif isinstance(event, BlockRemoved | NamedRemoved):
                for value in event.block_hashes:
                    assert isinstance(value, int)
                    del held[value]
            else:
                held.clear()

    def check(self, machine: Machine, plain_tenant: str = "default") -> None:
        """Check that the mirror holds exactly the blocks that a prompt can hit."""
        plain = machine.cache.hasher.salt(f"tenant:{plain_tenant}")
        expected = {number: hittable(machine, group, plain) for number, group in machine.cache.groups.items()}
        held = {rank: own for rank, own in self.blocks.items() if own}
        assert held == {rank: own for rank, own in expected.items() if own}


def _store(held: dict[int, Known], event: BlockStored | NamedStored) -> None:
    size, above = event.block_size, event.parent_block_hash
    assert len(event.token_ids) == size * len(event.block_hashes)
    assert (event.lora_id is None) == (event.lora_name is None)
    for i, value in enumerate(event.block_hashes):
        assert isinstance(value, int) and value not in held, "stored twice"
        assert above is None or above in held, "stored before its parent"
        assert above is None or held[above].name == event.lora_name, "two chains in one"
        salted = event.extra_keys is not None and event.extra_keys[i] == (event.lora_name,)
        assert salted == (above is None and event.lora_name is not None)
        held[value] = Known(above, tuple(event.token_ids[i * size : (i + 1) * size]), event.lora_name)
        above = value


def hittable(machine: Machine, group: Group, plain_salt: int) -> dict[int, Known]:
    """Return every entry of a pool that a prompt can hit, found from the roots without the core's child index."""
    blocks, store, pool = machine.cache.blocks, machine.cache.store, group.pool
    region = slice(pool.base, pool.base + pool.count)
    ids = pool.base + (blocks.indexed[region] & (blocks.kind[region] == KV)).nonzero()[0]
    keys = (ids | blocks.generation[ids].astype(np.int64) << 32).tolist()
    contents = store.tokens[ids]
    of_prompts: list[bool] = np.all(contents < GENERATED, axis=1).tolist()
    rows = zip(keys, store.parent[ids].tolist(), store.hash[ids].tolist(), contents.tolist(), of_prompts, strict=True)
    after: dict[int, list[tuple[int, int, list[int]]]] = {}
    for key, above, value, tokens, of_prompt in rows:
        if of_prompt:
            after.setdefault(above, []).append((key, value, tokens))
    found: dict[int, Known] = {}
    left: list[tuple[int, int | None, str | None]] = [
        (root, None, None if -root - 1 == plain_salt else salt_name(-root - 1)) for root in after if root < 0
    ]
    while left:
        above, parent, name = left.pop()
        for key, value, tokens in after.get(above, ()):
            found[value] = Known(parent, tuple(tokens), name)
            left.append((key, value, name))
    return found
