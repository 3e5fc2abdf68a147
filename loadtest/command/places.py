"""The server under test: a running coordinator, simulated workers started for the run, or a server over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvforge import AsyncClient, Health
from kvforge.loadtest.drive.spec import HTTP, KVFORGE
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from kvforge.protocol import transport
from kvforge.protocol.errors import NotReady

READY_S = 30.0
# A server over HTTP does not report its vocabulary.
VOCAB = 32_000


@dataclass(frozen=True, kw_only=True)
class ServerUnderTest:
    """The server under test.

    Attributes:
        target: KVFORGE or HTTP.
        vocab: Token ids are below it.
        endpoint: The coordinator.
        server_key: Its public key.
        key_file: This client's key pair.
        context_max: The context of the model; None if unknown.
        source: Where to load a tokenizer from, or "".
        model: The model as the document describes it.
        http: Fields of `HttpOptions`.
        fleet: The simulated fleet that was started for the run.
        endpoints: Several replicas, from which the driver chooses by `policy`.
        policy: The routing policy.
    """

    target: str
    vocab: int
    endpoint: str | None = None
    server_key: str | None = None
    key_file: str | None = None
    context_max: int | None = None
    source: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    http: dict[str, Any] = field(default_factory=dict)
    fleet: SimulatedFleet | None = None
    endpoints: tuple[str, ...] = ()
    policy: str = ""

    def client(self) -> AsyncClient:
        """Return a connection to the coordinator, for queries."""
        return AsyncClient(self.endpoint, server_key=self.server_key, key_file=self.key_file)


@asynccontextmanager
async def place(options: argparse.Namespace) -> AsyncIterator[ServerUnderTest]:
    """Provide the server that the options name, ready to serve.

    Raises:
        KvforgeError: It is unavailable, or not ready in time.
    """
    if options.url is not None:
        yield await _over_http(options)
    elif options.no_model is not None:
        async with AsyncExitStack() as stack:
            fleets = [
                SimulatedFleet(
                    options.no_model, workers=options.workers, blocks=options.blocks, time_scale=options.time_scale
                )
                for _ in range(options.replicas)
            ]
            for fleet in fleets:  # one at a time: each needs a core while it starts
                await stack.enter_async_context(fleet)
            found = await _coordinator(options, fleets[0].endpoint, fleets[0])
            if len(fleets) > 1:
                endpoints = tuple(fleet.endpoint for fleet in fleets)
                model = {**found.model, "replicas": len(fleets), "policy": options.policy}
                found = replace(found, endpoints=endpoints, policy=options.policy, model=model)
            yield found
    else:
        endpoint = options.endpoint
        if endpoint is None and options.runtime_dir is not None:
            endpoint = transport.client_endpoint(options.runtime_dir)
        yield await _coordinator(options, endpoint)


async def _coordinator(
    options: argparse.Namespace, endpoint: str | None, fleet: SimulatedFleet | None = None
) -> ServerUnderTest:
    key_file = str(options.key_file) if options.key_file is not None else None
    async with AsyncClient(endpoint, server_key=options.server_key, key_file=key_file) as client:
        await client.health()  # fails fast if no coordinator answers; only readiness may take long
        health = await client.wait_ready(READY_S)
        endpoint = client.endpoint
    if (model := health.model) is None:
        raise NotReady("no worker has announced its model yet: pass --vocab")
    return ServerUnderTest(
        target=KVFORGE,
        vocab=options.vocab or model.vocab_size,
        endpoint=endpoint,
        server_key=options.server_key,
        key_file=key_file,
        context_max=model.context_tokens_max,
        source=model.source,
        model=_described(health),
        fleet=fleet,
    )


def _described(health: Health) -> dict[str, Any]:
    """Describe the model and its workers."""
    model = health.model
    assert model is not None, "it is ready"
    found = {"name": model.name, "fingerprint": model.fingerprint, "dtype": model.dtype}
    return found | {"weight_dtype": model.weight_dtype, "workers": len(health.workers)}


async def _over_http(options: argparse.Namespace) -> ServerUnderTest:
    from kvforge.loadtest.drive.http import CHAT, TEXT, TOKENS
    from kvforge.loadtest.drive.http_models import only_model

    name = options.model or await only_model(options.url)
    as_text = options.text or options.api == CHAT
    http: dict[str, Any] = {
        "url": options.url,
        "model": name,
        "api": options.api,
        "prompt_as": TEXT if as_text else TOKENS,
    }
    http["extra"] = http["token_ids"] = not options.no_extra
    described = {"name": name, "url": options.url, "api": options.api}
    return ServerUnderTest(target=HTTP, vocab=options.vocab or VOCAB, model=described, http=http)
