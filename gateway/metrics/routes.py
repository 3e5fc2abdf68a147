"""`/metrics`, in Prometheus' text format or OpenMetrics, as the Accept header asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvforge.client.tables import Tables
from kvforge.gateway.http.errors import headers_of, openai_error, status_of
from kvforge.gateway.storage import Storage
from kvforge.gateway.storage.totals import storage_totals
from kvforge.protocol.errors import CoordinatorUnavailable, KvforgeError
from kvforge.protocol.service_metrics import ServiceMetrics

from .exposition import Exposition
from .shared import Counts

OPENMETRICS, EOF = "application/openmetrics-text", b"# EOF\n"
log = logging.getLogger(__name__)


class _SingleFamily:
    """A registry of one metric family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        """Yield the family."""
        yield self._family


class Source:
    """The metrics of the coordinator that serves in a folder. It follows the coordinator across restarts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: Tables | None = None
        self._logged = ""

    def read(self) -> ServiceMetrics | None:
        """Return a snapshot; None while no coordinator with a known table layout runs."""
        try:
            if self._tables is None or self._tables.ended():
                self._tables = Tables(self._folder)
            metrics = None if self._tables.ended() else self._tables.metrics()
        except CoordinatorUnavailable:
            self._tables = None
            return None
        except KvforgeError as error:
            if self._logged != error.message:  # once, not with every scrape
                self._logged = error.message
                log.warning("cannot read the coordinator's shared tables: %s", error.message)
            self._tables = None
            return None
        self._logged = ""
        return metrics


def routes(
    source: Source | None,
    counts: Counts | None = None,
    *,
    may_see_tenants: Callable[[Request], bool] | bool = True,
    storage: Storage | None = None,
) -> list[Route]:
    """Return the route `/metrics`.

    Args:
        source: The coordinator's metrics; None for a coordinator on another machine: the gateway there exports them.
        counts: The gateway's own counts, if any.
        may_see_tenants: Whether the sender of a request may see the names of tenants; a function may raise NotAllowed
            to refuse the scrape.
        storage: The storage, if there is one.
    """

    async def metrics(request: Request) -> Response:
        try:
            names = may_see_tenants if isinstance(may_see_tenants, bool) else may_see_tenants(request)
        except KvforgeError as error:
            return JSONResponse(openai_error(error), status_of(error), headers_of(error))
        metrics = source.read() if source is not None else None
        stored = await storage_totals(storage) if storage is not None else None
        exposition = Exposition(metrics, counts, names=names, serves=source is not None, stored=stored)
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        if content_type.startswith(OPENMETRICS):
            # The default escaping replaces the colon of vLLM's names in samples only. No name needs escaping.
            encode = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)
        body, end = [], EOF if content_type.startswith(OPENMETRICS) else b""
        for family in exposition.collect():
            body.append(encode(_SingleFamily(family)).removesuffix(end))
            await asyncio.sleep(0)  # encoding many tenants at once would stall the event streams
        return Response(b"".join([*body, end]), headers={"content-type": content_type})

    return [Route("/metrics", metrics, methods=["GET"])]
