"""What a client waits for from its coordinator, over one connection after the other, without any input or output.

Bytes come in through `receive`, the end of the connection through `lost` or, where another one is to take its place,
through `interrupt`; what must be sent comes back as messages. `Client` and `AsyncClient` are two shells around this.

Kept here:
- a command or request that has ended is forgotten by the session; whoever holds its Pending or Track keeps the data;
- `track.tokens[i]` is the token at offset `track.start + i`: a repeated row is ignored, a missing one ends that request
  with an error;
- a request that was accepted after its caller gave up is cancelled: nobody would read it. Not where the command had a
  key, or repeated an earlier one: then it can be asked for again;
- a stream that stopped because we read too slowly is taken up where it stopped, by an Attach of the session's own;
- a coordinator that knows the session's name goes on with it on a new connection: commands without an answer are sent
  again with their rids, and have the answer that was lost; streams are taken up where they stopped. One that has
  forgotten the session gets what may be done twice; for the rest the outcome is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvforge.protocol.codec import Decoder, InvalidMessage
from kvforge.protocol.errors import Conflict, CoordinatorUnavailable, KvforgeError, ProtocolError, restore
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    Accepted,
    Attach,
    Attached,
    Cancel,
    Done,
    Message,
    Refused,
    Stream,
    Welcome,
)

from .awaited import Pending, Track

NAME_BYTES = 16
SEEDS = 1 << 64
# Fewer than the answers that a coordinator keeps for a client by default: what is sent again is not done again.
UNANSWERED_MAX = 1000
NO_OFFSET = 1 << 32  # larger than any


class Session:
    """Who waits for what, and what has come for them.

    name: by which the coordinator knows this client on its next connection. welcome: None: there is no connection.
    interrupted: it was lost, and what is kept here is waiting for the next one.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.name = os.urandom(NAME_BYTES).hex()
        self.boot = ""
        self.welcome: Welcome | None = None
        self.interrupted = False
        self._decoder = Decoder(CLIENT_REPLIES)
        self._pending: dict[int, Pending] = {}
        # A request has several only where it was attached to again, from an earlier offset.
        self._tracks: dict[int, list[Track]] = {}
        # Requests whose stream is to start anew, and the command that asks for it. What comes before its answer is old.
        self._resuming: dict[int, int] = {}
        # The offset where a stream starts anew, until the token there has come. What comes before that is old.
        self._due: dict[int, int] = {}
        # For streams that began anew: the offset after what has come since.
        self._anew: dict[int, int] = {}
        self._last_rid = 0

    @property
    def running(self) -> tuple[int, ...]:
        """The ids of requests whose end has not come yet."""
        return tuple(self._tracks)

    def new_rid(self) -> int:
        """A number that no command of this session has had."""
        self._last_rid += 1
        return self._last_rid

    def tracked(self, request_id: int, offset: int) -> Track | None:
        """The stream of a request that runs, where this session has it from `offset` or earlier."""
        return next((track for track in self._tracks.get(request_id, ()) if track.start <= offset), None)

    def has_room(self, rid: int) -> bool:
        """Whether the command `rid` may be sent: not too many before it have no answer yet."""
        return rid - next(iter(self._pending), rid) < UNANSWERED_MAX

    def expect(self, rid: int, expects: type[Message], what: str, count: int = 1) -> Pending:
        """Registers the command `rid`, about to be sent; `what` names it in errors. count: the requests it starts."""
        pending = self._pending[rid] = Pending(rid, expects, what, count)
        return pending

    def forget(self, pending: Pending) -> list[Message]:
        """Nobody waits for this command any more. Requests it started, or will still start, are cancelled.

        Those that were there before it stay, and so do those of a command with a key: whoever repeats it gets them.
        Returns what must be sent because of it.
        """
        if pending.keyed:
            return []  # its answer is still expected, and makes the requests known as ours
        if pending.expects is Accepted and pending.sent is not None and not pending.done:
            pending.abandoned = True  # to be asked for again, where its answer is lost: else it would run for nobody
            return []
        self._pending.pop(pending.rid, None)
        if not isinstance(pending.reply, Accepted) or pending.reply.repeated:
            return []
        return self.cancel(track.request_id for track in pending.tracks if not track.done)

    def receive(self, frames: Sequence[bytes | memoryview]) -> list[Message]:
        """Takes in one message; returns what must be sent because of it.

        Raises ProtocolError if it is not a message a coordinator may send: then the connection is of no use.
        """
        try:
            message = self._decoder.decode(frames)
        except InvalidMessage as error:
            raise ProtocolError(str(error)) from None
        if isinstance(message, Stream):
            return self._stream(message)
        return self._reply(message)

    def interrupt(self) -> None:
        """The connection has ended, and another one will be tried: whatever waits goes on waiting."""
        self.welcome = None
        self.interrupted = True
        for of_streams in (self._resuming, self._due, self._anew):
            of_streams.clear()
        for pending in tuple(self._pending.values()):
            if pending.resumes or pending.expects is Welcome:
                del self._pending[pending.rid]
        for request_id, tracks in tuple(self._tracks.items()):
            for track in tracks:
                track.settle()
            if all(track.done for track in tracks):  # noting that was broken off
                self._drop(request_id)

    def lost(self, error: KvforgeError) -> None:
        """There is no connection any more: everything that still waits fails with `error`. Tokens received stay."""
        self.welcome = None
        self.interrupted = False
        # What the coordinator keeps for the old name is wanted no more: it ends with its lease.
        self.name = os.urandom(NAME_BYTES).hex()
        waiting = list(self._pending.values())
        self._pending.clear()
        self._resuming.clear()
        for pending in waiting:
            pending.error = error
            pending.wake()
        for request_id in tuple(self._tracks):
            self._fail(request_id, error)

    def _reply(self, message: Message) -> list[Message]:
        rid: int = getattr(message, "rid", -1)
        if rid == 0 and isinstance(message, Refused) and self._pending:
            # The coordinator could not read which command it refuses. It answers in order, so it means the oldest.
            rid = next(iter(self._pending))
        pending = self._pending.get(rid)
        if pending is None:
            return self._late(message)
        replies: list[Message] = []
        if isinstance(message, Refused):
            pending.error = restore(message.error.code, message.error.message, message.error.fields)
        elif not isinstance(message, pending.expects):
            got = type(message).__name__
            pending.error = ProtocolError(f"the coordinator answered {pending.what} with {got}")
        else:
            replies = self._answer(pending, message)
        if pending.error is not None and pending.resumes:
            self._resuming.pop(pending.resumes, None)
            self._fail(pending.resumes, pending.error)
        pending.wake()
        self._pending.pop(rid, None)
        return replies

    def _late(self, message: Message) -> list[Message]:
        """The answer to a command that nobody waits for."""
        if isinstance(message, Accepted) and not message.repeated:
            return self.cancel(range(message.request_id, message.request_id + message.count))
        if isinstance(message, Attached):
            return self._moved(message.request_id, message.offset, message.rid)
        return []

    def _answer(self, pending: Pending, message: Message) -> list[Message]:
        """The answer that a command expected."""
        if isinstance(message, Accepted):
            return self._accepted(pending, message)
        pending.reply = message
        if isinstance(message, Welcome):
            return self._welcomed(message)
        if not isinstance(message, Attached):
            return []
        if not pending.resumes:
            pending.tracks = (self._track(message.request_id, message.seed, message.offset),)
        if pending.resent:  # what came after the answer that was lost is lost too
            return [self._resume(message.request_id)]
        return self._moved(message.request_id, message.offset, message.rid)

    def _welcomed(self, message: Welcome) -> list[Message]:
        """A connection begins. What is to be sent on it before anything else: commands in their order, then streams."""
        self.welcome, self.boot = message, message.boot
        self.interrupted = False
        messages: list[Message] = []
        for pending in tuple(self._pending.values()):
            if pending.sent is None:  # whoever makes it will send it
                continue
            if message.resumed or pending.repeatable:
                pending.resent = True
                messages.append(pending.sent)
                continue
            del self._pending[pending.rid]
            pending.error = _unknown_outcome(pending.what, self.endpoint)
            pending.wake()
        return messages + [self._resume(request_id, ours=message.resumed) for request_id in self._tracks]

    def _accepted(self, pending: Pending, message: Accepted) -> list[Message]:
        if pending.abandoned:
            return self._late(message)
        ids = range(message.request_id, message.request_id + message.count)
        if message.count != pending.count:
            problem = f"started {message.count} requests for a {pending.what} of {pending.count}"
            pending.error = ProtocolError(f"the coordinator {problem}; is it a kvforge of another version?")
            return [] if message.repeated else self.cancel(ids)
        pending.reply = message
        pending.tracks = tuple(self._track(id_, (message.seed + i) % SEEDS, 0) for i, id_ in enumerate(ids))
        if pending.resent and not message.repeated:  # tokens may have been sent to the connection that was lost
            return [self._resume(request_id) for request_id in ids]
        for request_id in ids if message.repeated else ():
            self._moved(request_id, 0, message.rid)
        return []

    def _track(self, request_id: int, seed: int, start: int) -> Track:
        """The track that holds a request from `start` on: one that is there, else a new one."""
        track = self.tracked(request_id, start)
        if track is None:
            track = Track(request_id, seed, start)
            self._tracks.setdefault(request_id, []).append(track)
        return track

    def _moved(self, request_id: int, offset: int, rid: int) -> list[Message]:
        """The command `rid` made a stream start anew at `offset`; moved back where a track lacks tokens before that."""
        if self._resuming.get(request_id) == rid:
            del self._resuming[request_id]
        if request_id not in self._tracks:
            return []
        self._due[request_id] = self._anew[request_id] = offset
        behind = any(track.reach < offset for track in self._tracks[request_id])
        return [self._resume(request_id)] if behind else []

    def _resume(self, request_id: int, *, ours: bool = True) -> Message:
        """Asks for the stream of a request from the first token on that one of its tracks lacks.

        ours: the coordinator knows that this client reads it, so that another one who has taken it meanwhile keeps it.
        """
        rid = self.new_rid()
        self._pending[rid] = Pending(rid, Attached, "Attach", resumes=request_id)
        self._resuming[request_id] = rid
        self._due[request_id] = NO_OFFSET
        offset = min(track.reach for track in self._tracks[request_id])
        return Attach(rid=rid, request_id=request_id, offset=offset, resume=ours)

    def cancel(self, request_ids: Iterable[int]) -> list[Message]:
        """The commands that end requests. Nobody waits for their answers, but they are sent until they have them."""
        commands = [Cancel(rid=self.new_rid(), request_id=request_id) for request_id in request_ids]
        for command in commands:
            self.expect(command.rid, Done, "Cancel").sent = command
        return list(commands)

    def _fail(self, request_id: int, error: KvforgeError) -> None:
        """Whoever reads this request gets `error` after what has come."""
        for track in self._tracks.get(request_id, ()):
            track.error = error
            track.wake()
        self._drop(request_id)

    def _drop(self, request_id: int) -> None:
        """Nothing more is expected of this request."""
        self._due.pop(request_id, None)
        self._anew.pop(request_id, None)
        self._tracks.pop(request_id, None)

    def _stream(self, message: Stream) -> list[Message]:
        # This comes first, since rows in the same message may be later than those that were lost.
        paused = [id_ for id_ in message.paused if id_ in self._tracks and id_ not in self._resuming]
        replies = [self._resume(request_id) for request_id in paused]
        touched: dict[Track, None] = {}
        replies += self._rows(message, touched)
        for ended in message.ended:
            if ended.request_id in self._resuming:
                continue
            anew = self._anew.get(ended.request_id)
            for track in self._tracks.get(ended.request_id, ()):
                track.end(ended, anew)
                touched[track] = None
            self._drop(ended.request_id)
        for track in touched:
            track.wake()
        for request_id in message.taken:
            if request_id not in self._resuming:
                problem = f"request {request_id} is read by another connection now"
                self._fail(request_id, Conflict(f"{problem}; attach again to take it back"))
        return replies

    def _rows(self, message: Stream, touched: dict[Track, None]) -> list[Message]:
        """Takes in the tokens, and notes whose they are; returns what must be sent because some are missing."""
        columns = (message.request_ids, message.offsets, message.tokens, message.logprobs)
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            raise ProtocolError(f"stream: its columns have different lengths {sorted(lengths)}")
        broken: list[Message] = []
        tracks_of, due_of, anew_of = self._tracks, self._due, self._anew
        rows = zip(*(column.tolist() for column in columns), _tops(message), strict=True)
        for request_id, offset, token_id, logprob, top in rows:
            if due_of and (due := due_of.get(request_id)) is not None:
                if offset != due:
                    continue
                del due_of[request_id]
            if anew_of and anew_of.get(request_id) == offset:
                anew_of[request_id] = offset + 1
            # Without a track it is no longer ours: we gave up on it, or found it broken.
            for track in tracks_of.get(request_id, ()):
                tokens = track.tokens
                reach = track.start + len(tokens)
                if offset == reach:
                    tokens.append(token_id)
                    track.logprobs.append(logprob)
                    track.tops.append(top)
                    touched[track] = None
                elif not 0 <= offset < reach:  # not a row that came twice
                    broken += self._break(track, f"token {reach} was due and token {offset} came")
        return broken

    def _break(self, track: Track, problem: str) -> list[Message]:
        # A new list, since the caller iterates over the old one.
        left = [other for other in self._tracks[track.request_id] if other is not track]
        if left:
            self._tracks[track.request_id] = left
        else:
            self._drop(track.request_id)
        track.error = track.gap(problem)
        track.wake()
        return self.cancel((track.request_id,))


def _unknown_outcome(what: str, endpoint: str) -> CoordinatorUnavailable:
    """The error of a command that may have been done, or not."""
    problem = f"the connection to {endpoint} was lost before {what} was answered, and the coordinator has forgotten us"
    hints = {
        "Submit": "it was perhaps accepted, and then ends with its lease; with a key the same call can be made again",
        "Append": "ask for the sequence's length before you append again",
    }
    hint = hints.get(what, "look at what it was to change before you make the call again")
    return CoordinatorUnavailable(f"{problem}: whether it was done is not known; {hint}")


def _tops(message: Stream) -> list[tuple[tuple[int, float], ...]]:
    """For each row of a stream its most likely tokens. Raises ProtocolError where the columns do not fit."""
    rows, counts = len(message.tokens), message.top_counts
    if not len(counts) and not len(message.top_tokens) and not len(message.top_logprobs):
        return [()] * rows
    total = int(counts.sum(dtype="int64"))
    lengths = {total, len(message.top_tokens), len(message.top_logprobs)}
    if len(counts) != rows or min(counts.tolist(), default=0) < 0 or len(lengths) > 1:
        raise ProtocolError(f"stream: its top columns have lengths {len(counts)} and {sorted(lengths)}")
    pairs = list(zip(message.top_tokens.tolist(), message.top_logprobs.tolist(), strict=True))
    ends = counts.cumsum().tolist()
    return [tuple(pairs[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)]
