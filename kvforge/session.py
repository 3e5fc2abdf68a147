"""The state of one connection to a coordinator, without any input or output.

Bytes come in through `receive`, the end of the connection through `lost`; what must be sent comes back as messages.
`Client` and `AsyncClient` are two shells around this. Two kinds of thing can be waited for: a `Pending` (the answer to
one command, found by its `rid`) and a `Track` (the tokens of one request, found by its `request_id`).

Kept here:
- a command or request that has ended is forgotten by the session; whoever holds its Pending or Track keeps the data;
- `track.tokens[i]` is the token at offset i: a repeated row is ignored, a missing one ends that request with an error;
- a request that was accepted after its caller gave up is cancelled: nobody would read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from protocol.codec import Decoder, InvalidMessage
from protocol.errors import DeadlineExceeded, InternalError, KvforgeError, ProtocolError, restore
from protocol.messages import (
    CLIENT_REPLIES,
    Accepted,
    Cancel,
    Ended,
    Message,
    Refused,
    Stream,
    Welcome,
)

M = TypeVar("M", bound=Message)


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
    """One command on its way. Done when it has a reply or an error; `track` is the request it started."""

    __slots__ = ("error", "expects", "reply", "rid", "track", "what")

    def __init__(self, rid: int, expects: type[Message], what: str) -> None:
        super().__init__()
        self.rid = rid
        self.expects = expects
        self.what = what
        self.reply: Message | None = None
        self.track: Track | None = None
        self.error: KvforgeError | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None

    def take(self, expects: type[M]) -> M:
        """The reply, which must be an `expects`. Raises the error that came instead."""
        if self.error is not None:
            raise again(self.error)
        assert isinstance(self.reply, expects), "taken before it was done, or expected as something else"
        return self.reply


class Track(Watched):
    """The stream of one request, kept from its first token. logprobs are in nats.

    tops: for each token the most likely ones at its place, as (token id, log-probability); empty unless asked for.
    """

    __slots__ = ("ended", "error", "logprobs", "request_id", "seed", "tokens", "tops")

    def __init__(self, request_id: int, seed: int) -> None:
        super().__init__()
        self.request_id = request_id
        self.seed = seed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[tuple[tuple[int, float], ...]] = []
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None or self.error is not None

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
        self._tracks: dict[int, Track] = {}
        self._last_rid = 0

    @property
    def running(self) -> tuple[int, ...]:
        """The ids of requests whose end has not come yet."""
        return tuple(self._tracks)

    def new_rid(self) -> int:
        """A number that no command of this session has had."""
        self._last_rid += 1
        return self._last_rid

    def expect(self, rid: int, expects: type[Message], what: str) -> Pending:
        """Registers the command `rid`, about to be sent; `what` names it in errors."""
        pending = self._pending[rid] = Pending(rid, expects, what)
        return pending

    def forget(self, pending: Pending) -> list[Message]:
        """Nobody waits for this command any more. A request it started, or will still start, is cancelled.

        Returns what must be sent because of it.
        """
        self._pending.pop(pending.rid, None)
        if pending.track is None or pending.track.done:
            return []
        return [Cancel(rid=self.new_rid(), request_id=pending.track.request_id)]

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
        streams = list(self._tracks.values())
        self._pending.clear()
        self._tracks.clear()
        for pending in waiting:
            pending.error = error
            pending.wake()
        for track in streams:
            track.error = error
            track.wake()

    def _reply(self, message: Message) -> list[Message]:
        rid: int = getattr(message, "rid", -1)
        if rid == 0 and isinstance(message, Refused) and self._pending:
            # The coordinator could not read which command it refuses. It answers in order: the oldest is meant.
            rid = next(iter(self._pending))
        pending = self._pending.pop(rid, None)
        if pending is None:
            if isinstance(message, Accepted):
                return [Cancel(rid=self.new_rid(), request_id=message.request_id)]
            return []
        if isinstance(message, Refused):
            pending.error = restore(message.error.code, message.error.message, message.error.fields)
        elif not isinstance(message, pending.expects):
            got = type(message).__name__
            pending.error = ProtocolError(f"the coordinator answered {pending.what} with {got}")
        else:
            pending.reply = message
            if isinstance(message, Accepted):
                track = Track(message.request_id, message.seed)
                self._tracks[track.request_id] = pending.track = track
            elif isinstance(message, Welcome):
                self.welcome, self.boot = message, message.boot
        pending.wake()
        return []

    def _stream(self, message: Stream) -> list[Message]:
        columns = (message.request_ids, message.offsets, message.tokens, message.logprobs)
        lengths = {len(column) for column in columns}
        if len(lengths) > 1:
            raise ProtocolError(f"stream: its columns have different lengths {sorted(lengths)}")
        touched: dict[int, Track] = {}
        broken: list[Message] = []
        rows = zip(*(column.tolist() for column in columns), _tops(message), strict=True)
        for request_id, offset, token_id, logprob, top in rows:
            track = self._tracks.get(request_id)
            # Not ours any more (we gave up on it, or found it broken), or a row that came twice.
            if track is None or 0 <= offset < len(track.tokens):
                continue
            if offset != len(track.tokens):
                broken.append(self._gap(track, f"token {len(track.tokens)} was due and token {offset} came"))
                continue
            track.tokens.append(token_id)
            track.logprobs.append(logprob)
            track.tops.append(top)
            touched[request_id] = track
        for ended in message.ended:
            track = self._tracks.pop(ended.request_id, None)
            if track is None:
                continue
            touched[ended.request_id] = track
            if ended.cut_tokens < 0 or ended.generated_tokens + ended.cut_tokens != len(track.tokens):
                problem = f"it ended after {ended.generated_tokens} tokens and {len(track.tokens)} came"
                track.error = ProtocolError(f"the stream of request {track.request_id} has a gap: {problem}")
            else:
                for column in (track.tokens, track.logprobs, track.tops):
                    del column[ended.generated_tokens :]
                track.ended = ended
        for track in touched.values():
            track.wake()
        return broken

    def _gap(self, track: Track, problem: str) -> Message:
        del self._tracks[track.request_id]
        track.error = ProtocolError(f"the stream of request {track.request_id} has a gap: {problem}")
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
