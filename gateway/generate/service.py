"""The connection to the coordinator and the served model: its name, tokenizer and output format."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvforge.client.aio import AsyncClient, AsyncStreams
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.parse import Format
from kvforge.gateway.replicas.replica_set import ReplicaSet
from kvforge.protocol.errors import KvforgeError, ModelNotFound, NotReady
from kvforge.protocol.messages import Health, ModelInfo, PrefixFound

from .generation import Generation, Submission, WakeUp

LOOK_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What the service does at this moment, over all replicas.

    Attributes:
        running: Running requests.
        pending: Waiting requests.
        rows_free: How many more requests may run.
        queued_tokens: Prompt tokens that are not computed yet, of the mean replica.
    """

    running: int
    pending: int
    rows_free: int
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """The served model.

    Attributes:
        info: The coordinator's description.
        names: The names that requests may use; answers use the first.
        prompts: The tokenizer and chat template.
        since: When it was loaded, in seconds since 1970.
        format: How it writes reasoning and tool calls.
    """

    info: ModelInfo
    names: tuple[str, ...]
    prompts: Prompts
    since: int
    format: Format

    def check(self, name: str) -> None:
        """Check the model name of a request.

        Raises:
            ModelNotFound: It is another model's.
        """
        # The path is accepted too: other servers use it as the name of a local model.
        if name not in self.names and name != self.info.source:
            raise ModelNotFound(name, f"is not served; the served model is {self.names[0]}")


class Service:
    """The served model as one gateway process sees it. The task `serving` keeps it up to date.

    With one coordinator, requests wait while it restarts. With replicas, `NotReady` is raised when none is ready: they
    take over from each other, so there is nothing to wait for.

    Args:
        client: The client of the coordinator, or the replicas.
        prompts: Loads the tokenizer and output format of a model.
        names: Names of the model for requests, before its own.
        settled: Called when a model, the first or another one, is loaded with its tokenizer.

    Attributes:
        started: How many prompts were submitted.
    """

    def __init__(
        self,
        client: AsyncClient | ReplicaSet,
        prompts: Callable[[ModelInfo], Awaitable[tuple[Prompts, Format]]],
        names: tuple[str, ...] = (),
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.fleet = client if isinstance(client, ReplicaSet) else None
        self._client = client if isinstance(client, AsyncClient) else None
        self._settled = settled
        self._make_prompts, self._names = prompts, names
        self._model: Model | None = None
        self._streams: AsyncStreams | None = None
        self._reason = "the coordinator has not answered yet"
        self._not_ready = False
        self._known = asyncio.Event()
        self.health: Health | None = None
        self.started = 0

    @property
    def known(self) -> Model:
        """The last known model. It stays known while all replicas are away: one may return before the request fails."""
        if self._model is None:
            raise NotReady(f"no model is served yet: {self._reason}")
        return self._model

    @property
    def model(self) -> Model:
        """The model that is served now.

        Raises:
            NotReady: No model is served, or no replica is ready.
        """
        model = self.known
        if self.fleet is not None and (reason := self.fleet.reason):
            raise NotReady(f"no replica is ready: {reason}")
        return model

    @property
    def reason(self) -> str:
        """Why a request would be refused now; "" if it would be served."""
        if self.fleet is not None and self._model is not None:
            return self.fleet.reason
        return self._reason

    def start(self, wanted: Submission, bell: WakeUp, session: str = "") -> Generation:
        """Submit a prompt.

        Args:
            wanted: The submission.
            bell: Rung when there is news.
            session: Requests of one session go to the same replica.

        Raises:
            NotReady: No model has been served yet.
            KvforgeError: The coordinator refused this gateway.
        """
        self.started += 1
        if wanted.ahead and (self.health is None or not self.health.kinds):
            wanted = replace(wanted, ahead=0)  # what was generated is a prefix hit as it is
        if self.fleet is not None:
            return Generation(self.fleet.of(session), wanted, bell)
        if self._streams is None:
            raise NotReady(f"no model is served yet: {self._reason}")
        return Generation(self._streams, wanted, bell)

    def client_of(self, replica: str) -> AsyncClient:
        """Return the client of the coordinator, or of a replica by its name.

        Raises:
            NotReady: There is no such replica any more.
        """
        if self._client is not None:
            return self._client
        for one in self.fleet.replicas if self.fleet is not None else ():
            if one.name == replica:
                return one.client
        raise NotReady(f"there is no replica {replica!r} any more")

    async def load(self, within_s: float) -> Load | None:
        """Return the load; None if no coordinator answers within a time."""
        if self.fleet is not None:
            clients = [replica.client for replica in self.fleet.replicas if replica.ready]
        else:
            clients = [self._client] if self._client is not None else []
        answers = await asyncio.gather(
            *(client.find_prefix((0,), timeout_s=within_s) for client in clients), return_exceptions=True
        )
        found = [answer for answer in answers if isinstance(answer, PrefixFound) and answer.ready]
        if not found:
            return None
        return Load(
            running=sum(one.running for one in found),
            pending=sum(one.pending for one in found),
            rows_free=sum(one.rows_free for one in found),
            queued_tokens=sum(one.queued_tokens for one in found) // len(found),
        )

    async def ready(self) -> None:
        """Wait until a model is known."""
        await self._known.wait()

    async def serving(self) -> None:
        """Poll the served model until cancelled."""
        if self.fleet is not None:
            await self._serving_several(self.fleet)
        try:
            while True:
                try:
                    await self._look()
                except KvforgeError as error:
                    self._note_readiness(error.message)
                await asyncio.sleep(LOOK_S if self._model is not None else LOOK_S / 10)
        finally:
            if self._streams is not None:
                with suppress(KvforgeError):
                    self._streams.close()

    async def close(self) -> None:
        """End the helper processes of the model that was served."""
        if self._model is not None:
            await self._model.prompts.close()

    async def _serving_several(self, fleet: ReplicaSet) -> None:
        watching = asyncio.ensure_future(fleet.watch())
        try:
            while True:
                await fleet.news.wait()
                fleet.news.clear()
                if (health := fleet.health) is not None:
                    await self._apply_health_or_report(health)
                else:
                    self._note_readiness(fleet.reason)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _look(self) -> None:
        assert self._client is not None, "replicas poll for themselves"
        health = await self._client.health()
        if self._streams is None:
            self._streams = AsyncStreams(self._client)
        await self._apply_health(health)

    async def _apply_health_or_report(self, health: Health) -> None:
        try:
            await self._apply_health(health)
        except KvforgeError as error:
            self._note_readiness(error.message)

    async def _apply_health(self, health: Health) -> None:
        self.health = health
        new = health.model is not None and (self._model is None or health.model != self._model.info)
        if health.model is not None and new:
            names = tuple(dict.fromkeys((*self._names, health.model.name)))
            prompts, format_ = await self._make_prompts(health.model)
            former = self._model
            self._model = Model(health.model, names, prompts, int(time.time()), format_)
            self._known.set()
            self._settled()
            if former is not None:
                await former.prompts.close()
        if health.ready and self._model is not None and (new or self._not_ready):
            log.info("ready: serving %s", self._model.names[0])
        self._note_readiness("" if health.ready else health.reason)

    def _note_readiness(self, reason: str) -> None:
        if reason and reason != self._reason:
            # One warning per outage; the progress of loading is logged at debug.
            level = logging.DEBUG if self._not_ready else logging.WARNING
            log.log(level, "not ready: %s", reason)
        self._not_ready = bool(reason)
        self._reason = reason
