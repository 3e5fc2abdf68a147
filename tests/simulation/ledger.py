"""The books of the simulation: what was promised, and therefore what every message must say.

It sees every message the coordinator sends, decoded from its bytes, in the order of sending. Requests are held to their
oracle; client sequences to a plain list of tokens. The one thing it takes from the core is a length: where a request
continues a sequence on which another one was cut short (`prompt_sizes`).
"""

from __future__ import annotations

from typing import Any

from protocol.messages import (
    Accepted,
    Appended,
    CreateSequence,
    Fork,
    Forked,
    Message,
    Refused,
    Removed,
    RemoveSequences,
    RequestInfo,
    SequenceInfo,
    SequenceTokens,
    Stats,
    Stream,
    Submit,
)
from tests.simulation.model import Oracle
from tests.simulation.settings import Settings
from tests.simulation.workers import Violation

SEVERAL = -1  # more than one request had the prefix


class BookedRequest:
    """One accepted request, as its client saw it so far. early: it came before any model was known, and may fail."""

    def __init__(self, client: int, oracle: Oracle, stream: bool, sequence_id: int, salt: str) -> None:
        self.client, self.oracle, self.stream, self.sequence_id = client, oracle, stream, sequence_id
        self.salt = salt
        self.streamed = 0
        self.reason = ""
        self.early = False


class BookedSequence:
    """One client sequence. `request_id`: the last request that ran on it and is not yet accounted for."""

    def __init__(self, client: int, tokens: list[int], ttl: bool, salt: str) -> None:
        self.client, self.tokens, self.ttl, self.salt = client, tokens, ttl, salt
        self.request_id = 0
        self.removed = self.forked = False


class Ledger:
    """Everything that was promised so far."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.requests: dict[int, BookedRequest] = {}
        self.sequences: dict[int, BookedSequence] = {}
        self.accepted = self.ended = self.refused = 0
        self.gone_clients: set[int] = set()
        self.model_known = False
        self.prompt_sizes: dict[int, int] = {}
        self._prefixes: dict[str, dict[int, int]] = {}

    # --------------------------------------------------------------------------------------------------------- replies

    def replied(self, client: int, command: Message | None, reply: Message) -> None:
        """The coordinator answered `command` of `client`."""
        book = getattr(self, f"_{type(reply).__name__.lower()}", None)
        if book is not None:
            book(client, command, reply)

    def _accepted(self, client: int, command: Any, reply: Accepted) -> None:
        if not isinstance(command, Submit):
            raise Violation("accepted, but nothing was submitted")
        if reply.request_id in self.requests:
            raise Violation(f"request id {reply.request_id} was given twice")
        prompt = command.prompt.tolist()
        sequence = self.sequences.get(command.sequence_id)
        if sequence is not None:
            self._account(sequence, self.prompt_sizes[reply.request_id] - len(prompt))
            sequence.tokens = prompt = sequence.tokens + prompt
            sequence.request_id, sequence.forked = reply.request_id, False
        stops = command.sampling.stop_tokens + (() if command.sampling.ignore_eos else self._settings.eos)
        oracle = Oracle(prompt, reply.seed, command.max_tokens, stops, self._settings.vocabulary)
        salt = sequence.salt if sequence is not None else command.tenant
        booked = BookedRequest(client, oracle, command.stream, command.sequence_id, salt)
        booked.early = not self.model_known
        self.requests[reply.request_id] = booked
        prefixes = self._prefixes.setdefault(salt, {})
        for fingerprint in oracle.fingerprints:
            prefixes[fingerprint] = reply.request_id if fingerprint not in prefixes else SEVERAL
        self.accepted += 1

    def _refused(self, _client: int, command: Any, reply: Refused) -> None:
        self.refused += 1
        if reply.error.code in ("error", "internal_error"):
            raise Violation(f"{command!r} was refused with {reply.error!r}")
        if reply.error.code == "sequence_not_found":
            sequence = self.sequences.get(int(reply.error.fields.get("sequence_id", 0) or 0))
            if sequence is not None and not (sequence.removed or sequence.ttl) and not self._gone(sequence):
                raise Violation(f"{command!r}: a sequence that nobody removed is not found")

    def _gone(self, sequence: BookedSequence) -> bool:
        return sequence.client in self.gone_clients

    def _requestinfo(self, _client: int, _command: Any, reply: RequestInfo) -> None:
        booked = self.requests[reply.request_id]
        oracle = booked.oracle
        if reply.prompt_tokens != len(oracle.prompt):
            raise Violation(f"request {reply.request_id} has another prompt than was submitted")
        self._compare(reply.request_id, oracle, 0, reply.tokens.tolist())
        if reply.generated_tokens < booked.streamed:
            raise Violation(f"request {reply.request_id} has fewer tokens than were streamed")

    def _stats(self, _client: int, _command: Any, reply: Stats) -> None:
        for pool in reply.pools:
            if pool.free + pool.cached + pool.referenced + pool.quarantined != pool.blocks:
                raise Violation(f"statistics do not add up: {pool}")
            if pool.live_tokens > (pool.blocks - pool.free) * pool.block_size:
                raise Violation(f"more live tokens than the pool holds: {pool}")
        r = reply.requests
        ended = r.finished_total + r.failed_total + r.cancelled_total + r.expired_total
        if not r.accepted_total == ended + r.pending + r.running == self.accepted:
            raise Violation(f"requests do not add up to {self.accepted}: {r}")

    # ------------------------------------------------------------------------------------------------------ sequences

    def _sequenceinfo(self, client: int, command: Any, reply: SequenceInfo) -> None:
        if isinstance(command, CreateSequence):
            if reply.sequence_id in self.sequences:
                raise Violation(f"sequence id {reply.sequence_id} was given twice")
            salt = f"by name {command.salt}" if command.salt else command.tenant
            booked = BookedSequence(client, command.tokens.tolist(), command.idle_ttl_ms > 0, salt)
            self.sequences[reply.sequence_id] = booked
        sequence = self.sequences[reply.sequence_id]
        if not reply.request_id:
            self._account(sequence, reply.length)
            if reply.length != len(sequence.tokens):
                raise Violation(f"sequence {reply.sequence_id}: length {reply.length}, not {len(sequence.tokens)}")

    def _appended(self, _client: int, command: Any, reply: Appended) -> None:
        start = 0
        tokens = command.tokens.tolist()
        rows = zip(command.sequence_ids.tolist(), command.counts.tolist(), reply.lengths.tolist(), strict=True)
        for sequence_id, count, length in rows:
            sequence = self.sequences[sequence_id]
            self._account(sequence, length - count)
            sequence.tokens = sequence.tokens + tokens[start : start + count]
            start += count
            if len(sequence.tokens) != length:
                raise Violation(f"sequence {sequence_id}: length {length} after append, not {len(sequence.tokens)}")

    def _forked(self, client: int, command: Any, reply: Forked) -> None:
        assert isinstance(command, Fork)
        parent = self.sequences[command.sequence_id]
        if len(reply.sequence_ids) != command.count:
            raise Violation("another number of forks than asked for")
        for sequence_id in reply.sequence_ids.tolist():
            if sequence_id in self.sequences:
                raise Violation(f"sequence id {sequence_id} was given twice")
            child = BookedSequence(client, list(parent.tokens), parent.ttl, parent.salt)
            child.request_id, child.forked = parent.request_id, True
            self.sequences[sequence_id] = child

    def _sequencetokens(self, _client: int, command: Any, reply: SequenceTokens) -> None:
        sequence = self.sequences[command.sequence_id]
        found = reply.tokens.tolist()
        request = self.requests.get(sequence.request_id)
        if request is not None and not request.reason and not sequence.forked:  # it may be running
            text = request.oracle.prompt + request.oracle.tokens
            if found != text[: len(found)] or len(found) < len(sequence.tokens):
                raise Violation(f"sequence {command.sequence_id} holds other tokens than its request generated")
            return
        self._account(sequence, len(found))
        if found != sequence.tokens:
            raise Violation(f"sequence {command.sequence_id} holds {found}, not {sequence.tokens}")

    def _removed(self, _client: int, command: Any, _reply: Removed) -> None:
        assert isinstance(command, RemoveSequences)
        for sequence_id in command.sequence_ids.tolist():
            self.sequences[sequence_id].removed = True

    def _account(self, sequence: BookedSequence, length: int) -> None:
        """Adds what its last request generated: as much of the oracle's answer as the length says."""
        request = self.requests.get(sequence.request_id)
        if request is None:
            return
        oracle = request.oracle
        whole = oracle.prompt + oracle.tokens[: oracle.answer_size]
        if not len(sequence.tokens) <= length <= len(whole):
            raise Violation(f"a sequence of {len(sequence.tokens)} tokens became {length} long, by {len(whole)}")
        sequence.tokens = whole[:length]
        sequence.request_id = 0

    # -------------------------------------------------------------------------------------------------------- streams

    def streamed(self, client: int, stream: Stream) -> None:
        """Tokens and ends reached a client: consecutive offsets, the oracle's tokens, each end once."""
        rows = zip(stream.request_ids.tolist(), stream.offsets.tolist(), stream.tokens.tolist(), strict=True)
        for request_id, offset, token in rows:
            booked = self.requests[request_id]
            if booked.client != client or booked.reason:
                raise Violation(f"request {request_id} streams to another client, or after its end")
            if offset != booked.streamed:
                raise Violation(f"request {request_id}: offset {offset} was streamed after {booked.streamed - 1}")
            self._compare(request_id, booked.oracle, offset, [token])
            booked.streamed += 1
        for ended in stream.ended:
            self._end(client, ended)

    def _end(self, client: int, ended: Any) -> None:
        booked = self.requests[ended.request_id]
        if booked.client != client or booked.reason:
            raise Violation(f"request {ended.request_id} ended twice, or for another client")
        booked.reason = ended.reason
        self.ended += 1
        if ended.generated_tokens != booked.streamed:
            raise Violation(f"request {ended.request_id}: {ended.generated_tokens} tokens, {booked.streamed} streamed")
        oracle = booked.oracle
        if ended.cached_tokens and not booked.sequence_id:
            shared = self._prefixes[booked.salt][oracle.fingerprint(ended.cached_tokens)]
            if shared == ended.request_id:
                raise Violation(
                    f"request {shared} hit {ended.cached_tokens} tokens that nobody else had under its salt"
                )
        if ended.reason in ("length", "stop"):
            if (ended.reason, booked.streamed) != (oracle.reason, oracle.answer_size):
                raise Violation(f"request {ended.request_id} ended by {ended.reason} after {booked.streamed} tokens")
            if oracle.poisoned:
                raise Violation(f"request {ended.request_id} was poisoned and finished")
        elif ended.reason == "failed":
            if ended.error.code != "worker_error" and not booked.early:
                raise Violation(f"request {ended.request_id} was accepted and then failed: {ended.error}")
        elif ended.reason != "cancelled":
            raise Violation(f"request {ended.request_id} ended by {ended.reason!r}")

    def _compare(self, request_id: int, oracle: Oracle, offset: int, tokens: list[int]) -> None:
        expected = oracle.tokens[offset : offset + len(tokens)]
        if tokens != expected or offset + len(tokens) > oracle.answer_size:
            raise Violation(f"request {request_id} generated {tokens} at {offset}; the oracle says {expected}")
