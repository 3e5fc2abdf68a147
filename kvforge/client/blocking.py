"""The blocking client. It uses no thread: a call that waits polls its sockets itself, up to its deadline."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import zmq

from kvforge.protocol.messages import (
    BlockCount,
    BlockInfo,
    Explanation,
    GetHealth,
    GetStats,
    Health,
    RequestInfo,
    RequestList,
    SequenceInfo,
    Stats,
)

from . import exchanges
from .arguments import stop_strings
from .calls import (
    CONNECT_TIMEOUT_S,
    READY_TIMEOUT_S,
    STREAM_TIMEOUT_S,
    TIMEOUT_S,
    Calls,
    Feed,
    Handle,
    Prompt,
)
from .exchanges import CachedSequence, SequenceRef
from .options import MAX_TOKENS, RequestOptions
from .results import Completion, Finished, Token
from .sampling import Sampling
from .session import Watched
from .stop_text import TextCursor
from .tables import Tables

T = TypeVar("T")
# A signal that comes just before a wait begins does not end it, and its handler runs when the wait is over: Ctrl-C
# during a long answer would be lost. So no wait is longer than this.
POLL_S_MAX = 1.0


class Request(Handle):
    """One request. Iterating gives its tokens from the first one, however often it is done.

    One that was attached to at an offset begins there: its `tokens`, and those of its result, are those from there on.
    """

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they come. Raises the error the request ended with, or DeadlineExceeded when none comes."""
        offset = self.start
        while (token := drive(self._calls.token(self._track, offset))) is not None:
            yield token
            offset += 1

    def result(self, timeout_s: float | None = None) -> Finished:
        """Waits for the end (the client's `stream_timeout_s` unless given) and returns the outcome.

        Raises the error the request ended with; a cancelled one is returned, with reason `cancelled`. Raises
        DeadlineExceeded when the end does not come in time: the request goes on and can be waited for again.
        """
        return drive(self._calls.result(self._track, timeout_s, self.start))

    def text(self, stop: str | Sequence[str] = ()) -> TextRequest:
        """The same request, to be read as text; stop: as in `generate_stream`.

        Raises InvalidRequest naming `stop`, or `offset` where this handle does not begin at the first token.
        """
        return TextRequest(self._calls, self, self._text_stops(stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """Ends it, whoever submitted it: `result()` then has the reason `cancelled`. One that has ended stays so."""
        drive(self._calls.cancel(self._track, timeout_s))


class TextRequest:
    """A request that is read as text. Iterating gives pieces of text, from the first one.

    With stop strings somebody must read it, here or through `result`, for the request to end at one.
    """

    def __init__(self, calls: Calls, request: Request, stop: Sequence[str] = ()) -> None:
        self._calls = calls
        self._stop = stop
        self.request = request

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come; raises as `Request` does."""
        cursor = TextCursor(self._calls, self.request._track, self._stop)
        while (piece := drive(cursor.next())) is not None:
            yield piece

    def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the end, as `Request.result` does."""
        return drive(self._calls.text(self.request._track, self._stop, timeout_s))

    def received(self) -> str:
        """The text of what has come so far, without waiting for more; it stays after an error."""
        return drive(self._calls.text_so_far(self.request._track, self._stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """As `Request.cancel`."""
        self.request.cancel(timeout_s=timeout_s)


class Client:
    """A connection to a coordinator. Closing it cancels the requests that still run, except detached ones.

    endpoint: `ipc://PATH` or `tcp://HOST:PORT`; by default KVFORGE_ENDPOINT, else the one of the runtime folder.
    timeout_s: how long a command may take; connect_timeout_s: how long to look for a coordinator within that.
    stream_timeout_s: how long to wait for the next token, and for `result()` without a timeout of its own.
    tokenizer: for `generate`; a path or model name. By default KVFORGE_TOKENIZER, else where the worker has its model.

    The connection is made by the first command and made again after it was lost; the requests that ran on the lost one
    are kept for a while, to be read on with `attach(request.id, len(request.tokens))`. Every method that talks to the
    coordinator raises CoordinatorUnavailable (nobody answers, or it went away during the call), DeadlineExceeded
    (it did not answer in time), ProtocolError (it does not speak our protocol) and Conflict (this client is closed,
    was carried through a fork, or is used by a second thread while the first one that used it runs).
    """

    def __init__(
        self,
        endpoint: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        stream_timeout_s: float = STREAM_TIMEOUT_S,
        tokenizer: str | os.PathLike[str] | None = None,
    ) -> None:
        self._calls = _BlockingCalls(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            stream_timeout_s=stream_timeout_s,
            tokenizer=tokenizer,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """Where this client connects to."""
        return self._calls.endpoint

    def close(self) -> None:
        """Says goodbye, if it can be said at once, and frees the sockets. May be called again.

        The coordinator then cancels the requests that still run, except detached ones.
        """
        self._calls.close()

    def wait_ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, progress: Callable[[Health], None] | None = None
    ) -> Health:
        """Waits until a request would be served. `progress` is called with every answer on the way.

        Raises DeadlineExceeded, saying what is missing, or CoordinatorUnavailable if none was there to the end.
        """
        return drive(self._calls.wait_ready(timeout_s, progress))

    def submit(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        sequence: SequenceRef | None = None,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Request:
        """Submits token ids [prompt_tokens] and returns once the request is accepted.

        sequence: continue this one instead, from the KV that it has; `prompt`, if any, is appended to it first and
        what is generated becomes part of it. salt: as in `create_sequence`.
        priority: -100 to 100, among the tenant's own requests: each step up is worth a fixed time of waiting.
        deadline_s, first_token_s: seconds after which it expires where it has not ended, or has no token yet; reading
        it then raises DeadlineExceeded. None: the coordinator's own limit, and none.
        detached: it goes on when this client is closed or its connection is lost; `attach` reads it later.
        key: at most 128 printable characters that name this call within the tenant. The same call with the same key is
        the same request, from its first token on: so it can be made again where its answer was lost. A call that gives
        up (a timeout, Ctrl-C) cancels what it started, unless it has a key.
        retry_s: seconds to try again while the queue is full, as often as the coordinator advises. timeout_s: each try.
        Raises InvalidRequest naming the wrong argument, QueueFull, CapacityExceeded, Draining, KeyReused.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            salt=salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        track = drive(self._calls.submit(prompt, options, timeout_s, sequence))
        return Request(self._calls, track)

    def samples(
        self,
        prompt: Sequence[int] | np.ndarray[Any, Any],
        count: int,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        salt: str = "",
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> tuple[Request, ...]:
        """Submits one prompt for `count` answers (1 to 256), each a request of its own; they share the prompt's blocks.

        Their ids follow each other, and so do their seeds (modulo 2^64). Arguments and errors are those of `submit`.
        """
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            salt=salt,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        tracks = drive(self._calls.samples(prompt, count, options, timeout_s))
        return tuple(Request(self._calls, track) for track in tracks)

    def attach(self, request_id: int, offset: int = 0, timeout_s: float | None = None) -> Request:
        """Reads a request, whoever submitted it, running or ended not long ago, from the token at `offset` on.

        One connection at a time reads a request: the one that did gets Conflict. Unless it is detached, the request
        lasts from now on as long as this connection. Raises InvalidRequest naming `request_id` or `offset` (it has not
        generated so many), RequestNotFound.
        """
        track = drive(self._calls.attach(request_id, offset, timeout_s))
        return Request(self._calls, track, offset)

    def merge(self, *requests: Request) -> Iterator[tuple[Request, Token]]:
        """The tokens of several requests as they come, each with its request, until all have ended.

        Raises the error that one of them ended with.
        """
        feed = Feed(requests)
        while feed.tracks:
            drive(self._calls.more(feed))
            yield from feed.take()

    def cancel(self, request_id: int, *, timeout_s: float | None = None) -> None:
        """Ends a request of any client. Raises RequestNotFound, AlreadyFinished."""
        drive(self._calls.run(exchanges.cancel(request_id), timeout_s))

    def status(self, request_id: int, *, with_tokens: bool = False, timeout_s: float | None = None) -> RequestInfo:
        """One request, running or ended not long ago. Raises RequestNotFound."""
        return drive(self._calls.run(exchanges.status(request_id, with_tokens), timeout_s))

    def requests(self, count_max: int = 100, *, timeout_s: float | None = None) -> RequestList:
        """The newest requests."""
        return drive(self._calls.run(exchanges.requests(count_max), timeout_s))

    def stats(self, *, timeout_s: float | None = None) -> Stats:
        """Counters and gauges, all of one instant."""
        return drive(self._calls.call(lambda rid: GetStats(rid=rid), Stats, timeout_s))

    def health(self, *, timeout_s: float | None = None) -> Health:
        """Whether a request would be served now; if not, why. And the workers, with what each does and holds:
        `device_bytes` of one is its device's memory in bytes by purpose (weights, pool, graphs, other).
        """
        return drive(self._calls.call(lambda rid: GetHealth(rid=rid), Health, timeout_s))

    def tables(self, *, timeout_s: float | None = None) -> Tables:
        """The shared tables of the coordinator that this client is connected to: to be read without a message.

        They are those of one start of the coordinator, and show for ever what that one last wrote: after a restart ask
        for new ones. Raises Unavailable where the file is not there, as for a coordinator on another machine.
        """
        return drive(self._calls.tables(timeout_s))

    def create_sequence(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        tenant: str = "default",
        salt: str = "",
        idle_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> CachedSequence:
        """A sequence of token ids [length] that the coordinator keeps until it is removed.

        idle_ttl_s: removed after so long without access; 0: when this connection ends. salt: share cached prefixes
        with whoever names the same salt, instead of within the tenant. Raises InvalidRequest, CapacityExceeded,
        QuotaExceeded.
        """
        return drive(self._calls.run(exchanges.create(tokens, tenant, salt, idle_ttl_s), timeout_s))

    def append(
        self,
        sequence: SequenceRef | Iterable[SequenceRef],
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """Appends token ids to one sequence, or a list of them to each of several: to all or to none.

        Returns the new lengths. Raises SequenceNotFound, SequenceBusy, CapacityExceeded, InvalidRequest.
        """
        return drive(self._calls.run(exchanges.append(sequence, tokens), timeout_s))

    def fork(
        self, sequence: SequenceRef, count: int = 1, *, timeout_s: float | None = None
    ) -> tuple[CachedSequence, ...]:
        """`count` more sequences with the same tokens; no KV is copied until one side writes.

        Works while a request runs on the sequence. Raises SequenceNotFound, CapacityExceeded.
        """
        return drive(self._calls.run(exchanges.fork(sequence, count), timeout_s))

    def info(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> SequenceInfo:
        """What is known of a sequence. Raises SequenceNotFound, saying why where it expired."""
        return drive(self._calls.run(exchanges.info(sequence), timeout_s))

    def tokens(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """The token ids of a sequence [length]. Raises SequenceNotFound."""
        return drive(self._calls.run(exchanges.tokens(sequence), timeout_s))

    def remove(self, sequence: SequenceRef | Iterable[SequenceRef], *, timeout_s: float | None = None) -> int:
        """Removes one sequence or several, all or none; what runs on one is cancelled.

        Returns how many blocks nobody holds any more. Raises SequenceNotFound.
        """
        return drive(self._calls.run(exchanges.remove(sequence), timeout_s))

    def block(self, block_id: int, *, timeout_s: float | None = None) -> BlockInfo:
        """One block: its state, generation and holders. Raises BlockNotFound."""
        return drive(self._calls.run(exchanges.block(block_id), timeout_s))

    def ref(
        self,
        block_id: int,
        holder: str,
        *,
        generation: int | None = None,
        tenant: str = "default",
        timeout_s: float | None = None,
    ) -> BlockCount:
        """Adds a named holder to a block, until it is taken away or this connection ends.

        `tenant` is charged for the block while it has a name. Raises BlockNotFound, BlockNotHeld (it is free),
        AlreadyHolder, StaleGeneration, QuotaExceeded, CapacityExceeded.
        """
        return drive(self._calls.run(exchanges.ref(block_id, holder, generation, tenant), timeout_s))

    def unref(
        self, block_id: int, holder: str, *, generation: int | None = None, timeout_s: float | None = None
    ) -> BlockCount:
        """Takes a named holder away; the reply says what became of the block.

        Raises BlockNotFound, BlockNotHeld, NotAHolder, StaleGeneration.
        """
        return drive(self._calls.run(exchanges.unref(block_id, holder, generation), timeout_s))

    def explain(
        self,
        *,
        block: int | None = None,
        request: int | None = None,
        sequence: SequenceRef | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Who holds a block and since when; why a request waits; what a sequence or a tenant occupies.

        Exactly one subject. Raises InvalidRequest, BlockNotFound, RequestNotFound, SequenceNotFound, NotFound.
        """
        return drive(self._calls.run(exchanges.explain(block, request, sequence, tenant), timeout_s))

    def purge_finished(self, older_than_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """Makes the coordinator forget requests that ended at least so long ago. Returns how many."""
        return drive(self._calls.run(exchanges.purge_finished(older_than_s), timeout_s))

    def drain(self, deadline_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """Stops admission in the coordinator; what runs goes on.

        deadline_s: what has not ended after so many seconds fails with Draining, to be submitted elsewhere; None: it
        may take as long as it takes. Raises InvalidRequest naming `deadline_s`.
        """
        drive(self._calls.drain(deadline_s, timeout_s))

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids that `generate` submits for a text or a chat. Raises what `generate_stream` raises."""
        return drive(self._calls.encode(prompt, raw))

    def generate_stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> TextRequest:
        """Submits a text, or a chat as a list of {"role", "content"}; iterate over the answer to read it as it comes.

        A text is put to the model as a user's message, by its chat template, unless `raw`. stop: strings that end the
        answer: the text is cut before the first that appears, and the request ends there with reason `stop`. The other
        arguments are those of `submit`.
        Raises what `submit` raises, and Unavailable where the `text` extra is not installed.
        """
        stops = stop_strings(stop)
        options = RequestOptions(
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        ids = drive(self._calls.encode(prompt, raw))
        track = drive(self._calls.submit(ids, options, timeout_s))
        return TextRequest(self._calls, Request(self._calls, track), stops)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: Sampling | None = None,
        tenant: str = "default",
        raw: bool = False,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        deadline_s: float | None = None,
        first_token_s: float | None = None,
        detached: bool = False,
        key: str = "",
        retry_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Completion:
        """As `generate_stream`, but returns the whole answer. timeout_s: for all of it."""
        text = self.generate_stream(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            tenant=tenant,
            raw=raw,
            stop=stop,
            priority=priority,
            deadline_s=deadline_s,
            first_token_s=first_token_s,
            detached=detached,
            key=key,
            retry_s=retry_s,
        )
        return text.result(timeout_s)


class _BlockingCalls(Calls):
    """The operations, with a wait that blocks."""

    async def _until(
        self,
        ready: Callable[[], bool],
        watch: Sequence[Watched],  # noqa: ARG002
        deadline: float,
        *,
        for_room: bool = False,
    ) -> bool:
        self._waiting = True
        try:
            while not ready():
                left_s = deadline - monotonic()
                self._poll(max(0.0, min(left_s, POLL_S_MAX)), for_room)
                if left_s <= 0:
                    return ready()
        finally:
            self._waiting = False
        return True

    def _gate(self) -> AbstractAsyncContextManager[Any]:
        return nullcontext()

    def _poll(self, wait_s: float, for_room: bool) -> None:
        poller = zmq.Poller()
        if self.link.socket is not None and self.link.monitor is not None:
            poller.register(self.link.socket, zmq.POLLIN | zmq.POLLOUT if for_room else zmq.POLLIN)
            poller.register(self.link.monitor, zmq.POLLIN)
        poller.poll(math.ceil(wait_s * 1000))
        self.link.pump()


def drive(operation: Coroutine[Any, Any, T]) -> T:
    """Runs an operation of `_BlockingCalls`, which never suspends, to its end."""
    try:
        operation.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    operation.close()
    raise AssertionError("a blocking operation suspended")
