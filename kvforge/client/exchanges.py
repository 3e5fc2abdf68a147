"""The calls of a client that are one message and its reply, each written once as an `Exchange`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from kvforge.protocol.errors import BlockNotFound, InvalidRequest
from kvforge.protocol.messages import (
    Append,
    Appended,
    BlockCount,
    BlockInfo,
    Cancel,
    CreateSequence,
    Done,
    Drain,
    Explain,
    Explanation,
    FindPrefix,
    FinishAt,
    Fork,
    Forked,
    GetBlock,
    GetHealth,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Health,
    KeepSequence,
    ListRequests,
    Message,
    PrefixFound,
    Purged,
    PurgeFinished,
    RefBlock,
    Removed,
    RemoveSequences,
    RequestInfo,
    RequestList,
    Rewind,
    SequenceInfo,
    SequenceTokens,
    Stats,
    TenantWiped,
    UnrefBlock,
    WipeTenant,
)

from .arguments import milliseconds, request_number, token_array
from .sequences import CachedSequence, SequenceRef, sequence_id
from .values import INT32_MAX, INT64_MAX, flag, number, whole

T = TypeVar("T")
TTL_S_MAX = 30 * 24 * 3600


@dataclass(frozen=True)
class Exchange(Generic[T]):
    """One message to send, the type of its reply, and the conversion of the reply to the caller's result."""

    build: Callable[[int], Message]
    reply: type[Message]
    result: Callable[[Any], T]


def create(
    tokens: Sequence[int] | np.ndarray[Any, Any], tenant: str, cache_salt: str, idle_ttl_s: float
) -> Exchange[CachedSequence]:
    """Return the exchange that creates a sequence, which may be empty."""
    ids = token_array("tokens", tokens, empty=True)
    ttl_ms = math.ceil(number("idle_ttl_s", idle_ttl_s, 0, TTL_S_MAX, "0 (until the connection ends)") * 1000)
    return Exchange(
        lambda rid: CreateSequence(rid=rid, tenant=tenant, salt=cache_salt, idle_ttl_ms=ttl_ms, tokens=ids),
        SequenceInfo,
        lambda info: CachedSequence(info.sequence_id, info.tenant),
    )


def append(
    sequences: SequenceRef | Iterable[SequenceRef], tokens: Sequence[int] | Sequence[Sequence[int]]
) -> Exchange[tuple[int, ...]]:
    """Return the exchange that appends to one sequence or to each of several; its result is their lengths."""
    several = _several(sequences)
    lists: list[Any] = [tokens] if several is None else list(tokens)
    refs = [sequences] if several is None else several
    if len(lists) != len(refs):
        raise InvalidRequest("tokens", f"has {len(lists)} lists for {len(refs)} sequences")
    arrays = [token_array("tokens", one) for one in lists]
    ids = np.array([sequence_id(ref, "sequences") for ref in refs], np.int64)
    counts = np.array([array.size for array in arrays], np.int32)
    flat = np.concatenate([np.zeros(0, np.int32), *arrays])
    return Exchange(
        lambda rid: Append(rid=rid, sequence_ids=ids, counts=counts, tokens=flat),
        Appended,
        lambda reply: tuple(reply.lengths.tolist()),
    )


def fork(sequence: SequenceRef, count: int) -> Exchange[tuple[CachedSequence, ...]]:
    """Return the exchange that creates sequences over the same blocks."""
    parent, children = sequence_id(sequence), whole("count", count, 1, INT32_MAX)
    tenant = sequence.tenant if isinstance(sequence, CachedSequence) else "default"
    return Exchange(
        lambda rid: Fork(rid=rid, sequence_id=parent, count=children),
        Forked,
        lambda reply: tuple(CachedSequence(child, tenant) for child in reply.sequence_ids.tolist()),
    )


def rewind(sequence: SequenceRef, length: int) -> Exchange[SequenceInfo]:
    """Return the exchange that cuts a sequence off behind its first `length` tokens."""
    wanted, tokens_left = sequence_id(sequence), whole("length", length, 0, INT32_MAX)
    return Exchange(lambda rid: Rewind(rid=rid, sequence_id=wanted, length=tokens_left), SequenceInfo, _itself)


def keep(sequence: SequenceRef, idle_ttl_s: float) -> Exchange[SequenceInfo]:
    """Return the exchange that sets the time to live of a sequence."""
    wanted = sequence_id(sequence)
    ttl_ms = math.ceil(number("idle_ttl_s", idle_ttl_s, 0, TTL_S_MAX) * 1000)
    if not ttl_ms:
        raise InvalidRequest("idle_ttl_s", f"is 0; it must be above 0 and at most {TTL_S_MAX} s")
    return Exchange(lambda rid: KeepSequence(rid=rid, sequence_id=wanted, idle_ttl_ms=ttl_ms), SequenceInfo, _itself)


def info(sequence: SequenceRef) -> Exchange[SequenceInfo]:
    """Return the exchange that describes a sequence."""
    wanted = sequence_id(sequence)
    return Exchange(lambda rid: GetSequence(rid=rid, sequence_id=wanted), SequenceInfo, _itself)


def tokens(sequence: SequenceRef) -> Exchange[tuple[int, ...]]:
    """Return the exchange that reads the tokens of a sequence."""
    wanted = sequence_id(sequence)
    return Exchange(
        lambda rid: GetTokens(rid=rid, sequence_id=wanted), SequenceTokens, lambda reply: tuple(reply.tokens.tolist())
    )


def remove(sequences: SequenceRef | Iterable[SequenceRef]) -> Exchange[int]:
    """Return the exchange that removes sequences; its result is the number of freed blocks."""
    several = _several(sequences)
    ids = np.array([sequence_id(ref, "sequences") for ref in ([sequences] if several is None else several)], np.int64)
    return Exchange(
        lambda rid: RemoveSequences(rid=rid, sequence_ids=ids), Removed, lambda reply: int(reply.freed_blocks)
    )


def block(block_id: int) -> Exchange[BlockInfo]:
    """Return the exchange that describes a block and its holders."""
    wanted = block_number(block_id)
    return Exchange(lambda rid: GetBlock(rid=rid, block_id=wanted), BlockInfo, _itself)


def ref(block_id: int, holder: str, generation: int | None, tenant: str) -> Exchange[BlockCount]:
    """Return the exchange that adds a holder to a block."""
    held, known = block_number(block_id), _generation(generation)

    def build(rid: int) -> RefBlock:
        return RefBlock(rid=rid, block_id=held, holder=holder, generation=known, tenant=tenant)

    return Exchange(build, BlockCount, _itself)


def unref(block_id: int, holder: str, generation: int | None) -> Exchange[BlockCount]:
    """Return the exchange that removes a holder from a block."""
    held, known = block_number(block_id), _generation(generation)
    return Exchange(
        lambda rid: UnrefBlock(rid=rid, block_id=held, holder=holder, generation=known), BlockCount, _itself
    )


def explain(
    block: int | None, request: int | None, sequence: SequenceRef | None, tenant: str | None
) -> Exchange[Explanation]:
    """Return the exchange that explains the state of exactly one subject."""
    if sum(subject is not None for subject in (block, request, sequence, tenant)) != 1:
        raise InvalidRequest("subject", "give exactly one of block=, request=, sequence=, tenant=")
    message = Explain(
        rid=0,
        block_id=-1 if block is None else block_number(block, "block"),
        request_id=-1 if request is None else request_number(request, "request"),
        sequence_id=-1 if sequence is None else sequence_id(sequence),
        tenant=tenant or "",
    )
    return Exchange(lambda rid: msgspec.structs.replace(message, rid=rid), Explanation, _itself)


def purge_finished(older_than_s: float) -> Exchange[int]:
    """Return the exchange that forgets requests that ended at least so long ago."""
    older_ms = math.floor(number("older_than_s", older_than_s, 0, TTL_S_MAX) * 1000)
    return Exchange(lambda rid: PurgeFinished(rid=rid, older_than_ms=older_ms), Purged, lambda reply: int(reply.count))


def cancel(request_id: int) -> Exchange[None]:
    """Return the exchange that cancels a request."""
    wanted = request_number(request_id)
    return Exchange(lambda rid: Cancel(rid=rid, request_id=wanted), Done, lambda _: None)


def finish_at(request_id: int, tokens: int) -> Exchange[None]:
    """Return the exchange that ends a request after its first `tokens` tokens."""
    return Exchange(lambda rid: FinishAt(rid=rid, request_id=request_id, tokens=tokens), Done, lambda _: None)


def status(request_id: int, with_tokens: bool) -> Exchange[RequestInfo]:
    """Return the exchange that describes a request."""
    wanted, tokens_too = request_number(request_id), flag("with_tokens", with_tokens)
    return Exchange(lambda rid: GetRequest(rid=rid, request_id=wanted, with_tokens=tokens_too), RequestInfo, _itself)


def requests(count_max: int) -> Exchange[RequestList]:
    """Return the exchange that lists the newest requests."""
    most = whole("count_max", count_max, 1, INT32_MAX)
    return Exchange(lambda rid: ListRequests(rid=rid, count_max=most), RequestList, _itself)


def stats() -> Exchange[Stats]:
    """Return the exchange that reads counters and gauges."""
    return Exchange(lambda rid: GetStats(rid=rid), Stats, _itself)


def health() -> Exchange[Health]:
    """Return the exchange that reads the health of the service and of its workers."""
    return Exchange(lambda rid: GetHealth(rid=rid), Health, _itself)


def find_prefix(
    prompt: Sequence[int] | np.ndarray[Any, Any], tenant: str, cache_salt: str, idempotency_key: str
) -> Exchange[PrefixFound]:
    """Return the exchange that looks up the cached prefix and the load for a prompt."""
    ids = token_array("prompt", prompt)
    return Exchange(
        lambda rid: FindPrefix(rid=rid, tenant=tenant, salt=cache_salt, key=idempotency_key, prompt=ids),
        PrefixFound,
        _itself,
    )


def drain(deadline_s: float | None) -> Exchange[None]:
    """Return the exchange that stops admission."""
    deadline_ms = milliseconds("deadline_s", deadline_s)
    return Exchange(lambda rid: Drain(rid=rid, deadline_ms=deadline_ms), Done, lambda _: None)


def wipe_tenant(tenant: str) -> Exchange[TenantWiped]:
    """Return the exchange that removes what the cache has of a tenant."""
    return Exchange(lambda rid: WipeTenant(rid=rid, tenant=tenant), TenantWiped, _itself)


def block_number(block_id: object, field: str = "block_id") -> int:
    """Check the id of a block.

    Raises:
        InvalidRequest: Names `field`.
        BlockNotFound: The id is negative, so that no block has it.
    """
    integer = whole(field, block_id, -INT32_MAX, INT32_MAX)
    if integer < 0:
        raise BlockNotFound(integer)  # as for any unknown id; on the wire, -1 would mean "none"
    return integer


def _several(sequences: object) -> list[Any] | None:
    """Return the sequences of a collection as a list; None for a single value."""
    return list(sequences) if isinstance(sequences, Iterable) and not isinstance(sequences, str | bytes) else None


def _generation(generation: object) -> int:
    """Return the generation on the wire; -1 means the current one."""
    return -1 if generation is None else whole("generation", generation, 0, INT64_MAX)


def _itself(reply: Any) -> Any:
    return reply
