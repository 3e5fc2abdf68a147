"""The question to all replicas, over their connections, and the choice by what they answer."""

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
    """name: the replica; None: none of those that answered takes the request. silent: who did not answer in time."""

    name: str | None
    silent: tuple[str, ...] = ()


async def ask_and_choose(
    router: Router,
    clients: Mapping[str, AsyncClient],
    prompt: Int32Array,
    options: RequestOptions,
    *,
    answer_s: float,
    session: str = "",
) -> Chosen:
    """Asks each of the clients, by the replicas' names, what it holds of the prompt, for `answer_s` at most.

    The request must be submitted before anything else is waited for: a question that another asks after that finds it
    there.
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
            elif isinstance(answer, DeadlineExceeded | ProtocolError):  # the latter: it is too old to know the question
                silent.append(name)
            elif not isinstance(answer, CoordinatorUnavailable):
                return Chosen(name)  # what is wrong with the question is wrong with the request, and it says what
        return Chosen(router.choose(len(prompt), offers, session=session), tuple(silent))
    finally:
        router.close(question)


async def _ask(
    client: AsyncClient, prompt: Int32Array, options: RequestOptions, answer_s: float
) -> PrefixFound | KvforgeError:
    try:
        return await client.find_prefix(
            prompt, tenant=options.tenant, salt=options.salt, key=options.key, timeout_s=answer_s
        )
    except KvforgeError as error:
        return error
