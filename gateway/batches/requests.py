"""One line of a batch as a request, the same as one over HTTP but for its priority and its idempotency key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec

from kvforge.client.arguments import PRIORITY_MAX
from kvforge.gateway.access import Caller
from kvforge.gateway.config import Settings
from kvforge.gateway.generate.generation import Generation, Submission, WakeUp
from kvforge.gateway.generate.service import Service
from kvforge.gateway.http import body
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.gateway.http.keys import KEY_HEADER
from kvforge.gateway.openai import chat, completions, responses
from kvforge.gateway.openai.call import Call
from kvforge.gateway.openai.routes import Work
from kvforge.protocol.errors import InvalidRequest
from kvforge.routing import seed_of

from .room import Room

ENDPOINTS: dict[str, tuple[Reader[Any], Callable[[Call, Any], Awaitable[Work]]]] = {
    "/v1/chat/completions": (chat.READER, chat.ChatCompletion.of),
    "/v1/completions": (completions.READER, completions.Completions.of),
    "/v1/responses": (responses.READER, responses.Responses.of),
}


class Requests:
    """Runs requests of batches.

    Args:
        service: The connection to the coordinator.
        settings: The gateway's settings.
        room: How many may run at once.

    Attributes:
        line_bytes_max: The longest line of an input file.
        started: How many prompts were submitted.
    """

    def __init__(self, service: Service, settings: Settings, room: Room) -> None:
        self._service, self._settings, self._room = service, settings, room
        self.line_bytes_max = settings.body_bytes_max
        self.started = 0
        # Prompts of batches leave the text processes to others.
        self._preparing = asyncio.Semaphore(settings.text_processes)

    async def answer(
        self, endpoint: str, content: bytes, caller: Caller, key: str, running: set[Generation]
    ) -> tuple[str, bytes]:
        """Run a request.

        Args:
            endpoint: A key of ENDPOINTS.
            content: The JSON of its body.
            caller: Its sender.
            key: Its idempotency key.
            running: Holds its generations while they run.

        Returns:
            Its id and the JSON of its answer.

        Raises:
            KvforgeError: It was refused or failed.
        """
        reader, make = ENDPOINTS[endpoint]
        ignored = Ignored(strict=self._settings.strict_fields)
        asked = body.decoded(reader, body.counted(content, self._settings.body_fields_max), ignored)
        for name in ("stream", "background"):
            if getattr(asked, name, None):
                raise InvalidRequest(name, "must be false in a batch: its answers are written whole")
        asked = msgspec.structs.replace(asked, priority=-PRIORITY_MAX)
        call = Call.of({KEY_HEADER: key}, caller, self._settings, self._service.known, asked, ignored)
        try:
            async with self._preparing:
                work = await make(call, asked)
            return await self._run([_seeded(one) for one in work.wanted], work, running)
        except InvalidRequest as error:
            raise call.names.renamed(error) from None

    async def _run(self, wanted: list[Submission], work: Work, running: set[Generation]) -> tuple[str, bytes]:
        bell, generations = WakeUp(), list[Generation]()
        async with self._room.place(sum(one.count for one in wanted)), AsyncExitStack() as stack:
            try:
                for one in wanted:
                    self.started += 1
                    generations.append(await stack.enter_async_context(self._service.start(one, bell)))
                    running.add(generations[-1])
                content = await work.whole(generations)
            finally:
                running.difference_update(generations)
        return str(generations[0].request_id), content


def _seeded(wanted: Submission) -> Submission:
    """Return a submission with a seed, so that it draws the same tokens whenever it is submitted again."""
    options = wanted.options
    sampling = options.sampling
    if sampling is None or sampling.seed is not None:
        return wanted
    sampling = replace(sampling, seed=seed_of(options.tenant, options.idempotency_key))
    return replace(wanted, options=replace(options, sampling=sampling))
