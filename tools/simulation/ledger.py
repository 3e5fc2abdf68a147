"""The ledger of the simulation: the promises so far, against which every message is checked.

It sees every reply when the core gives it, every Stream when it is sent (both decoded from their bytes), and every end
of a request when it happens. Requests are checked against their oracle, client sequences against a list of tokens. The
ledger takes two data from the core: the length where a request continues a sequence on which another request was cut
short (`prompt_sizes`), and whether a kept sequence that a prompt names is still there (`continued_is_there`).
`stream_checker` tracks the readers of requests, `due_times` the due times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvforge.coordinator.core.events import ClientGone, FromClient
from kvforge.coordinator.core.requests.request import Request
from kvforge.protocol.messages import (
    GENERATED,
    Accepted,
    Appended,
    Attached,
    Cancel,
    CreateSequence,
    Drain,
    FinishAt,
    Fork,
    Forked,
    Message,
    Refused,
    Removed,
    RemoveSequences,
    RequestInfo,
    Rewind,
    SequenceInfo,
    SequenceTokens,
    Stats,
    Stream,
    Submit,
    TenantWiped,
)
from tools.simulation.due_times import DueTimes
from tools.simulation.isolation import Isolation
from tools.simulation.model import Oracle, tops_of
from tools.simulation.presence import Presence
from tools.simulation.settings import Settings
from tools.simulation.stream_checker import BookedRequest, StreamChecker
from tools.simulation.workers import Violation

SEVERAL = -1  # more than one request had the prefix


class BookedSequence:
    """A client sequence.

    Attributes:
        tokens: as workers see them.
        request_id: the last request on it that is not yet accounted for.
    """

    def __init__(self, client: int, tokens: list[int], ttl: bool, tenant: str, salt: str) -> None:
        self.client, self.tokens, self.ttl, self.tenant, self.salt = client, tokens, ttl, tenant, salt
        self.request_id = 0
        self.removed = self.forked = False

    def __deepcopy__(self, _memo: dict[int, Any]) -> BookedSequence:
        """Copy shallowly: attributes are never changed in place."""
        copied = object.__new__(BookedSequence)
        copied.__dict__.update(self.__dict__)
        return copied


class BookedKey:
    """The command of an idempotency key: all its fields, and the ids that it got."""

    def __init__(self, command: Submit, first: int) -> None:
        self.fields, self.ids = fields_of(command), range(first, first + command.count)


def fields_of(command: Submit) -> tuple[Any, ...]:
    """Return all fields of a command except its number."""
    apart = ("rid", "prompt", "continues", "keep_ms", "pins", "ahead")
    fields = [name for name in command.__struct_fields__ if name not in apart]
    return (*(getattr(command, name) for name in fields), command.prompt.tobytes())


def _ids(tokens: list[int]) -> list[int]:
    """Return the tokens without the marks of generated ones."""
    return [token % GENERATED for token in tokens]


class Ledger:
    """All promises so far; `known` returns whether the core still knows a request id."""

    def __init__(self, settings: Settings, known: Callable[[int], Request | None]) -> None:
        self._settings, self._known = settings, known
        self.requests: dict[int, BookedRequest] = {}
        self.live: dict[int, BookedRequest] = {}
        self.stream_checker = StreamChecker(self.requests)
        self.presence = Presence(settings)
        self.due_times = DueTimes(settings, self.live, known)
        self.keys: dict[tuple[str, str], BookedKey] = {}
        self.sequences: dict[int, BookedSequence] = {}
        self.isolation = Isolation(settings, known, self.sequences)
        self.accepted = self.ended = self.refused = 0
        self.hopeless: set[int] = set()  # rows that were seen to be stuck
        self.gone_clients: set[int] = set()
        self.model_known = False
        self.prompt_sizes: dict[int, int] = {}
        self.continued_is_there = False
        self.prefixes: dict[str, dict[int, int]] = {}

    # --------------------------------------------------------------------------------------------------------- replies

    def replied(self, client: int, command: Message, reply: Message, now_us: int) -> None:
        """Check the coordinator's reply to `command` of `client`."""
        if self.presence.answered_before(client, command, reply):
            if isinstance(reply, Accepted):
                self._repeated(client, reply)
            return
        if isinstance(reply, Accepted):
            self._accepted(client, command, reply, now_us)
            return
        book = _BOOKS.get(type(reply))
        if book is not None:
            book(self, client, command, reply)

    def _accepted(self, client: int, command: Any, reply: Accepted, now_us: int) -> None:
        if not isinstance(command, Submit) or reply.count != command.count:
            raise Violation(f"accepted {reply.count} requests for {command!r}")
        ids = range(reply.request_id, reply.request_id + reply.count)
        sequence = self.sequences.get(command.sequence_id)
        tenant = command.tenant if sequence is None else sequence.tenant
        self._check_key(tenant, command, reply, ids)
        if reply.repeated:
            self._repeated(client, reply)
            return
        if self.due_times.draining:
            raise Violation("a request was accepted while draining")
        salt = sequence.salt if sequence is not None else f"by name {command.salt}" if command.salt else tenant
        prompt = self._prompt(command, sequence, reply, salt)
        for i, request_id in enumerate(ids):
            self._book(request_id, client, command, (reply.seed + i) % (1 << 64), prompt, salt, now_us)
        booked = self.requests[reply.request_id]
        booked.scores = command.sampling.prompt_logprobs
        booked.at = self.stream_checker.first_offset(reply.request_id)

    def _repeated(self, client: int, reply: Accepted) -> None:
        """Expect the streams of a repeated command from their beginning."""
        for request_id in range(reply.request_id, reply.request_id + reply.count):
            if self._known(request_id) is None:
                self.stream_checker.forgotten(request_id, client)
            else:
                self.stream_checker.give(request_id, client, self.stream_checker.first_offset(request_id))

    def _check_key(self, tenant: str, command: Submit, reply: Accepted, ids: range) -> None:
        """Check that a known key returns its previous ids, and only for an equal command."""
        entry = self.keys.get((tenant, command.key)) if command.key else None
        if entry is not None and any(self._known(request_id) for request_id in entry.ids):
            if not reply.repeated or ids != entry.ids or fields_of(command) != entry.fields:
                raise Violation(f"key {command.key!r} stands for {entry.ids}; {command!r} -> {reply!r}")
        elif reply.repeated:
            raise Violation(f"{command!r} was new, but the reply is marked as repeated: {reply!r}")
        elif command.key:
            self.keys[tenant, command.key] = BookedKey(command, reply.request_id)

    def _prompt(self, command: Submit, sequence: BookedSequence | None, reply: Accepted, salt: str) -> list[int]:
        """Return the tokens that the request starts from, its sequence included, as workers see them."""
        prompt: list[int] = command.prompt.tolist()
        earlier = self.sequences.get(command.continues) if self.continued_is_there else None
        if earlier is not None and (earlier.tenant, earlier.salt) == (command.tenant, salt):
            for position, (token, mine) in enumerate(zip(earlier.tokens, prompt, strict=False)):
                if token % GENERATED != mine:
                    break
                prompt[position] = token
        if sequence is not None:
            self._account(sequence, self.prompt_sizes[reply.request_id] - len(prompt))
            sequence.tokens = prompt = sequence.tokens + prompt
            sequence.request_id, sequence.forked = reply.request_id, False
        return prompt

    def _book(
        self, request_id: int, client: int, command: Submit, seed: int, prompt: list[int], salt: str, now_us: int
    ) -> None:
        if request_id in self.requests:
            raise Violation(f"request id {request_id} was given twice")
        stops = command.sampling.stop_tokens + (() if command.sampling.ignore_eos else self._settings.eos)
        oracle = Oracle(prompt, seed, command.max_tokens, stops, self._settings.vocabulary, self._settings.mark)
        booked = BookedRequest(client, oracle, command.sequence_id, command.detached, salt)
        booked.early = not self.model_known
        booked.tops = command.sampling.logprobs
        booked.keeps, booked.ahead = command.keep_ms > 0, command.ahead
        if len({each.ahead for each in self.live.values()}) > 1:
            raise Violation(f"request {request_id} was accepted beside requests of the other class")
        self.requests[request_id] = self.live[request_id] = booked
        self.due_times.accepted(request_id, booked, command, now_us)
        prefixes = self.prefixes.setdefault(salt, {})
        for fingerprint in oracle.fingerprints:
            prefixes[fingerprint] = request_id if fingerprint not in prefixes else SEVERAL
        self.accepted += 1

    def _attached(self, client: int, _command: Any, reply: Attached) -> None:
        self.stream_checker.give(reply.request_id, client, reply.offset)

    def _refused(self, client: int, command: Any, reply: Refused) -> None:
        self.refused += 1
        if reply.error.code in ("error", "internal_error"):
            raise Violation(f"{command!r} was refused with {reply.error!r}")
        if reply.error.code == "key_reused":
            self._reused(command)
        if reply.error.code == "sequence_not_found":
            sequence = self.sequences.get(int(reply.error.fields.get("sequence_id", 0) or 0))
            hidden = sequence is not None and self.isolation.hides(client, sequence.tenant)
            if sequence is not None and not (sequence.removed or sequence.ttl or hidden or self._gone(sequence)):
                raise Violation(f"{command!r}: an existing sequence is not found")

    def _reused(self, command: Submit) -> None:
        sequence = self.sequences.get(command.sequence_id)
        entry = self.keys.get((command.tenant if sequence is None else sequence.tenant, command.key))
        known = entry is not None and any(self._known(request_id) for request_id in entry.ids)
        if entry is None or not known or entry.fields == fields_of(command):
            raise Violation(f"{command!r} was refused: its key belongs to another command")

    def _gone(self, sequence: BookedSequence) -> bool:
        return sequence.client in self.gone_clients

    def _requestinfo(self, _client: int, _command: Any, reply: RequestInfo) -> None:
        booked = self.requests[reply.request_id]
        oracle = booked.oracle
        if reply.prompt_tokens != len(oracle.prompt):
            raise Violation(f"request {reply.request_id} has a different prompt than submitted")
        self._compare(reply.request_id, oracle, 0, reply.tokens.tolist())
        if reply.generated_tokens < booked.seen - booked.cut:
            raise Violation(f"request {reply.request_id} has fewer tokens than were streamed")

    def _stats(self, client: int, _command: Any, reply: Stats) -> None:
        if self.isolation.restricts(client):
            return  # statistics are restricted to one tenant
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
            booked = BookedSequence(client, command.tokens.tolist(), command.idle_ttl_ms > 0, command.tenant, salt)
            self.sequences[reply.sequence_id] = booked
        sequence = self.sequences[reply.sequence_id]
        if isinstance(command, Rewind):
            self._rewound(sequence, command.length)
        if not reply.request_id:
            self._account(sequence, reply.length)
            if reply.length != len(sequence.tokens):
                raise Violation(f"sequence {reply.sequence_id}: length {reply.length}, expected {len(sequence.tokens)}")

    def _rewound(self, sequence: BookedSequence, length: int) -> None:
        """Cut a sequence off, in what its last request generated or before."""
        request = self.requests.get(sequence.request_id)
        if request is not None and length > len(sequence.tokens):
            self._account(sequence, length)
        sequence.tokens, sequence.request_id = sequence.tokens[:length], 0

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
            raise Violation("wrong number of forks")
        for sequence_id in reply.sequence_ids.tolist():
            if sequence_id in self.sequences:
                raise Violation(f"sequence id {sequence_id} was given twice")
            child = BookedSequence(client, list(parent.tokens), parent.ttl, parent.tenant, parent.salt)
            child.request_id, child.forked = parent.request_id, True
            self.sequences[sequence_id] = child

    def _sequencetokens(self, _client: int, command: Any, reply: SequenceTokens) -> None:
        sequence = self.sequences[command.sequence_id]
        found = reply.tokens.tolist()
        request = self.requests.get(sequence.request_id)
        if request is not None and not request.reason and not sequence.forked:  # it may be running
            text = _ids(request.oracle.prompt + request.oracle.kept)
            if found != text[: len(found)] or len(found) < len(sequence.tokens):
                raise Violation(f"sequence {command.sequence_id} has different tokens than its request generated")
            return
        self._account(sequence, len(found))
        if found != _ids(sequence.tokens):
            raise Violation(f"sequence {command.sequence_id} holds {found}, expected {_ids(sequence.tokens)}")

    def _removed(self, _client: int, command: Any, _reply: Removed) -> None:
        assert isinstance(command, RemoveSequences)
        for sequence_id in command.sequence_ids.tolist():
            if sequence_id in self.sequences:  # pins are not booked: no reply names them
                self.sequences[sequence_id].removed = True

    def _tenantwiped(self, _client: int, command: Any, reply: TenantWiped) -> None:
        for sequence in self.sequences.values():
            running = sequence.request_id in self.live and not sequence.forked  # a fork has its parent's request
            if sequence.tenant == command.tenant and not running:
                sequence.removed = True

    def _account(self, sequence: BookedSequence, length: int) -> None:
        """Append what the sequence's last request generated: the oracle's answer up to the length."""
        request = self.requests.get(sequence.request_id)
        if request is None:
            return
        oracle = request.oracle
        whole = oracle.prompt + oracle.kept[: oracle.answer_size]
        if not len(sequence.tokens) <= length <= len(whole):
            raise Violation(
                f"a sequence of {len(sequence.tokens)} tokens became {length} long after {len(whole)} tokens"
            )
        sequence.tokens = whole[:length]
        sequence.request_id = 0

    # ------------------------------------------------------------------------------------------------ streams and ends

    def streamed(self, client: int, stream: Stream, now_us: int, lost: bool = False) -> None:
        """Check a Stream: the oracle's tokens, each for its due reader, and each end once.

        Args:
            client: the receiver.
            stream: the message.
            now_us: the coordinator's time.
            lost: whether the client did not accept it.
        """
        ranks = stream.ranks.tolist() or [0] * stream.tokens.size
        columns = (stream.request_ids, stream.offsets, stream.tokens, stream.logprobs)
        rows = zip(*(column.tolist() for column in columns), ranks, strict=True)
        expected = []
        for request_id, offset, token, logprob, rank in rows:
            booked = self.requests[request_id]
            self.stream_checker.row(client, request_id, offset)
            if offset < 0:
                expected.append(self._compare_scored(request_id, booked, offset, (token, logprob, rank)))
                continue
            self._compare(request_id, booked.oracle, offset, [token])
            expected.append(tops_of(token, booked.tops, self._settings.vocabulary))
        self._compare_top_logprobs(stream, expected)
        self.stream_checker.news(client, stream, lost, now_us)

    def over(self, request: Request, now_us: int, cause: Any) -> None:
        """Check that a request ended as it should because of the event `cause`, with tokens of its oracle."""
        booked = self.live.pop(request.id)
        tokens, oracle = request.tokens.tolist(), booked.oracle
        self._compare(request.id, oracle, 0, tokens)
        message = cause.message if isinstance(cause, FromClient) else None
        if isinstance(message, FinishAt) and message.request_id == request.id:
            if (request.reason, len(tokens)) != ("stop", message.tokens):
                raise Violation(f"request {request.id} ended by {request.reason} at {len(tokens)}: {message!r}")
        elif request.reason in ("length", "stop"):
            if (request.reason, len(tokens)) != (oracle.reason, oracle.answer_size):
                raise Violation(f"request {request.id} ended by {request.reason} after {len(tokens)} tokens")
            if oracle.poisoned:
                raise Violation(f"request {request.id} was poisoned and finished")
            self._check_scores(request, booked)
        elif request.reason == "failed":
            self._failed(request, booked, now_us)
        elif request.reason == "expired":
            self.due_times.expired(request, booked, now_us)
        elif not self._cancelled(request, booked, now_us, cause):
            raise Violation(f"request {request.id} ended by {request.reason!r} without a cause: {cause!r}")
        if request.kept_id:
            self._kept(request, booked)
        booked.reason, booked.over_us, booked.generated = request.reason, now_us, len(tokens)
        booked.cut = request.cut
        self.ended += 1
        self.stream_checker.over(request.id)
        self._check_prefix(request, booked)

    def _kept(self, request: Request, booked: BookedRequest) -> None:
        """Book the sequence that a finished request left."""
        if not booked.keeps or request.reason not in ("length", "stop") or request.kept_id in self.sequences:
            raise Violation(f"request {request.id} ended by {request.reason} and left sequence {request.kept_id}")
        oracle, booked.kept_id = booked.oracle, request.kept_id
        tokens = oracle.prompt + oracle.kept[: request.tokens.size + request.cut]
        self.sequences[request.kept_id] = BookedSequence(0, tokens, True, request.tenant_name, booked.salt)

    def _check_prefix(self, request: Request, booked: BookedRequest) -> None:
        if request.cached_tokens and not booked.sequence_id:
            shared = self.prefixes[booked.salt][booked.oracle.fingerprint(request.cached_tokens)]
            if shared == request.id:
                raise Violation(
                    f"request {shared} hit {request.cached_tokens} tokens that no other request had under its salt"
                )

    def _failed(self, request: Request, booked: BookedRequest, now_us: int) -> None:
        """Check an accepted request's failure: a worker's error, too many worker crashes, or the end of a drain."""
        error: Any = request.error
        if error.code == "draining":
            allowed = self.due_times.drained(now_us)
        elif error.code in ("capacity_exceeded", "quota_exceeded") and request.id in self.hopeless:
            allowed = True
        # in a deadly world, only the deadly requests themselves may crash workers and fail
        elif error.code == "worker_error":
            crashes = "crashes" in error.fields
            allowed = booked.oracle.deadly if crashes else booked.oracle.poisoned or not self._settings.deadly
        else:
            allowed = booked.early
        if not allowed:
            raise Violation(f"request {request.id} was accepted and then failed: {error!r}")

    def _cancelled(self, request: Request, booked: BookedRequest, now_us: int, cause: Any) -> bool:
        """Return whether the end has a cause: a Cancel, the end of its sequence or client, or of its lease."""
        if request.reason != "cancelled":
            return False
        if isinstance(cause, FromClient):
            message = cause.message
            if isinstance(message, Submit) and not message.ahead:
                return booked.ahead
            if isinstance(message, RemoveSequences):
                return booked.sequence_id in message.sequence_ids.tolist()
            if isinstance(message, Drain):  # with a deadline: due times are checked
                return self.due_times.lease_over(booked, now_us)
            return isinstance(message, Cancel) and message.request_id == request.id
        if isinstance(cause, ClientGone):
            return self._ends_with(booked, {cause.client: cause.goodbye})
        return self._ends_with(booked, self.presence.leaving) or self.due_times.lease_over(booked, now_us)

    def _ends_with(self, booked: BookedRequest, leaving: dict[int, bool]) -> bool:
        """Return whether the request ends at once with these clients, which may have no lease."""
        sequence = self.sequences.get(booked.sequence_id)
        with_sequence = sequence is not None and sequence.client in leaving and not sequence.ttl
        at_once = not booked.detached and (leaving.get(booked.reader, False) or not self._settings.lease_us)
        return with_sequence or (booked.reader in leaving and at_once)

    def came(self, client: int, session: str) -> None:
        """Record a client's handshake."""
        if self.presence.came(client, session):
            self.stream_checker.away(client)

    def restarts(self, now_us: int) -> None:
        """Record that another process continues, without any connection."""
        self.stream_checker.forget()
        for client in self.presence.restarts(now_us):
            self.stream_checker.away(client)

    def left(self, now_us: int) -> None:
        """Drop the clients that were away for too long or cannot reconnect."""
        leaving, self.presence.leaving = self.presence.leaving, {}
        for client in sorted(leaving):
            self.client_gone(client, leaving[client], now_us)

    def connection_ended(self, client: int, goodbye: bool, now_us: int) -> None:
        """Record the end of a connection: the client may reconnect, or is gone."""
        if not goodbye and self.presence.left(client, now_us):
            self.stream_checker.away(client)
        else:
            self.client_gone(client, goodbye, now_us)

    def client_gone(self, client: int, goodbye: bool, now_us: int) -> None:
        """Record that a client is gone for good; its requests end unless another client keeps them."""
        self.gone_clients.add(client)
        self.presence.gone(client)
        self.stream_checker.gone(client)
        for request_id, booked in self.live.items():
            if booked.reader == client:
                if not booked.detached and (goodbye or not self._settings.lease_us):
                    raise Violation(f"request {request_id} outlives its client")
                self.due_times.orphaned(request_id, booked, now_us)

    def _compare_scored(
        self, request_id: int, booked: BookedRequest, offset: int, found: tuple[int, float, int]
    ) -> list[tuple[int, float]]:
        """Check the token, log-probability and rank of a row of a prompt, and return the top tokens that are due."""
        prompt = booked.oracle.prompt
        assert booked.scores is not None, "the reader's first offset is 0"
        logprob, rank, tops = booked.oracle.score(len(prompt) + offset, booked.scores, self._settings.vocabulary)
        if found != (prompt[offset], logprob, rank):
            raise Violation(
                f"request {request_id}: {found} at {offset}; the oracle says {(prompt[offset], logprob, rank)}"
            )
        return tops

    def _check_scores(self, request: Request, booked: BookedRequest) -> None:
        """Check that a finished request has all log-probabilities of its prompt."""
        record, positions = request.prompt_logprobs, range(1, len(booked.oracle.prompt))
        if record is None or booked.scores is None:
            if record is not None or booked.scores is not None:
                raise Violation(f"request {request.id} wants log-probabilities of its prompt, or has them unasked")
            return
        _, scored = record.known()
        due = [booked.oracle.score(position, booked.scores, self._settings.vocabulary) for position in positions]
        found = list(zip(scored.logprobs.tolist(), scored.ranks.tolist(), strict=True))
        if found != [(logprob, rank) for logprob, rank, _ in due]:
            raise Violation(f"request {request.id} finished with log-probabilities {found} of its prompt, not {due}")

    @staticmethod
    def _compare_top_logprobs(stream: Stream, expected: list[list[tuple[int, float]]]) -> None:
        pairs = [pair for tops in expected for pair in tops]
        counts = stream.top_counts.tolist() or [0] * len(expected)
        found = list(zip(stream.top_tokens.tolist(), stream.top_logprobs.tolist(), strict=True))
        if counts != list(map(len, expected)) or found != pairs:
            raise Violation(f"top tokens are {found} by {counts}, expected {expected}: {stream!r}")

    def _compare(self, request_id: int, oracle: Oracle, offset: int, tokens: list[int]) -> None:
        expected = oracle.tokens[offset : offset + len(tokens)]
        if tokens != expected or offset + len(tokens) > oracle.answer_size:
            raise Violation(f"request {request_id} generated {tokens} at {offset}; the oracle says {expected}")


_BOOKS: dict[type[Message], Callable[[Ledger, int, Any, Any], None]] = {
    Attached: Ledger._attached,
    Refused: Ledger._refused,
    RequestInfo: Ledger._requestinfo,
    Stats: Ledger._stats,
    SequenceInfo: Ledger._sequenceinfo,
    Appended: Ledger._appended,
    Forked: Ledger._forked,
    SequenceTokens: Ledger._sequencetokens,
    Removed: Ledger._removed,
    TenantWiped: Ledger._tenantwiped,
}
