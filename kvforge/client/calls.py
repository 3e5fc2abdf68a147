"""Every operation of a client, written once.

`Calls` holds the operations as coroutines that wait only in `_until`. The asyncio client awaits them; the blocking
client supplies an `_until` that blocks and runs each coroutine to its end at once (`client.drive`). So both clients
have the same behaviour, and neither uses a thread.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from kvforge.protocol import transport
from kvforge.protocol.errors import (
    AlreadyFinished,
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    KvforgeError,
    ProtocolError,
    QueueFull,
)
from kvforge.protocol.messages import (
    Accepted,
    Attach,
    Attached,
    Done,
    Drain,
    GetHealth,
    Health,
    Hello,
    Message,
    Submit,
    Welcome,
)

from .arguments import answer_count, milliseconds, prompt_array, request_number, stop_strings
from .exchanges import Command, SequenceRef, cancel, sequence_id
from .link import Link
from .options import RequestOptions
from .results import Completion, Finished, Token, finished, token_at
from .session import Pending, Session, Track, Watched
from .stop_text import StopText, TextCursor
from .tables import Tables
from .values import INT32_MAX, number, shown, whole

if TYPE_CHECKING:
    from kvforge.text.tokenizer import Tokenizer

M = TypeVar("M", bound=Message)
T = TypeVar("T")
H = TypeVar("H", bound="Handle")
Prompt = str | Sequence[dict[str, str]]

TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
STREAM_TIMEOUT_S = 600.0
READY_TIMEOUT_S = 120.0
READY_POLL_S = 0.1
READY_CONNECT_S = 0.5
RETRY_PAUSE_S = 0.05
MOMENT_S = 0.1


class Calls(ABC):
    """The operations of one client; see `kvforge.Client` for what each does."""

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None,
        *,
        timeout_s: float,
        connect_timeout_s: float,
        stream_timeout_s: float,
        tokenizer: str | os.PathLike[str] | None,
    ) -> None:
        self.endpoint = os.fspath(endpoint) if endpoint is not None else transport.default_client_endpoint()
        self.timeout_s = _seconds(timeout_s)
        self.stream_timeout_s = _seconds(stream_timeout_s, "stream_timeout_s")
        self._connect_timeout_s = _seconds(connect_timeout_s, "connect_timeout_s")
        self._pid = os.getpid()
        self._owner: dict[str, threading.Thread] = {}
        self._waiting = False
        self._closed = False
        self.session = Session(self.endpoint)
        self.link = Link(self.session, self._link_opened)
        self._tokenizer_source = tokenizer
        self._tokenizer: Tokenizer | None = None

    @abstractmethod
    async def _until(
        self, ready: Callable[[], bool], watch: Sequence[Watched], deadline: float, *, for_room: bool = False
    ) -> bool:
        """Takes in messages until `ready()`; False if `deadline` (time.monotonic) passes first.

        `ready` can become true only when one of `watch` is woken or, with `for_room`, when the link gets writable.
        """

    @abstractmethod
    def _gate(self) -> AbstractAsyncContextManager[Any]:
        """Held while connecting, so that concurrent callers share one connection."""

    def _link_opened(self) -> None:
        """The link has new sockets."""
        return

    # ------------------------------------------------------------------------------------------------- operations

    async def call(self, build: Callable[[int], Message], expects: type[M], timeout_s: float | None = None) -> M:
        """Sends one command, returns its reply. Raises what the coordinator refused it with, or what went wrong."""
        return (await self._ask(build, expects, timeout_s)).take(expects)

    async def run(self, command: Command[T], timeout_s: float | None) -> T:
        """Sends a command and returns what its caller gets."""
        return command.result(await self.call(command.build, command.reply, timeout_s))

    async def submit(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        options: RequestOptions,
        timeout_s: float | None = None,
        sequence: SequenceRef | None = None,
    ) -> Track:
        ids = prompt_array(prompt, empty=sequence is not None)
        continued = sequence_id(sequence) if sequence is not None else 0
        tracks = await self._admit(lambda rid: options.command(rid, ids, continued, 1), timeout_s, options.retry_s)
        return _owned(tracks, options)[0]

    async def samples(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        count: int,
        options: RequestOptions,
        timeout_s: float | None = None,
    ) -> tuple[Track, ...]:
        ids = prompt_array(prompt)
        several = answer_count(count)
        tracks = await self._admit(lambda rid: options.command(rid, ids, 0, several), timeout_s, options.retry_s)
        return _owned(tracks, options)

    async def _admit(
        self, build: Callable[[int], Submit], timeout_s: float | None, retry_s: float | None
    ) -> tuple[Track, ...]:
        """Submits, and while the queue is full again and again for `retry_s` seconds."""
        deadline = monotonic() + (retry_s or 0.0)
        while True:
            try:
                pending = await self._ask(build, Accepted, timeout_s)
                pending.take(Accepted)
            except QueueFull as full:
                if monotonic() >= deadline:
                    raise
                await self._pause(max(full.retry_after_ms / 1000, RETRY_PAUSE_S), deadline)
            else:
                return pending.tracks

    async def attach(self, request_id: int, offset: int, timeout_s: float | None) -> Track:
        wanted, start = request_number(request_id), whole("offset", offset, 0, INT32_MAX)
        self._check_usable()
        track = self.session.tracked(wanted, start)
        if track is not None:
            return track
        pending = await self._ask(lambda rid: Attach(rid=rid, request_id=wanted, offset=start), Attached, timeout_s)
        pending.take(Attached)
        return pending.tracks[0]

    async def tables(self, timeout_s: float | None) -> Tables:
        await self._connect(monotonic() + (self.timeout_s if timeout_s is None else _seconds(timeout_s)))
        if self.session.welcome is None:
            raise self._nobody("hung up at once")
        return Tables.of(self.session.welcome, self.endpoint)

    async def drain(self, deadline_s: float | None, timeout_s: float | None) -> None:
        deadline_ms = milliseconds("deadline_s", deadline_s)
        await self.call(lambda rid: Drain(rid=rid, deadline_ms=deadline_ms), Done, timeout_s)

    async def wait_ready(self, timeout_s: float, progress: Callable[[Health], None] | None) -> Health:
        deadline = monotonic() + _seconds(timeout_s)
        while True:
            try:
                await self._connect(min(deadline, monotonic() + READY_CONNECT_S))
                left_s = max(deadline - monotonic(), READY_CONNECT_S)
                health = await self.call(lambda rid: GetHealth(rid=rid), Health, min(left_s, self.timeout_s))
            except (CoordinatorUnavailable, DeadlineExceeded) as unavailable:
                error: KvforgeError = unavailable
            else:
                if progress is not None:
                    progress(health)
                if health.ready:
                    return health
                error = DeadlineExceeded(
                    f"{self.endpoint} is not ready to serve after {timeout_s:g} s: {health.reason}"
                )
            if not await self._pause(READY_POLL_S, deadline):
                raise error

    async def result(self, track: Track, timeout_s: float | None, start: int = 0) -> Finished:
        if not track.done:
            wait_s = self.stream_timeout_s if timeout_s is None else _seconds(timeout_s)
            self._check_usable()
            if not await self._until(lambda: track.done, (track,), monotonic() + wait_s):
                problem = f"request {track.request_id} has not ended within {wait_s:g} s"
                raise DeadlineExceeded(f"{problem}; it goes on: wait again, or cancel it")
        return finished(track, start)

    async def cancel(self, track: Track, timeout_s: float | None) -> None:
        """Ends a request, unless it has ended."""
        if track.done:
            return
        command = cancel(track.request_id)
        try:
            await self.run(command, timeout_s)
        except AlreadyFinished:  # its end is on the way to us
            return

    async def token(self, track: Track, offset: int, deadline: float | None = None) -> Token | None:
        """The token at `offset`, None if the request ended before it. Raises the error the request ended with.

        deadline: on time.monotonic; None: the client's limit for each token.
        """
        if offset >= track.reach and not track.done:
            what = f"request {track.request_id}"
            await self._move(lambda: track.reach > offset or track.done, (track,), what, deadline)
        if offset < track.reach:
            return token_at(track, offset)
        if (error := track.failure()) is not None:
            raise error
        return None

    async def text(self, track: Track, stops: Sequence[str], timeout_s: float | None) -> Completion:
        """Waits for the end, or for a stop string, and returns the text with the outcome."""
        wait_s = self.stream_timeout_s if timeout_s is None else _seconds(timeout_s)
        if not stops:
            done = await self.result(track, wait_s)
            return Completion((await self.tokenizer()).decode(done.tokens), done)
        deadline = monotonic() + wait_s
        cursor, pieces = TextCursor(self, track, stops), []
        try:
            while (piece := await cursor.next(deadline)) is not None:
                pieces.append(piece)
        except DeadlineExceeded:
            if track.done:  # the request's own end
                raise
            problem = f"request {track.request_id} has not ended within {wait_s:g} s"
            raise DeadlineExceeded(f"{problem}; it goes on: wait again, or cancel it") from None
        done = await self.result(track, max(deadline - monotonic(), MOMENT_S))
        return Completion("".join(pieces), cursor.outcome(done))

    async def text_so_far(self, track: Track, stops: Sequence[str]) -> str:
        """The text of the tokens that have come, up to a stop string."""
        stream, stop = (await self.tokenizer()).stream(), StopText(stops)
        text = stop.push(stream.push(track.tokens)) + stop.push(stream.finish())
        return text + stop.finish()

    async def more(self, feed: Feed[H]) -> None:
        """Waits until a feed has something."""
        await self._move(lambda: feed.ready, feed.tracks, "any of the requests")

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at first use. Raises InvalidConfiguration where none can be found."""
        if self._tokenizer is None:
            source = self._tokenizer_source or os.environ.get("KVFORGE_TOKENIZER")
            if not source:
                health = await self.call(lambda rid: GetHealth(rid=rid), Health)
                source = health.model.source if health.model is not None else None
            if not source:
                problem = "no worker has said which model it serves; name one with Client(tokenizer=...)"
                raise InvalidConfiguration("tokenizer", f"{problem} or KVFORGE_TOKENIZER")
            from kvforge.text.tokenizer import Tokenizer  # only for those who ask: it goes on to load transformers

            self._tokenizer = Tokenizer.load(os.fspath(source))
        return self._tokenizer

    async def encode(self, prompt: Prompt, raw: bool) -> list[int]:
        """Token ids of a text or of a chat. A text is put as a user's message unless `raw`."""
        if not prompt:
            raise InvalidRequest("prompt", "is empty")
        tokenizer = await self.tokenizer()
        if not raw:
            return tokenizer.chat(prompt if isinstance(prompt, str) else list(prompt))
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt", "is a chat; with raw=True it must be one text")
        return tokenizer.encode(prompt)

    def close(self) -> None:
        if self._closed:
            return
        if os.getpid() == self._pid:  # else the sockets belong to the process that made them
            self._check_closable()
            self._closed = True
            self.link.goodbye()
            self.session.lost(Conflict("this client was closed while the request ran"))
        self._closed = True

    # -------------------------------------------------------------------------------------------------- connection

    def _check_usable(self) -> None:
        if self._closed:
            raise Conflict("this client is closed; make a new one")
        if os.getpid() != self._pid:
            problem = f"this client belongs to process {self._pid}, and this is process {os.getpid()}"
            raise Conflict(f"{problem}: a client does not survive fork(); make a new one in the child")
        if (owner := self._other_thread()) is not None:
            problem = f"this client belongs to thread {owner.name!r}, and this is {threading.current_thread().name!r}"
            raise Conflict(f"{problem}: a client is for one thread; make one for each")

    def _check_closable(self) -> None:
        """Raises Conflict where another thread is in the middle of a call."""
        if self._waiting and (owner := self._other_thread()) is not None:
            raise Conflict(f"this client waits in thread {owner.name!r}: close it there, or when that has ended")

    def _other_thread(self) -> threading.Thread | None:
        """The thread that this client belongs to, where it is another one: that which used it first, and still runs."""
        here = threading.current_thread()
        owner = self._owner.setdefault("", here)  # one step: of two threads that come at once, one is the first
        if owner is not here and not owner.is_alive():
            owner = self._owner[""] = here
        return None if owner is here else owner

    def abandon(self, tracks: Sequence[Track]) -> None:
        """Whoever read these requests was cancelled. Those that nobody else here reads must not run for nobody."""
        left = [track.request_id for track in tracks if not (track.done or track.kept or track.readers)]
        for message in self.session.cancel(left):
            self.link.send(message)

    async def _connect(self, deadline: float) -> None:
        self._check_usable()
        # A connection that ended while nobody looked is noticed here, before anything is sent.
        self.link.pump()
        if self.session.welcome is not None:
            return
        # From now on, not from our turn at the gate: callers in a row do not each wait anew for nobody.
        limit = min(deadline, monotonic() + self._connect_timeout_s)
        async with self._gate():
            while self.session.welcome is None:
                if await self._greet(limit):
                    return
                if not await self._pause(RETRY_PAUSE_S, limit):
                    raise self._nobody("hung up at once")

    async def _greet(self, deadline: float) -> bool:
        """One attempt at a connection. False if it is worth another."""
        link, session = self.link, self.session
        if not link.is_open:
            link.open()
        if not await self._until(lambda: link.writable() or not link.is_open, (link,), deadline, for_room=True):
            link.close()
            raise self._nobody("does not answer")
        if not link.is_open:
            return False
        rid = session.new_rid()
        pending = session.expect(rid, Welcome, "Hello")
        try:
            link.send(Hello(rid=rid, boot=session.boot))
            if not await self._until(lambda: pending.done, (pending,), deadline):
                raise self._nobody("took the connection and does not answer")
            pending.take(Welcome)
        except CoordinatorUnavailable:
            if not pending.done:
                raise
            return False
        except ProtocolError:
            raise
        except KvforgeError:
            # The coordinator restarted and lost what we knew of it. Our requests have failed already: start anew.
            if not session.boot:
                raise
            session.boot = ""
            return False
        finally:
            session.forget(pending)
            if session.welcome is None:
                link.close()
        return True

    def _nobody(self, what: str) -> CoordinatorUnavailable:
        return CoordinatorUnavailable(
            f"the coordinator at {self.endpoint} {what}: is it running? Start it with `kvforge up`, "
            "or name another with --endpoint or KVFORGE_ENDPOINT"
        )

    async def _ask(self, build: Callable[[int], Message], expects: type[M], timeout_s: float | None) -> Pending:
        wait_s = self.timeout_s if timeout_s is None else _seconds(timeout_s)
        deadline = monotonic() + wait_s
        await self._connect(deadline)
        link, session = self.link, self.session
        rid = session.new_rid()
        message = build(rid)
        what = type(message).__name__
        pending = session.expect(rid, expects, what, message.count if isinstance(message, Submit) else 1)
        try:
            sent = False

            def room() -> bool:
                return link.writable() or pending.done

            while not pending.done and not (sent := link.send(message)):
                if not await self._until(room, (link, pending), deadline, for_room=True):
                    break
            if not sent and not pending.done:
                raise DeadlineExceeded(f"the coordinator at {self.endpoint} is too busy to take {what} ({wait_s:g} s)")
            pending.keyed = isinstance(message, Submit) and bool(message.key)
            if not await self._until(lambda: pending.done, (pending,), deadline):
                raise DeadlineExceeded(f"the coordinator at {self.endpoint} did not answer {what} within {wait_s:g} s")
        except BaseException:
            # Whatever ended the wait (a deadline, Ctrl-C, a cancelled task): a request must not run for nobody. That
            # it is detached changes nothing: nobody has its id. A key does: who sends it again gets the request.
            for reply in session.forget(pending):
                link.send(reply)
            raise
        return pending

    async def _move(
        self, ready: Callable[[], bool], watch: Sequence[Watched], what: str, deadline: float | None = None
    ) -> None:
        self._check_usable()
        wait_s = self.stream_timeout_s if deadline is None else deadline - monotonic()
        if not await self._until(ready, watch, monotonic() + wait_s):
            raise DeadlineExceeded(f"no token of {what} came within {wait_s:.3g} s")

    async def _pause(self, pause_s: float, deadline: float) -> bool:
        """Takes in messages for a moment; False if the deadline has passed."""
        end = min(deadline, monotonic() + pause_s)
        await self._until(lambda: False, (), end)
        return monotonic() < deadline


class Handle:
    """One request. id: the coordinator's. seed: repeats its draws. start: the offset of the first token it gives."""

    def __init__(self, calls: Calls, track: Track, start: int = 0) -> None:
        self._calls = calls
        self._track = track
        self.id = track.request_id
        self.seed = track.seed
        self.start = max(start, track.start)

    @property
    def done(self) -> bool:
        """True once the end has come (looks only at what was received so far)."""
        return self._track.done

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids received so far, from offset `start` on; they stay after an error."""
        return tuple(self._track.tokens[self.start - self._track.start :])

    def _text_stops(self, stop: str | Sequence[str]) -> tuple[str, ...]:
        """The stop strings for reading this as text. Raises InvalidRequest naming `stop` or `offset`."""
        if self.start:
            raise InvalidRequest("offset", f"is {self.start}; text is read from the first token on")
        return stop_strings(stop)

    def __repr__(self) -> str:
        state = "ended" if self.done else "running"
        return f"<{type(self).__name__} {self.id}: {state}, {len(self.tokens)} tokens>"


class Feed(Generic[H]):
    """The tokens of several requests in the order they arrived in, without waiting."""

    def __init__(self, requests: Sequence[H]) -> None:
        self._seen = {id(request): request.start for request in requests}
        self._open = list(requests)

    @property
    def tracks(self) -> Sequence[Track]:
        """The streams of the requests that have not ended, or still hold tokens not taken."""
        return [request._track for request in self._open]

    @property
    def ready(self) -> bool:
        """True if `take` would do something."""
        return any(request.done or request._track.reach > self._seen[id(request)] for request in self._open)

    def take(self) -> list[tuple[H, Token]]:
        """What came since the last call, each with its request. Raises the error that a request ended with."""
        rows: list[tuple[H, Token]] = []
        for request in tuple(self._open):
            track, seen = request._track, self._seen[id(request)]
            self._seen[id(request)] = max(seen, track.reach)
            rows += [(request, token_at(track, offset)) for offset in range(seen, track.reach)]
            if not track.done:
                continue
            if not rows and (error := track.failure()) is not None:
                raise error
            if track.failure() is None:
                self._open.remove(request)
        rows.sort(key=lambda row: row[1].offset)
        return rows


def _owned(tracks: tuple[Track, ...], options: RequestOptions) -> tuple[Track, ...]:
    """Requests of ours: whether they outlast whoever reads them is ours to say."""
    for track in tracks:
        track.kept = options.kept
    return tracks


def _seconds(value: float, field: str = "timeout_s") -> float:
    try:
        seconds = number(field, value, 0, math.inf)
    except InvalidRequest:
        seconds = 0.0
    if not seconds:
        problem = f"is {shown(value)}; it must be a number of seconds above 0 (every wait has an end)"
        raise InvalidRequest(field, problem)
    return seconds
