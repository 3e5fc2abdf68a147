"""The state of one connection to a coordinator, without any input or output.

Bytes come in through `receive`, the end of the connection through `lost`; what must be sent comes back as messages.
`Client` and `AsyncClient` are two shells around this. Two kinds of thing can be waited for: a `Pending` (the answer to
one command, found by its `rid`) and a `Track` (the tokens of one request, found by its `request_id`).

Kept here:
- a command or request that has ended is forgotten by the session; whoever holds its Pending or Track keeps the data;
- `track.tokens[i]` is the token at offset `track.start + i`: a repeated row is ignored, a missing one ends that request
  with an error;
- a request that was accepted after its caller gave up is cancelled: nobody would read it. Not where the command had a
  key, or repeated an earlier one: then it can be asked for again;
- a stream that stopped because we read too slowly is taken up where it stopped, by an Attach of the session's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvforge.protocol.codec import Decoder, InvalidMessage
from kvforge.protocol.errors import Conflict, DeadlineExceeded, InternalError, KvforgeError, ProtocolError, restore
from kvforge.protocol.messages import (
    CLIENT_REPLIES,
    Accepted,
    Attach,
    Attached,
    Cancel,
    Ended,
    Message,
    Refused,
    Stream,
    Welcome,
)

M = TypeVar("M", bound=Message)
SEEDS = 1 << 64
NO_OFFSET = 1 << 32  # larger than any


def again(error: KvforgeError) -> KvforgeError:
    """A new exception equal to `error`, so that raising it twice does not pile up tracebacks on one object."""
    return restore(error.code, error.message, error.fields)


class Watched:
    """Something that callers wait for; each registers a function that is called whenever it changes."""

    __slots__ = ("wakers",)

    def __init__(self) -> None:
        self.wakers: set[Callable[[], None]] = set()

    def wake(self) -> None:
        """Calls every registered function."""
        for waker in tuple(self.wakers):
            waker()


class Pending(Watched):
    """One command on its way. Done when it has a reply or an error; `tracks` are the requests it started or reads.

    count: how many requests it starts. keyed: it was sent with a key, so that it can be asked for again. resumes: the
    request whose stream it takes up again, where the session itself sent it; else 0.
    """

    __slots__ = ("count", "error", "expects", "keyed", "reply", "resumes", "rid", "tracks", "what")

    def __init__(self, rid: int, expects: type[Message], what: str, count: int = 1, resumes: int = 0) -> None:
        super().__init__()
        self.rid = rid
        self.expects = expects
        self.what = what
        self.count = count
        self.keyed = False
        self.resumes = resumes
        self.reply: Message | None = None
        self.tracks: tuple[Track, ...] = ()
        self.error: KvforgeError | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    def answer(self, expects: type[M]) -> M:
        """The reply, which must be an `expects`. Raises the error that came instead."""
        if self.error is not None:
            raise again(self.error)
        assert isinstance(self.reply, expects), "asked for before it was done, or as something else"
        return self.reply


class Track(Watched):
    """The stream of one request, kept from its token `start` on. logprobs are in nats.

    tops: for each token the most likely ones at its place, as (token id, log-probability); empty unless asked for.
    kept: it goes on though nobody here reads it any more. readers: who does now.
    """

    __slots__ = ("ended", "error", "kept", "logprobs", "readers", "request_id", "seed", "start", "tokens", "tops")

    def __init__(self, request_id: int, seed: int, start: int = 0) -> None:
        super().__init__()
        self.request_id = request_id
        self.seed = seed
        self.start = start
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[tuple[int, float], ...]] = []
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        self.kept = True
        self.readers = 0

    @property
    def done(self) -> bool:
        return self.ended is not None or self.error is not None

    @property
    def reach(self) -> int:
        """The offset of the token that is due next."""
        return self.start + len(self.tokens)

    def end(self, ended: Ended, anew: int | None = None) -> None:
        """The request has ended: with what the coordinator says, or with an error where its tokens did not all come.

        anew: up to where a stream came that began anew; None: it did not. What is taken back by then is not in it.
        """
        streamed = ended.generated_tokens + ended.cut_tokens
        # A track that starts behind the last token has no tokens, and lacks none.
        whole = max(streamed, self.start) == self.reach or (anew == streamed and streamed < self.reach)
        if ended.cut_tokens < 0 or not whole:
            self.error = self.gap(f"it ended after {ended.generated_tokens} tokens and {self.reach} came")
            return
        for column in (self.tokens, self.logprobs, self.tops):
            del column[max(0, ended.generated_tokens - self.start) :]
        self.ended = ended

    def gap(self, problem: str) -> ProtocolError:
        """What is wrong with this stream."""
        return ProtocolError(f"the stream of request {self.request_id} has a gap: {problem}")

    def failure(self) -> KvforgeError | None:
        """The error this request ended with; None while it runs, or when it ended well or was cancelled."""
        if self.error is not None:
            return again(self.error)
        if self.ended is None:
            return None
        if self.ended.error is not None and self.ended.reason != "cancelled":
            info = self.ended.error
            return restore(info.code, info.message, info.fields)
        if self.ended.reason == "failed":
            return InternalError(f"request {self.request_id} failed; the coordinator did not say why")
        if self.ended.reason == "expired":
            return DeadlineExceeded(f"request {self.request_id} ran out of time in the coordinator")
        return None


class Session:
    """One connection: who waits for what, and what has come for them."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.boot = ""
        self.welcome: Welcome | None = None
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

    def lost(self, error: KvforgeError) -> None:
        """The connection has ended: everything that still waits on it fails with `error`. Tokens received stay."""
        self.welcome = None
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
        pending = self._pending.pop(rid, None)
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
            self.welcome, self.boot = message, message.boot
        if not isinstance(message, Attached):
            return []
        if not pending.resumes:
            pending.tracks = (self._track(message.request_id, message.seed, message.offset),)
        return self._moved(message.request_id, message.offset, message.rid)

    def _accepted(self, pending: Pending, message: Accepted) -> list[Message]:
        ids = range(message.request_id, message.request_id + message.count)
        if message.count != pending.count:
            problem = f"started {message.count} requests for a {pending.what} of {pending.count}"
            pending.error = ProtocolError(f"the coordinator {problem}; is it a kvforge of another version?")
            return [] if message.repeated else self.cancel(ids)
        pending.reply = message
        pending.tracks = tuple(self._track(id_, (message.seed + i) % SEEDS, 0) for i, id_ in enumerate(ids))
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

    def _resume(self, request_id: int) -> Message:
        """Asks for the stream of a request from the first token on that one of its tracks lacks."""
        rid = self.new_rid()
        self._pending[rid] = Pending(rid, Attached, "Attach", resumes=request_id)
        self._resuming[request_id] = rid
        self._due[request_id] = NO_OFFSET
        offset = min(track.reach for track in self._tracks[request_id])
        return Attach(rid=rid, request_id=request_id, offset=offset, resume=True)

    def cancel(self, request_ids: Iterable[int]) -> list[Message]:
        """The commands that end requests; nobody waits for their answers."""
        return [Cancel(rid=self.new_rid(), request_id=request_id) for request_id in request_ids]

    def _fail(self, request_id: int, error: KvforgeError) -> None:
        """Whoever reads this request gets `error` after what has come."""
        for track in self._drop(request_id):
            track.error = error
            track.wake()

    def _drop(self, request_id: int) -> list[Track]:
        """Nothing more is expected of this request; returns who read it."""
        self._due.pop(request_id, None)
        self._anew.pop(request_id, None)
        return self._tracks.pop(request_id, [])

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
            for track in self._drop(ended.request_id):
                track.end(ended, anew)
                touched[track] = None
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
        rows = zip(*(column.tolist() for column in columns), _tops(message), strict=True)
        for request_id, offset, token_id, logprob, top in rows:
            if (due := self._due.get(request_id)) is not None:
                if offset != due:
                    continue
                del self._due[request_id]
            if self._anew.get(request_id) == offset:
                self._anew[request_id] = offset + 1
            # Without a track it is no longer ours: we gave up on it, or found it broken.
            for track in self._tracks.get(request_id, ()):
                if 0 <= offset < track.reach:  # a row that came twice
                    continue
                if offset != track.reach:
                    broken.append(self._break(track, f"token {track.reach} was due and token {offset} came"))
                    continue
                track.tokens.append(token_id)
                track.logprobs.append(logprob)
                track.tops.append(top)
                touched[track] = None
        return broken

    def _break(self, track: Track, problem: str) -> Message:
        # A new list, since the caller iterates over the old one.
        left = [other for other in self._tracks[track.request_id] if other is not track]
        if left:
            self._tracks[track.request_id] = left
        else:
            self._drop(track.request_id)
        track.error = track.gap(problem)
        track.wake()
        return Cancel(rid=self.new_rid(), request_id=track.request_id)


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
