"""Many requests of one client without a task for each: what happens to one of them calls a function.

`AsyncRequest` costs a future for each wait and an iteration for each token; here a message with the tokens of two
thousand requests is two thousand plain calls. For programs that have thousands under way, as the load harness.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.messages import Accepted, Ended, Int32Array, Submit

from ..awaited import Pending, Track, again
from ..dialler import ROOM_POLL_S
from ..options import RequestOptions
from .client import AsyncClient

NOTHING: Sequence[int] = ()


class AsyncStream:
    """One request. request_id: the coordinator's; 0 until it was accepted. ended: its end; None: not yet, or an error.

    error: what it was refused with or ended with. tokens: what has come so far, not a copy: it grows, and shrinks only
    at an end that takes tokens back. All of it stays.
    """

    __slots__ = ("_changed", "_pending", "_streams", "_track", "ended", "error", "request_id", "tokens")

    def __init__(self, streams: AsyncStreams, pending: Pending, changed: Callable[[], None]) -> None:
        self._streams = streams
        self._changed: Callable[[], None] | None = changed
        self._pending: Pending | None = pending
        self._track: Track | None = None
        self.request_id = 0
        self.tokens: Sequence[int] = NOTHING
        self.ended: Ended | None = None
        self.error: KvforgeError | None = None
        pending.wakers.add(self._answered)

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.ended is not None or self.error is not None

    def cancel(self) -> None:
        """Gives it up: its function is not called again, and the coordinator is told as soon as it can be."""
        if self._changed is None:
            return
        self._changed = None
        link, session = self._streams.calls.link, self._streams.calls.session
        if self._track is not None:
            self._track.wakers.clear()
            link.tell(session.cancel((self.request_id,)))
        elif self._pending is not None:
            self._pending.wakers.clear()
            link.tell(session.forget(self._pending))
        self._streams.pump_soon()

    def _answered(self) -> None:
        """The Submit was accepted or refused."""
        pending, self._pending = self._pending, None
        assert pending is not None, "answered once"
        pending.wakers.clear()
        if pending.error is not None:
            self.error = again(pending.error)
        else:
            pending.answer(Accepted)
            (self._track,) = pending.tracks
            self._track.kept = False
            self._track.wakers.add(self._moved)
            self.request_id, self.tokens = self._track.request_id, self._track.tokens
        changed = self._changed
        if self.error is not None:
            self._changed = None
        if changed is not None:
            changed()

    def _moved(self) -> None:
        """Tokens came, or the end."""
        changed, track = self._changed, self._track
        if changed is None or track is None:
            return
        if track.ended is not None or track.error is not None:
            track.wakers.clear()
            self.ended, self.error = track.ended, track.failure()
            self._changed = None  # breaks the circle of the two: garbage is left to nobody
        changed()


class AsyncStreams:
    """Submits over a client's connection. From its making until `close` that is kept up, and made again when it was
    lost; what is submitted meanwhile is sent when it is there again.

    Make it in the client's loop, and when the client is connected (`await client.wait_ready()`), so that the first
    request does not wait for that. Raises Conflict where the client cannot be used here.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.calls = client._calls
        self.calls._check_usable()
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[Pending, Submit]] = deque()
        self._pumping: asyncio.Handle | None = None
        self._polling: asyncio.Handle | None = None
        self._held = ExitStack()
        self._held.enter_context(self.calls.link.dialler.wanting())
        self._held.enter_context(self.calls.link.dialler.waiting())
        self.calls.link.wakers.add(self._flush)

    @property
    def came_at(self) -> float:
        """When the message was received of which streams are told now, on time.monotonic: the same for all of them."""
        return self.calls.link.came_at

    def submit(self, prompt: Int32Array, options: RequestOptions, changed: Callable[[], None]) -> AsyncStream:
        """Sends now, or as soon as there is room, and returns at once. prompt: [prompt_tokens] int32, not checked here.

        `changed` is called, never from within this call, when the request was accepted, whenever tokens came, and at
        its end, which may be an error and is last. Raises what the coordinator turned this client away with.
        """
        link, session = self.calls.link, self.calls.session
        if (refused := link.dialler.refused) is not None:
            raise again(refused)
        message = options.command(session.new_rid(), prompt, 0, 1)
        pending = session.expect(message.rid, Accepted, "Submit")
        pending.keyed = bool(options.key)
        stream = AsyncStream(self, pending, changed)
        self._unsent.append((pending, message))
        self._flush()
        self.pump_soon()  # sending may have swallowed the edge that says that something came
        return stream

    def close(self) -> None:
        """The connection is the client's own again. Streams that run are no longer followed: cancel them before."""
        self.calls.link.wakers.discard(self._flush)
        for handle in (self._pumping, self._polling):
            if handle is not None:
                handle.cancel()
        self._held.close()

    def pump_soon(self) -> None:
        """Takes in what has come, once, after what runs now."""
        if self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = None
        self.calls._pump()

    def _poll(self) -> None:
        self._polling = None
        self.calls._pump()

    def _flush(self) -> None:
        """Sends what was not sent yet, as far as there is room. Called whenever the link has moved, too."""
        unsent, link, session = self._unsent, self.calls.link, self.calls.session
        while unsent:
            pending, message = unsent[0]
            if pending.wakers:  # else it was given up, or failed
                if not (session.has_room(pending.rid) and link.send(message)):
                    if self._polling is None and session.welcome is not None:  # that there is room again is not said
                        self._polling = self._loop.call_later(ROOM_POLL_S, self._poll)
                    return
                pending.sent = message
            unsent.popleft()
