"""Sequences and blocks of the cache as a client sees them. Every operation is written once, as a `Command`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from protocol.errors import InvalidRequest
from protocol.messages import (
    Append,
    Appended,
    BlockCount,
    BlockInfo,
    CreateSequence,
    Explain,
    Explanation,
    Fork,
    Forked,
    GetBlock,
    GetSequence,
    GetTokens,
    Message,
    Purged,
    PurgeFinished,
    RefBlock,
    Removed,
    RemoveSequences,
    SequenceInfo,
    SequenceTokens,
    UnrefBlock,
)

from .arguments import token_array

T = TypeVar("T")
TTL_S_MAX = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """A handle of a sequence that the coordinator keeps. Equal handles are the same sequence."""

    id: int
    tenant: str = "default"


SequenceRef = CachedSequence | int


@dataclass(frozen=True)
class Command(Generic[T]):
    """One message to send, the reply that answers it, and what the caller gets of it."""

    build: Callable[[int], Message]
    reply: type[Message]
    result: Callable[[Any], T]


def sequence_id(sequence: SequenceRef, field: str = "sequence") -> int:
    """The id behind a handle. Raises InvalidRequest."""
    value = sequence.id if isinstance(sequence, CachedSequence) else sequence
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 < value < 1 << 63:
        raise InvalidRequest(field, f"is {sequence!r}; it must be a sequence or its id")
    return int(value)


def create(
    tokens: Sequence[int] | np.ndarray[Any, Any], tenant: str, salt: str, idle_ttl_s: float
) -> Command[CachedSequence]:
    """A new sequence; may be empty."""
    if isinstance(idle_ttl_s, bool) or not isinstance(idle_ttl_s, int | float) or not math.isfinite(idle_ttl_s):
        raise InvalidRequest("idle_ttl_s", f"is {idle_ttl_s!r}; it must be a number of seconds")
    if not 0 <= idle_ttl_s <= TTL_S_MAX:
        raise InvalidRequest("idle_ttl_s", f"is {idle_ttl_s}; it must be 0 (until the connection ends) to {TTL_S_MAX}")
    ids = token_array("tokens", tokens, empty=True)
    ttl_ms = math.ceil(idle_ttl_s * 1000)
    return Command(
        lambda rid: CreateSequence(rid=rid, tenant=tenant, salt=salt, idle_ttl_ms=ttl_ms, tokens=ids),
        SequenceInfo,
        lambda info: CachedSequence(info.sequence_id, info.tenant),
    )


def append(
    sequences: SequenceRef | Iterable[SequenceRef], tokens: Sequence[int] | Sequence[Sequence[int]]
) -> Command[tuple[int, ...]]:
    """Appends to one sequence or to each of several; the result is their lengths."""
    if isinstance(sequences, CachedSequence | int):
        sequences, lists = [sequences], [tokens]
    else:
        sequences, lists = list(sequences), list(tokens)  # type: ignore[arg-type]
    if len(lists) != len(sequences):
        raise InvalidRequest("tokens", f"has {len(lists)} lists for {len(sequences)} sequences")
    arrays = [token_array("tokens", one) for one in lists]
    ids = np.array([sequence_id(sequence, "sequences") for sequence in sequences], np.int64)
    counts = np.array([array.size for array in arrays], np.int32)
    flat = np.concatenate([np.zeros(0, np.int32), *arrays])
    return Command(
        lambda rid: Append(rid=rid, sequence_ids=ids, counts=counts, tokens=flat),
        Appended,
        lambda reply: tuple(reply.lengths.tolist()),
    )


def fork(sequence: SequenceRef, count: int) -> Command[tuple[CachedSequence, ...]]:
    """More sequences over the same blocks."""
    parent = sequence_id(sequence)
    tenant = sequence.tenant if isinstance(sequence, CachedSequence) else "default"
    return Command(
        lambda rid: Fork(rid=rid, sequence_id=parent, count=count),
        Forked,
        lambda reply: tuple(CachedSequence(child, tenant) for child in reply.sequence_ids.tolist()),
    )


def info(sequence: SequenceRef) -> Command[SequenceInfo]:
    """What is known of a sequence."""
    wanted = sequence_id(sequence)
    return Command(lambda rid: GetSequence(rid=rid, sequence_id=wanted), SequenceInfo, _itself)


def tokens(sequence: SequenceRef) -> Command[tuple[int, ...]]:
    """The tokens of a sequence."""
    wanted = sequence_id(sequence)
    return Command(
        lambda rid: GetTokens(rid=rid, sequence_id=wanted), SequenceTokens, lambda reply: tuple(reply.tokens.tolist())
    )


def remove(sequences: SequenceRef | Iterable[SequenceRef]) -> Command[int]:
    """Removes sequences; the result is how many blocks came back."""
    several = [sequences] if isinstance(sequences, CachedSequence | int) else list(sequences)
    ids = np.array([sequence_id(sequence, "sequences") for sequence in several], np.int64)
    return Command(
        lambda rid: RemoveSequences(rid=rid, sequence_ids=ids), Removed, lambda reply: int(reply.freed_blocks)
    )


def block(block_id: int) -> Command[BlockInfo]:
    """One block and its holders."""
    return Command(lambda rid: GetBlock(rid=rid, block_id=block_id), BlockInfo, _itself)


def ref(block_id: int, holder: str, generation: int | None, tenant: str) -> Command[BlockCount]:
    """One more holder."""
    wanted = -1 if generation is None else generation

    def build(rid: int) -> RefBlock:
        return RefBlock(rid=rid, block_id=block_id, holder=holder, generation=wanted, tenant=tenant)

    return Command(build, BlockCount, _itself)


def unref(block_id: int, holder: str, generation: int | None) -> Command[BlockCount]:
    """One holder less."""
    wanted = -1 if generation is None else generation
    return Command(
        lambda rid: UnrefBlock(rid=rid, block_id=block_id, holder=holder, generation=wanted), BlockCount, _itself
    )


def explain(
    block: int | None, request: int | None, sequence: SequenceRef | None, tenant: str | None
) -> Command[Explanation]:
    """Why, of exactly one subject."""
    if sum(subject is not None for subject in (block, request, sequence, tenant)) != 1:
        raise InvalidRequest("subject", "give exactly one of block=, request=, sequence=, tenant=")
    about = sequence_id(sequence) if sequence is not None else -1
    return Command(
        lambda rid: Explain(
            rid=rid,
            block_id=-1 if block is None else block,
            request_id=-1 if request is None else request,
            sequence_id=about,
            tenant=tenant or "",
        ),
        Explanation,
        _itself,
    )


def purge_finished(older_than_s: float) -> Command[int]:
    """Forgets requests that ended at least so long ago."""
    older_ms = math.floor(older_than_s * 1000)
    return Command(lambda rid: PurgeFinished(rid=rid, older_than_ms=older_ms), Purged, lambda reply: int(reply.count))


def _itself(reply: Any) -> Any:
    return reply
