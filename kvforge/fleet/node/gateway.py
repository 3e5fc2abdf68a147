"""A gateway on this node: runs `python -m kvforge.gateway` over the fleet's replicas, at one port.

This program owns the listening socket: if the serving process dies, clients that connect meanwhile wait there. The
process learns of other replicas by SIGHUP. For other settings, a new process takes over the socket while the old one
finishes its streams.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kvforge.fleet.messages import (
    DRAINING,
    READY,
    STARTING,
    STOPPED,
    UNREADY,
    BeginOrder,
    NodeStatus,
    StopOrder,
    UseOrder,
)
from kvforge.launch.child import Child
from kvforge.launch.listener import listening, url_of
from kvforge.launch.settings import toml
from kvforge.process.ending import Stopped
from kvforge.process.signals import Signals
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK, UNAVAILABLE, USAGE
from kvforge.protocol.readiness import readable

from ..settings import parse
from .folder import Folder
from .keeper_link import KeeperLink

ENTRY = Path(sys.modules["kvforge"].__file__ or "").parent / "launch" / "entry.py"
LOOK_S, ASK_S = 0.5, 1.0
PATIENCE_S = 30.0  # until then, requests wait for a known model instead of failing
DRAIN_S, KILL_S = 30.0, 5.0  # DRAIN_S is the default of gateway.toml
EVERY_HOST = ("0.0.0.0", "::", "")  # noqa: S104 - compared with


class Gateway:
    """A gateway, from its start to its end."""

    def __init__(self, link: KeeperLink, begin: BeginOrder, signals: Signals) -> None:
        self._link, self._begin, self._signals = link, begin, signals
        self._text, self._places = begin.text, dict(begin.places)
        self._file = parse(begin.text)
        self._folder = Folder(self._file, begin.name)
        self._began = self._look_at = monotonic()
        self._listener: socket.socket | None = None
        self._child: Child | None = None
        self._leaving: list[Child] = []  # their streams end
        self._started_with = self._written = ""  # the settings of the running process, without replicas; its file
        self._count = 0
        self._hup = self._stopping = self._served = False
        self._kill_at = 0.0

    def run(self) -> int:
        """Run until ordered to stop, then remove all files.

        Raises:
            KvforgeError: The gateway cannot start.
            Stopped: No process can serve.
            Interrupted: A signal asked to end.
        """
        self._folder.claim()
        # Children inherit this: SIGHUP must not end a process that cannot reload its file yet.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        own = self._file.gateways
        try:
            self._listener = self._listen(own.host, own.port)
            self._folder.keep_port(self._listener.getsockname()[1])
            self._folder.put_keys(self._begin.public, self._begin.secret)
            while not (self._stopping and self._all_ended()):
                self._turn()
        finally:
            for child in self._children:
                child.send(signal.SIGKILL)
                child.wait(monotonic() + KILL_S)
            if self._listener is not None:
                self._listener.close()
        self._folder.remove()
        self._link.send_status(NodeStatus(phase=STOPPED))
        return OK

    def _listen(self, host: str, port: int) -> socket.socket:
        """Listen at the configured port, or at the previous one if any port will do. Raises KvforgeError."""
        if not port and self._folder.port:
            with suppress(KvforgeError):
                return listening(host, self._folder.port, "gateways.port")
        return listening(host, port, "gateways.port")

    @property
    def url(self) -> str:
        """Return the URL for clients on other machines."""
        assert self._listener is not None, "the gateway listens"
        host = self._file.gateways.host
        shown = self._begin.address if host in EVERY_HOST else host
        return url_of(f"[{shown}]" if ":" in shown else shown, self._listener)

    # ------------------------------------------------------------------------------------------------------ one turn

    @property
    def _children(self) -> list[Child]:
        return [*([self._child] if self._child is not None else []), *self._leaving]

    def _all_ended(self) -> bool:
        return not any(child.running for child in self._children)

    def _turn(self) -> None:
        """Wait for an event, and perform what is due. Raises Stopped if no process can serve."""
        outputs = {child.output: child for child in self._children if child.output >= 0}
        waiting = [self._signals.fileno(), self._link.fileno(), *outputs]
        for ready in readable(waiting, max(0.0, self._look_at - monotonic())):
            if ready == self._signals.fileno():
                self._signals.clear()
            elif ready in outputs:
                outputs[ready].read()
        self._signals.check()
        for order in self._link.orders():
            self._do(order)
        self._tend()
        if monotonic() >= self._look_at:
            self._look()
            self._look_at = monotonic() + LOOK_S

    def _do(self, order: object) -> None:
        if isinstance(order, UseOrder):
            self._text, self._places = order.text, order.places
            self._file = parse(order.text)
            self._look_at = 0.0
        elif isinstance(order, StopOrder) and not self._stopping:
            self._stopping = True
            self._kill_at = monotonic() + self._drain_s + KILL_S
            for child in self._children:
                child.send(signal.SIGTERM)
            self._look_at = 0.0

    @property
    def _drain_s(self) -> float:
        return float(self._file.gateway.get("drain_s", DRAIN_S))

    def _tend(self) -> None:
        if self._stopping:
            for child in self._children:
                child.ended()
                if monotonic() >= self._kill_at:
                    child.send(signal.SIGKILL)
            return
        for leaving in list(self._leaving):
            if leaving.ended() is not None or not leaving.running:
                self._leaving.remove(leaving)
        if self._places:
            self._write()
        serving = self._child
        if serving is None:
            return
        if (status := serving.ended()) is not None:
            if status in (USAGE, UNAVAILABLE):
                raise Stopped(status, serving.last_words())
            serving.plan_restart()
            if serving.given_up:
                raise Stopped(UNAVAILABLE, f"its process keeps ending: {serving.last_words()}")
        elif serving.restart_at is not None and serving.restart_at <= monotonic():
            serving.start()

    # ------------------------------------------------------------------------------------------------- its process

    def _write(self) -> None:
        """Update the file, and make sure that a process serves by it."""
        settings = toml(*_parted(self._file.gateway))
        text = settings + toml({}, {"replicas": self._tables()})
        if settings != self._started_with or self._child is None:
            self._put(text)
            self._succeed(settings)
        elif text != self._written:
            self._put(text)
            self._hup = True
        if self._hup and self._child is not None and self._child.served:  # before that, a signal would end it
            self._child.send(signal.SIGHUP)
            self._hup = False

    def _put(self, text: str) -> None:
        whole = self._folder.path / "gateway.toml.new"
        whole.write_text(text, encoding="utf-8")
        whole.replace(self._folder.path / "gateway.toml")
        self._written = text

    def _succeed(self, settings: str) -> None:
        """Start another process on the socket; the previous one ends after its streams."""
        assert self._listener is not None, "it listens"
        if self._child is not None:
            self._child.send(signal.SIGTERM)
            self._leaving.append(self._child)
        self._count += 1
        command = [str(ENTRY), "kvforge.gateway", "--config", str(self._folder.path / "gateway.toml")]
        command += ["--host", self._file.gateways.host, "--listen", str(self._listener.fileno())]
        command += ["--patience", str(PATIENCE_S)]
        name = "gateway" if self._count == 1 else f"gateway-{self._count}"
        self._child = Child(name, command, self._folder.temporary, _print, descriptors=(self._listener.fileno(),))
        self._child.start()
        self._started_with, self._hup = settings, False

    def _tables(self) -> dict[str, dict[str, str]]:
        key_file = str(self._folder.path / "own.key")
        return {
            name: {"endpoint": place.endpoint, "server_key": place.server_key, "key_file": key_file}
            for name, place in sorted(self._places.items())
        }

    # -------------------------------------------------------------------------------------------------- its status

    def _look(self) -> None:
        self._folder.touch()
        age_s = monotonic() - self._began
        pids = {child.name: child.pid for child in self._children if child.pid}
        if self._stopping:
            self._link.send_status(NodeStatus(phase=DRAINING, age_s=age_s, url=self.url, pids=pids))
            return
        health = self._health()
        if health is not None and self._child is not None:
            self._child.served = True
        replicas: dict[str, dict[str, Any]] = health.get("replicas", {}) if health is not None else {}
        ready = health is not None and bool(health.get("ready"))
        self._served |= ready
        reason = "" if ready else self._why_not(health)
        if replicas and self._child is not None and set(replicas) != set(self._places):
            self._hup = True  # it has not received the signal yet
        self._link.send_status(
            NodeStatus(
                phase=READY if ready else UNREADY if self._served else STARTING,
                reason=reason,
                age_s=age_s,
                url=self.url,
                ready=tuple(name for name, each in replicas.items() if each["ready"]),
                used=tuple(replicas),
                pids=pids,
            )
        )

    def _why_not(self, health: Mapping[str, Any] | None) -> str:
        if not self._places:
            return "no replica yet"
        return str(health.get("reason")) if health is not None else "it does not answer yet"

    def _health(self) -> dict[str, Any] | None:
        """Return the answer of /health, None if there is none."""
        if self._child is None or not self._child.running:
            return None
        assert self._listener is not None, "it listens"
        host = self._file.gateways.host
        url = f"{url_of(f'[{host}]' if ':' in host else host, self._listener)}/health"
        try:
            with urllib.request.urlopen(url, timeout=ASK_S) as answer:  # noqa: S310 - this program's own URL
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            with suppress(ValueError, OSError):
                return dict(json.load(error))
        except (OSError, ValueError):
            pass
        return None


def _parted(table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a document, and its tables."""
    tables = {name: value for name, value in table.items() if isinstance(value, Mapping)}
    return {name: value for name, value in table.items() if name not in tables}, tables


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
