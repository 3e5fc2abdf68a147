"""The actor of one replica or gateway: starts its program on this node, and restarts it when it dies.

It relays status and orders without interpreting them. If it is killed, its program dies with it, by its leash; Ray then
starts another keeper, on the same node if possible.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec
import ray
import ray.util

from kvforge.fleet.messages import (
    DOCUMENT_BYTES_MAX,
    DRAINING,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    BeginOrder,
    DrainOrder,
    NodeStatus,
    Order,
    StopOrder,
    UseOrder,
    encode,
    node_status_of,
    order_of,
)
from kvforge.fleet.node.keeper_link import pair
from kvforge.launch.child import Child
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK, USAGE
from kvforge.protocol.steady_clock import monotonic

from ..node.folder import Folder
from ..settings import parse

ENTRY = Path(sys.modules["kvforge"].__file__ or "").parent / "launch" / "entry.py"
TURN_S = 0.1
# How long a program may take to end before it is killed.
STOP_S_MAX = 120.0
log = logging.getLogger(__name__)


class Keeper:
    """The actor, on the event loop of a process of Ray. `messages` defines the documents."""

    async def __init__(self, kind: str, begin: bytes) -> None:  # type: ignore[misc]  # Ray awaits it
        self._kind = kind
        order = order_of(begin)
        assert isinstance(order, BeginOrder), "the first order"
        self._begin = msgspec.structs.replace(order, address=ray.util.get_node_ip_address())
        self._life = secrets.token_hex(4)
        self._node = ray.get_runtime_context().get_node_id()
        self._ours, self._theirs = pair()
        command = [str(ENTRY), "kvforge.fleet.node", kind, "--link", str(self._theirs.fileno())]
        self._child = Child(
            f"{kind} {self._begin.name}",
            command,
            Path(tempfile.gettempdir()),
            _print,
            descriptors=(self._theirs.fileno(),),
        )
        self._status = NodeStatus(phase=STARTING, reason="its program is starting")
        self._failed_at = self._stopped_at = 0.0
        self._drain: DrainOrder | None = None
        self._start()
        self._keeping = asyncio.ensure_future(self._keep())

    async def look(self) -> bytes:
        """Return the program's status."""
        status = self._status
        failed_s = monotonic() - self._failed_at if self._failed_at else 0.0
        if self._stopped_at and status.phase != STOPPED:
            status = msgspec.structs.replace(status, phase=DRAINING, running=0, pending=0)
        elif self._drain is not None and status.phase not in (DRAINING, STOPPED, FAILED):
            # It has not received the order yet, so its requests are not known to have ended.
            status = msgspec.structs.replace(status, phase=DRAINING, running=max(1, status.running))
        pids = {**status.pids, "keeper": os.getpid(), "program": self._child.pid}
        return encode(msgspec.structs.replace(status, failed_s=failed_s, node=self._node, life=self._life, pids=pids))

    async def order(self, data: bytes) -> None:
        """Relay an order, and keep it for a program that is started later."""
        order = order_of(data)
        if isinstance(order, UseOrder):
            self._begin = msgspec.structs.replace(self._begin, text=order.text, places=order.places)
        elif isinstance(order, DrainOrder):
            self._drain = self._drain or order
        elif isinstance(order, StopOrder) and not self._stopped_at:
            self._stopped_at = monotonic()
            if not self._child.running:
                self._end()
            elif self._status.phase == STARTING:
                self._child.send(signal.SIGTERM)  # it may be loading its model and read orders only afterwards
        self._send(order)

    def _start(self) -> None:
        with suppress(BlockingIOError):  # drop orders that the previous program has not read
            while self._theirs.recv(DOCUMENT_BYTES_MAX):
                pass
        self._child.start()
        self._send(self._begin)
        if self._drain is not None:
            self._send(self._drain)

    def _send(self, order: Order) -> None:
        with suppress(BlockingIOError):
            self._ours.send(encode(order))

    async def _keep(self) -> None:
        while True:
            self._child.read()
            self._read_status()
            if (status := self._child.ended()) is not None:
                self._read_status()
                self._on_end(status)
            elif self._child.restart_at is not None and self._child.restart_at <= monotonic() and not self._stopped_at:
                self._start()
            if self._stopped_at and self._child.running and monotonic() - self._stopped_at > STOP_S_MAX:
                self._child.send(signal.SIGKILL)
            await asyncio.sleep(TURN_S)

    def _read_status(self) -> None:
        with suppress(BlockingIOError):
            while data := self._ours.recv(DOCUMENT_BYTES_MAX):
                with suppress(msgspec.ValidationError, msgspec.DecodeError):
                    self._status = node_status_of(data)
                self._child.served |= self._status.phase == READY

    def _on_end(self, status: int) -> None:
        """Handle the program's end: finish after a stop, else restart it unless that would fail again."""
        last = self._status
        if self._stopped_at:
            self._end()
            return
        how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
        reason = last.reason if last.phase == FAILED else f"its program ended ({how}): {self._child.last_words()}"
        if status in (OK, USAGE):
            self._child.given_up = True
        else:
            self._child.plan_restart()
        if self._child.given_up:
            self._failed_at = monotonic()
            self._status = NodeStatus(phase=FAILED, reason=reason, place=last.place)
            log.error("%s cannot serve: %s", self._child.name, reason)
            return
        assert self._child.restart_at is not None, "plan_restart schedules a restart"
        again_s = self._child.restart_at - monotonic()
        log.warning("%s: %s; restarting in %.1f s", self._child.name, reason, again_s)
        self._status = NodeStatus(
            phase=STARTING, reason=f"{reason} (restarting in {again_s:.1f} s)", place=last.place, url=last.url
        )

    def _end(self) -> None:
        """Finish, and remove the folder of a program that was killed or could not start."""
        if self._status.phase != STOPPED:
            with suppress(KvforgeError):
                folder = Folder(parse(self._begin.text), self._begin.name)
                folder.claim()
                folder.remove()
        self._status = NodeStatus(phase=STOPPED)


def _print(line: str) -> None:
    """Write a line to Ray's log of this actor."""
    print(line, file=sys.stderr, flush=True)
