"""A replica on this node: runs what `kvforge up` runs, and serves the fleet's gateways over the network.

After a restart it keeps its journal, its key, and its port if that is free.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kvforge.client.tables import Tables
from kvforge.fleet.messages import (
    DRAINING,
    READY,
    STARTING,
    STOPPED,
    UNREADY,
    BeginOrder,
    DrainOrder,
    NodeStatus,
    Place,
    StopOrder,
)
from kvforge.launch.console import ConsoleReporter
from kvforge.launch.settings import DRAIN_S, STOP_S, Settings
from kvforge.launch.supervisor import Supervisor
from kvforge.models.store import find, pull
from kvforge.process.signals import Signals
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK
from kvforge.protocol.messages import Health

from ..settings import ACCESS_NAME, FleetFile, parse
from .folder import KEY, Folder, reserve
from .keeper_link import KeeperLink
from .queue import QueueTime, begun_and_waited

LOOK_S = 0.5
DEADLINE_S_MIN = 0.001  # hands requests back at once


class Replica:
    """A replica, from its start to its end."""

    def __init__(self, link: KeeperLink, begin: BeginOrder, signals: Signals) -> None:
        self._link, self._begin, self._signals = link, begin, signals
        self._file = parse(begin.text)
        self._folder = Folder(self._file, begin.name)
        self._began = self._look_at = monotonic()
        self._drain_began = self._drain_until = 0.0
        self._served = self._stopping = False
        self._queue = QueueTime()
        self._tables: Tables | None = None
        self._last = NodeStatus(phase=STARTING)

    def run(self) -> int:
        """Run until ordered to stop, then remove all files.

        Raises:
            KvforgeError: The replica cannot start.
            Stopped: The processes cannot serve.
            Interrupted: A signal asked to end.
        """
        self._folder.claim()
        held, port = reserve(self._begin.address, self._folder.port)
        with held:
            self._folder.keep_port(port)
            host = f"[{self._begin.address}]" if ":" in self._begin.address else self._begin.address
            place = Place(endpoint=f"tcp://{host}:{port}", server_key=self._folder.keys().public)
            self._send_status(NodeStatus(phase=STARTING, reason="fetching the model", place=place))
            with self._signals.interrupting():
                model = model_of(self._file)
            settings = settings_of(self._file, self._folder, model, place.endpoint, self._begin.public)
            with Supervisor(settings, self._signals, ConsoleReporter(settings.log_format)) as supervisor:
                self._run(supervisor, place)
        self._folder.remove()
        self._send_status(NodeStatus(phase=STOPPED))
        return OK

    def _run(self, supervisor: Supervisor, place: Place) -> None:
        while not self._stopping:
            supervisor.turn(max(0.0, self._look_at - monotonic()), also=(self._link.fileno(),))
            self._signals.check()
            for order in self._link.orders():
                self._do(order)
            if monotonic() >= self._look_at:
                self._look(supervisor, place)
                self._look_at = monotonic() + LOOK_S

    def _do(self, order: object) -> None:
        if isinstance(order, StopOrder):
            self._stopping = True
        elif isinstance(order, DrainOrder) and not self._drain_began:
            self._drain_began = monotonic()
            self._drain_until = self._drain_began + order.deadline_s
            self._look_at = 0.0

    def _look(self, supervisor: Supervisor, place: Place) -> None:
        self._folder.touch()
        health = supervisor.health()
        self._served |= supervisor.is_ready(health)
        pids = {child.name: child.pid for child in supervisor.children}
        fields = {**self._counted(supervisor, health), "place": place, "pids": pids, "age_s": monotonic() - self._began}
        if self._drain_began:
            self._drain(supervisor, health)
            self._send_status(NodeStatus(phase=DRAINING, draining_s=monotonic() - self._drain_began, **fields))
        elif self._served and supervisor.serves(health):
            self._send_status(NodeStatus(phase=READY, **fields))
        else:
            reason = health.reason if health is not None else "its coordinator does not answer"
            phase = UNREADY if self._served else STARTING
            self._send_status(NodeStatus(phase=phase, reason=reason or "some workers do not serve", **fields))

    def _drain(self, supervisor: Supervisor, health: Health | None) -> None:
        """Drain the coordinator, and drain it again after a restart."""
        if health is not None and not health.draining:
            with suppress(KvforgeError):
                supervisor.client.drain(max(DEADLINE_S_MIN, self._drain_until - monotonic()))

    def _counted(self, supervisor: Supervisor, health: Health | None) -> dict[str, Any]:
        """Return the numbers of requests and their queueing time.

        Without an answer, the last numbers are kept: no request is known to have ended.
        """
        last = self._last
        fields = {"running": last.running, "pending": last.pending, "queue_s": last.queue_s}
        if health is None:
            return fields
        with suppress(KvforgeError):
            stats = supervisor.client.stats()
            requests = stats.requests
            fields |= {"running": requests.running, "pending": requests.pending}
            if self._tables is None or self._tables.boot != stats.boot:
                self._tables = supervisor.client.tables()
            begun, waited_us = begun_and_waited(self._tables.metrics())
            fields["queue_s"] = self._queue.look(monotonic(), begun, waited_us, requests.pending)
        return fields

    def _send_status(self, status: NodeStatus) -> None:
        self._last = status
        self._link.send_status(status)


def model_of(file: FleetFile) -> Path:
    """Return the model's path on this node, fetching it if needed.

    Raises:
        KvforgeError: There is no such model.
    """
    up = file.up
    if up.model_config is not None:
        return Path(up.model_config)
    assert up.model is not None, "checked"
    return find(up.model, weights=False) if up.worker.get("load_format") == "dummy" else pull(up.model)


def settings_of(file: FleetFile, folder: Folder, model: Path, endpoint: str, gateways_key: str) -> Settings:
    """Return the settings of `kvforge up` for a replica.

    Args:
        file: The fleet's file.
        folder: The replica's folder.
        model: The model's path.
        endpoint: The address to listen at.
        gateways_key: The public key of the gateways.
    """
    up = file.up
    gateways = {"key": gateways_key, "tenant": "*", "rights": ["submit", "read"]}
    clients = {**up.access.get("clients", {}), ACCESS_NAME: gateways}
    made_up = {"load_format": "dummy"} if up.model_config is not None else {}
    return Settings(
        model=model,
        runtime_dir=folder.runtime,
        workers=up.workers or 1,
        tensor_parallel=up.tensor_parallel or 1,
        threads=up.threads if up.threads is not None else max(1, int(file.replicas.rank_cpus)),
        devices=tuple(up.devices or ()),
        worker={**made_up, **up.worker},
        limits=up.limits,
        cache=up.cache,
        schedule=up.schedule,
        journal=up.journal,
        kv_events=up.kv_events,
        state={"durability": up.durability} if up.durability is not None else {},
        quotas=up.quotas,
        tcp={"listen": endpoint, "key_file": str(folder.path / KEY)},
        access={**up.access, "clients": clients},  # type: ignore[dict-item]
        log_level=up.log_level or "info",
        log_format=up.log_format or "text",
        log_dir=Path(up.log_dir) if up.log_dir is not None else None,
        drain_s=up.drain_s if up.drain_s is not None else DRAIN_S,
        stop_s=up.stop_s if up.stop_s is not None else STOP_S,
    )
