"""The asyncio client: the same names as `Client`, to be awaited.

ZeroMQ's file descriptors are watched by the event loop itself (edge-triggered, so everything is drained each time).
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq

from kvforge.protocol.errors import Conflict
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
from .reading import Reading, read
from .results import Completion, Finished, Token
from .sampling import Sampling
from .session import Watched
from .stop_text import TextCursor
from .tables import Tables

ROOM_POLL_S = 0.02


class AsyncRequest(Handle):
    """One request, as `Request`. A task that is cancelled while it reads one cancels the request, unless that was
    submitted as `detached` or with a key, or was attached to, or is read by another task too. To stop waiting and let
    it go on, give `result` a timeout_s, or leave the loop.
    """

    def __aiter__(self) -> AsyncIterator[Token]:
        """Tokens as they come, from the first one."""
        offset = self.start

        async def following() -> Token | None:
            nonlocal offset
            token = await self._calls.token(self._track, offset)
            offset += 1
            return token

        return Reading(self._calls, (self._track,), following)

    async def result(self, timeout_s: float | None = None) -> Finished:
        """Waits for the end and returns the outcome, as `Request.result`."""
        return await read(self._calls, (self._track,), self._calls.result(self._track, timeout_s, self.start))

    def text(self, stop: str | Sequence[str] = ()) -> AsyncTextRequest:
        """As `Request.text`."""
        return AsyncTextRequest(self._calls, self, self._text_stops(stop))

    async def cancel(self, *, timeout_s: float | None = None) -> None:
        """As `Request.cancel`."""
        await self._calls.cancel(self._track, timeout_s)


class AsyncTextRequest:
    """A request that is read as text, as `TextRequest`; for cancelled tasks see `AsyncRequest`."""

    def __init__(self, calls: Calls, request: AsyncRequest, stop: Sequence[str] = ()) -> None:
        self._calls = calls
        self._stop = stop
        self.request = request

    def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text as they come, from the first one."""
        track = self.request._track
        return Reading(self._calls, (track,), TextCursor(self._calls, track, self._stop).next)

    async def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the end, as `TextRequest.result`."""
        track = self.request._track
        return await read(self._calls, (track,), self._calls.text(track, self._stop, timeout_s))

    async def received(self) -> str:
        """As `TextRequest.received`."""
        return await self._calls.text_so_far(self.request._track, self._stop)

    async def cancel(self, *, timeout_s: float | None = None) -> None:
        """As `Request.cancel`."""
        await self.request.cancel(timeout_s=timeout_s)


class AsyncClient:
    """`Client` for asyncio: same arguments, same methods, same errors. Many tasks of one loop may share it; used in
    another loop it raises Conflict.

    The first use of `generate` loads the tokenizer, which keeps the event loop busy for about a second.
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
        self._calls = _AsyncCalls(
            endpoint,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            stream_timeout_s=stream_timeout_s,
            tokenizer=tokenizer,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        """Where this client connects to."""
        return self._calls.endpoint

    async def close(self) -> None:
        """As `Client.close`."""
        self._calls.close()

    async def wait_ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, progress: Callable[[Health], None] | None = None
    ) -> Health:
        """As `Client.wait_ready`."""
        return await self._calls.wait_ready(timeout_s, progress)

    async def submit(
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
    ) -> AsyncRequest:
        """As `Client.submit`. A task that is cancelled here leaves no request running, unless it has a key."""
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
        track = await self._calls.submit(prompt, options, timeout_s, sequence)
        return AsyncRequest(self._calls, track)

    async def samples(
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
    ) -> tuple[AsyncRequest, ...]:
        """As `Client.samples`."""
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
        tracks = await self._calls.samples(prompt, count, options, timeout_s)
        return tuple(AsyncRequest(self._calls, track) for track in tracks)

    async def attach(self, request_id: int, offset: int = 0, timeout_s: float | None = None) -> AsyncRequest:
        """As `Client.attach`."""
        track = await self._calls.attach(request_id, offset, timeout_s)
        return AsyncRequest(self._calls, track, offset)

    def merge(self, *requests: AsyncRequest) -> AsyncIterator[tuple[AsyncRequest, Token]]:
        """As `Client.merge`, for `async for`; for cancelled tasks see `AsyncRequest`."""
        feed, taken = Feed(requests), deque[tuple[AsyncRequest, Token]]()

        async def following() -> tuple[AsyncRequest, Token] | None:
            while not taken and feed.tracks:
                await self._calls.more(feed)
                taken.extend(feed.take())
            return taken.popleft() if taken else None

        return Reading(self._calls, feed.tracks, following)

    async def cancel(self, request_id: int, *, timeout_s: float | None = None) -> None:
        """As `Client.cancel`."""
        await self._calls.run(exchanges.cancel(request_id), timeout_s)

    async def status(
        self, request_id: int, *, with_tokens: bool = False, timeout_s: float | None = None
    ) -> RequestInfo:
        """As `Client.status`."""
        return await self._calls.run(exchanges.status(request_id, with_tokens), timeout_s)

    async def requests(self, count_max: int = 100, *, timeout_s: float | None = None) -> RequestList:
        """As `Client.requests`."""
        return await self._calls.run(exchanges.requests(count_max), timeout_s)

    async def stats(self, *, timeout_s: float | None = None) -> Stats:
        """As `Client.stats`."""
        return await self._calls.call(lambda rid: GetStats(rid=rid), Stats, timeout_s)

    async def health(self, *, timeout_s: float | None = None) -> Health:
        """As `Client.health`."""
        return await self._calls.call(lambda rid: GetHealth(rid=rid), Health, timeout_s)

    async def tables(self, *, timeout_s: float | None = None) -> Tables:
        """As `Client.tables`; reading the tables themselves waits for nobody and is not awaited."""
        return await self._calls.tables(timeout_s)

    async def create_sequence(
        self,
        tokens: Sequence[int] | np.ndarray[Any, Any] = (),
        *,
        tenant: str = "default",
        salt: str = "",
        idle_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> CachedSequence:
        """As `Client.create_sequence`."""
        return await self._calls.run(exchanges.create(tokens, tenant, salt, idle_ttl_s), timeout_s)

    async def append(
        self,
        sequence: SequenceRef | Iterable[SequenceRef],
        tokens: Sequence[int] | Sequence[Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """As `Client.append`."""
        return await self._calls.run(exchanges.append(sequence, tokens), timeout_s)

    async def fork(
        self, sequence: SequenceRef, count: int = 1, *, timeout_s: float | None = None
    ) -> tuple[CachedSequence, ...]:
        """As `Client.fork`."""
        return await self._calls.run(exchanges.fork(sequence, count), timeout_s)

    async def info(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> SequenceInfo:
        """As `Client.info`."""
        return await self._calls.run(exchanges.info(sequence), timeout_s)

    async def tokens(self, sequence: SequenceRef, *, timeout_s: float | None = None) -> tuple[int, ...]:
        """As `Client.tokens`."""
        return await self._calls.run(exchanges.tokens(sequence), timeout_s)

    async def remove(self, sequence: SequenceRef | Iterable[SequenceRef], *, timeout_s: float | None = None) -> int:
        """As `Client.remove`."""
        return await self._calls.run(exchanges.remove(sequence), timeout_s)

    async def block(self, block_id: int, *, timeout_s: float | None = None) -> BlockInfo:
        """As `Client.block`."""
        return await self._calls.run(exchanges.block(block_id), timeout_s)

    async def ref(
        self,
        block_id: int,
        holder: str,
        *,
        generation: int | None = None,
        tenant: str = "default",
        timeout_s: float | None = None,
    ) -> BlockCount:
        """As `Client.ref`."""
        return await self._calls.run(exchanges.ref(block_id, holder, generation, tenant), timeout_s)

    async def unref(
        self, block_id: int, holder: str, *, generation: int | None = None, timeout_s: float | None = None
    ) -> BlockCount:
        """As `Client.unref`."""
        return await self._calls.run(exchanges.unref(block_id, holder, generation), timeout_s)

    async def explain(
        self,
        *,
        block: int | None = None,
        request: int | None = None,
        sequence: SequenceRef | None = None,
        tenant: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """As `Client.explain`."""
        return await self._calls.run(exchanges.explain(block, request, sequence, tenant), timeout_s)

    async def purge_finished(self, older_than_s: float = 0.0, *, timeout_s: float | None = None) -> int:
        """As `Client.purge_finished`."""
        return await self._calls.run(exchanges.purge_finished(older_than_s), timeout_s)

    async def drain(self, deadline_s: float | None = None, *, timeout_s: float | None = None) -> None:
        """As `Client.drain`."""
        await self._calls.drain(deadline_s, timeout_s)

    async def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """As `Client.encode`."""
        return await self._calls.encode(prompt, raw)

    async def generate_stream(
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
    ) -> AsyncTextRequest:
        """As `Client.generate_stream`: `async for piece in await kv.generate_stream(...)`."""
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
        ids = await self._calls.encode(prompt, raw)
        track = await self._calls.submit(ids, options, timeout_s)
        return AsyncTextRequest(self._calls, AsyncRequest(self._calls, track), stops)

    async def generate(
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
        """As `Client.generate`."""
        text = await self.generate_stream(
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
        return await text.result(timeout_s)


class _AsyncCalls(Calls):
    """The operations, with a wait that lets other tasks run."""

    _lock: asyncio.Lock | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    def _check_usable(self) -> None:
        super()._check_usable()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise Conflict("this client belongs to another event loop; make one in each, and close it there")

    def _check_closable(self) -> None:
        if self._loop is not None and self._loop.is_running() and self._loop is not asyncio.get_running_loop():
            raise Conflict("this client belongs to another event loop: close it there, or when that has ended")

    async def _until(
        self, ready: Callable[[], bool], watch: Sequence[Watched], deadline: float, *, for_room: bool = False
    ) -> bool:
        loop = asyncio.get_running_loop()
        while not ready():
            # Sending or asking for a socket's state may have swallowed the edge that the event loop waits for.
            if self._pump() or ready():
                continue
            left_s = deadline - monotonic()
            if left_s <= 0:
                return False
            if for_room:  # asking whether there is room may swallow an edge just before the wait: ask again soon
                left_s = min(left_s, ROOM_POLL_S)
            changed = loop.create_future()

            def wake(changed: asyncio.Future[None] = changed) -> None:
                if not changed.done():
                    changed.set_result(None)

            for thing in watch:
                thing.wakers.add(wake)
            timer = loop.call_later(left_s, wake)
            try:
                await changed
            finally:
                timer.cancel()
                for thing in watch:
                    thing.wakers.discard(wake)
        return True

    def _gate(self) -> AbstractAsyncContextManager[Any]:
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    def _link_opened(self) -> None:
        loop = asyncio.get_running_loop()
        sockets = (self.link.socket, self.link.monitor)
        descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets if socket is not None]
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._pump)

        def closing() -> None:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

        self.link.closing = closing

    def _pump(self) -> bool:
        more = self.link.pump()
        if more:  # fairness: other tasks run between two shares of a long queue
            asyncio.get_running_loop().call_soon(self._pump)
        return more
