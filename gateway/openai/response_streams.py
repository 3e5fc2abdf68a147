"""Streams of stored responses, from any event on: ended ones, those that this process follows, and those of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from kvforge.gateway.generate.generation import WakeUp
from kvforge.gateway.storage import Document, Entry, Get, Read, Watch
from kvforge.protocol.errors import KvforgeError, NotFound, Unavailable

from .background import Background
from .background_run import Run
from .background_tokens import Tokens, answer_of
from .response_items import EventWriter, replayed
from .responses import Responses
from .stored import RESPONSE, TOKENS, StoredResponse, decoded_response

LOOK_S = 0.1


class EndedEvents:
    """The events of a response that has ended.

    Args:
        final: The response.
        after: Events up to this sequence number are left out.
    """

    def __init__(self, final: StoredResponse, after: int) -> None:
        self._final, self._after = final, after
        self.over = False

    def pop_events(self) -> bytes:
        """Return all events at once."""
        self.over = True
        return replayed(self._final.response, self._final.pieces, self._after)


class LiveEvents:
    """The events of a response in progress, from its tokens; then those that are left, from the stored response.

    Args:
        work: Its request.
        tokens: Its tokens, which grow.
        after: Events up to this sequence number are left out.
    """

    def __init__(self, work: Responses, tokens: Tokens, after: int) -> None:
        self._work, self._after = work, after
        self._answer = answer_of(work, tokens)
        self._writer = EventWriter(work.items(), after)
        self._begun = False
        self.over = False

    def pop(self, final: StoredResponse | None) -> bytes:
        """Return the events since the last call.

        Args:
            final: The response, once it has ended.
        """
        if final is not None:
            self.over = True
            return replayed(final.response, final.pieces, max(self._after, self._writer.written))
        written: list[bytes] = []
        if not self._begun:
            self._begun = True
            written.append(self._writer.begin(self._work.body(None, [])))
        written += [self._writer.add(piece.events) for piece in self._answer.pop_each()]
        return b"".join(written)


class OwnEvents:
    """The events of a response that this process follows.

    Args:
        run: The run.
        after: Events up to this sequence number are left out.
        bell: Rung when there is news.
    """

    def __init__(self, run: Run, after: int, bell: WakeUp) -> None:
        self._run, self._bell = run, bell
        self._events = LiveEvents(run.work, run.tokens, after)
        run.listen(bell.ring)

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._events.over

    def pop_events(self) -> bytes:
        """Return the events since the last call.

        Raises:
            Unavailable: It was deleted meanwhile, or this process stops following it.
        """
        run = self._run
        if run.final is None and run.task.done():
            raise Unavailable(
                f"the response {run.work.id} was deleted or continues in another gateway: stream it again"
            )
        return self._events.pop(run.final)

    def close(self) -> None:
        """Stop listening; the response goes on."""
        self._run.listeners.discard(self._bell.ring)


class OthersEvents:
    """The events of a response that another process follows, which publishes its tokens while they are read.

    Args:
        background: This process's background responses.
        document: The document as it was read.
        work: Its request.
        after: Events up to this sequence number are left out.
        ring: Called when there is news.
    """

    def __init__(
        self, background: Background, document: Document, work: Responses, after: int, ring: Callable[[], None]
    ) -> None:
        self._background, self._ring = background, ring
        self._key: dict[str, Any] = {"tenant": document.tenant, "kind": RESPONSE, "id": document.id}
        self._tokens = Tokens()
        self._came: list[int] = []
        self._tokens.tokens = self._came
        self._events = LiveEvents(work, self._tokens, after)
        self._final: StoredResponse | None = None
        self._error: KvforgeError | None = None
        self._reading = asyncio.ensure_future(self._read())

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._events.over

    def pop_events(self) -> bytes:
        """Return the events since the last call.

        Raises:
            KvforgeError: It was deleted meanwhile, or the storage failed.
        """
        if self._error is not None:
            raise self._error
        return self._events.pop(self._final)

    def close(self) -> None:
        """Stop reading."""
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            await self._followed()
        except KvforgeError as error:
            self._error = error
        finally:
            with suppress(RuntimeError):
                self._ring()

    async def _followed(self) -> None:
        storage, lease_s = self._background.stored.storage, self._background.lease_s
        loop = asyncio.get_running_loop()
        watched, behind = 0.0, -1
        while True:
            if loop.time() >= watched:
                await storage.apply(Watch(**self._key, for_s=lease_s))
                watched = loop.time() + lease_s / 3
            read = Read(**self._key, name=TOKENS, behind=behind, limit=1000)
            entries, document = await storage.apply(read, Get(**self._key))
            if not isinstance(document, Document):
                raise NotFound(f"the response {self._key['id']} was deleted")
            if not document.state:
                self._final = decoded_response(document)
                return
            assert isinstance(entries, list)
            for entry in entries:
                assert isinstance(entry, Entry)
                behind = entry.position
                new = np.frombuffer(entry.body, "<i4").tolist()
                self._came += new[
                    len(self._came) - int(entry.id) :
                ]  # a new owner may have begun before the old one's end
            if entries:
                self._ring()
            await asyncio.sleep(LOOK_S)
