"""The target for several coordinators, with the gateway's router. Its queries are part of each latency."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from time import monotonic

from kvforge import AsyncClient
from kvforge.client.aio import AsyncStreams
from kvforge.protocol.errors import KvforgeError, NotReady
from kvforge.protocol.messages import PrefixFound
from kvforge.routing import ROUND_ROBIN, Offer, Router, choose_replica

from .coordinator import READY_S, RECONNECT_S, StreamFollower, options_of
from .deadlines import Deadlines
from .outcome import INTERRUPTED, Outcome
from .target import TargetRequest

ANSWER_S = 5.0
IDLE = PrefixFound(rid=0, ready=True)


class ReplicasTarget:
    """A `Target` for several coordinators.

    Args:
        endpoints: The coordinators.
        policy: One of `kvforge.routing.POLICIES`; round robin sends no queries.
    """

    def __init__(self, endpoints: Sequence[str], policy: str) -> None:
        self._clients = {endpoint: AsyncClient(endpoint, reconnect_s=RECONNECT_S) for endpoint in endpoints}
        self._streams: dict[str, AsyncStreams] = {}
        self._router, self._policy = Router(endpoints, policy), policy
        self._stack = AsyncExitStack()
        self._choosing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Connect to all coordinators and wait until each is ready."""
        try:
            self._deadlines = Deadlines()
            self._stack.callback(self._deadlines.close)
            for endpoint, client in self._clients.items():
                await self._stack.enter_async_context(client)
                await client.wait_ready(READY_S)
                streams = self._streams[endpoint] = AsyncStreams(client)
                self._stack.callback(streams.close)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect; the coordinators cancel running requests."""
        for task in tuple(self._choosing):
            task.cancel()
        await asyncio.gather(*self._choosing, return_exceptions=True)
        await self._stack.aclose()

    def send(
        self, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        """Send a request; see `Target`."""
        if self._policy == ROUND_ROBIN:
            question = self._router.ask()
            chosen = self._router.choose(len(ask.prompt), {name: Offer(question, IDLE) for name in self._clients})
            self._router.close(question)
            assert chosen is not None, "all are ready"
            return self._submit(chosen, ask, outcome, start, ended)
        sent = _Sent(outcome, ended)
        task = asyncio.ensure_future(self._choose(sent, ask, outcome, start, ended))
        self._choosing.add(task)
        task.add_done_callback(self._choosing.discard)
        return sent.interrupt

    async def _choose(
        self, sent: _Sent, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> None:
        options = options_of(ask.output_tokens, ask.tenant, ask.temperature, ask.seed if ask.temperature else 0)
        chosen = await choose_replica(self._router, self._clients, ask.prompt, options, answer_s=ANSWER_S)
        if chosen.name is None:
            next_ = next(iter(self._streams))
            one = StreamFollower(outcome, start, ended, self._streams[next_], self._deadlines)
            one.failed(NotReady("no replica answered"))
        elif not sent.interrupted:
            sent.interrupt_now = self._submit(chosen.name, ask, outcome, start, ended)

    def _submit(
        self, name: str, ask: TargetRequest, outcome: Outcome, start: float, ended: Callable[[Outcome], None]
    ) -> Callable[[], None]:
        streams = self._streams[name]
        one = StreamFollower(outcome, start, ended, streams, self._deadlines)
        try:
            options = options_of(ask.output_tokens, ask.tenant, ask.temperature, ask.seed if ask.temperature else 0)
            one.follow(streams.submit(ask.prompt, options, one.changed), max(ask.until, monotonic()))
        except KvforgeError as error:
            one.failed(error)
        return one.interrupt


class _Sent:
    """A request, before or after its replica is chosen."""

    def __init__(self, outcome: Outcome, ended: Callable[[Outcome], None]) -> None:
        self._outcome, self._ended = outcome, ended
        self.interrupted = False
        self.interrupt_now: Callable[[], None] | None = None

    def interrupt(self) -> None:
        """Cancel the request."""
        if self.interrupt_now is not None:
            self.interrupt_now()
        elif not self.interrupted:
            self.interrupted = True
            self._outcome.state = INTERRUPTED
            self._ended(self._outcome)
