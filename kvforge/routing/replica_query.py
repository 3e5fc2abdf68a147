"""Queries all replicas over their connections, and chooses one by their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from kvforge.client.aio import AsyncClient
from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import CoordinatorUnavailable, DeadlineExceeded, KvforgeError, ProtocolError
from kvforge.protocol.messages import Int32Array, PrefixFound

from .router import Offer, Router


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen replica.

    Attributes:
        name: The replica; None: no replica that answered accepts the request.
        silent: Replicas that did not answer in time.
    """

    name: str | None
    silent: tuple[str, ...] = ()


async def choose_replica(
    router: Router,
    clients: Mapping[str, AsyncClient],
    prompt: Int32Array,
    options: RequestOptions,
    *,
    answer_s: float,
    session: str = "",
) -> Chosen:
    """Ask each client's coordinator for the cached prefix of the prompt, and choose one.

    The caller must submit the request before it waits for anything else, so that later queries already see the request.

    Args:
        router: The router.
        clients: The clients by replica.
        prompt: [prompt_tokens] int32.
        options: The options of the request.
        answer_s: The limit for the answers, in seconds.
        session: The session of the request, "" for none.
    """
    if len(clients) < 2:
        return Chosen(next(iter(clients), None))
    question = router.ask()
    try:
        asked = {
            asyncio.ensure_future(_ask(client, prompt, options, answer_s)): name for name, client in clients.items()
        }
        try:
            await asyncio.wait(asked, timeout=answer_s)
        finally:
            for task in asked:
                task.cancel()
        offers: dict[str, Offer] = {}
        silent: list[str] = []
        for task, name in asked.items():
            if not task.done() or task.cancelled():
                silent.append(name)
            elif isinstance(answer := task.result(), PrefixFound):
                offers[name] = Offer(question, answer)
            elif isinstance(answer, DeadlineExceeded | ProtocolError):  # ProtocolError: too old for this query
                silent.append(name)
            elif not isinstance(answer, CoordinatorUnavailable):
                return Chosen(name)  # the request would fail with the same error, which then reports the cause
        return Chosen(router.choose(len(prompt), offers, session=session), tuple(silent))
    finally:
        router.close(question)


async def _ask(
    client: AsyncClient, prompt: Int32Array, options: RequestOptions, answer_s: float
) -> PrefixFound | KvforgeError:
    try:
        return await client.find_prefix(
            prompt,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            idempotency_key=options.idempotency_key,
            timeout_s=answer_s,
        )
    except KvforgeError as error:
        return error
