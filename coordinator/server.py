"""The event loop: sockets in, core, tables, sockets out.

One thread and one epoll; nothing here waits for a peer. `turn.py` has the content of one turn. The wait ends when input
arrives, or when the next turn is due.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import signal
import socket as sockets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import numpy.ma  # noqa: F401 - np.unique imports it at its first call, for 50 ms in the middle of a turn

from kvforge.protocol import codec, steady_clock, token
from kvforge.protocol.errors import InvalidConfiguration, KvforgeError, StateRemoved
from kvforge.protocol.layout import Geometry, file_bytes
from kvforge.protocol.logs import log_event
from kvforge.protocol.messages import Stop
from kvforge.protocol.network import is_network
from kvforge.protocol.notify import Watchdog, notify
from kvforge.protocol.tables import TablesWriter
from kvforge.protocol.transport import (
    TABLES_FILE,
    client_endpoint,
    prepare_runtime_dir,
)

from . import access
from .config import CoordinatorConfig, geometry
from .host.garbage import GarbageCollector
from .host.replacing import Replacer
from .host.resources import check_descriptors, return_large_blocks
from .host.wake_timer import WakeTimer
from .kv_events.sockets import Sockets
from .kv_events.stream import EventStream
from .machine_store import MachineStore
from .publish import publish
from .transport.router_socket import WORKER, RouterSocket
from .transport.runtime_folder import RuntimeLock
from .turn import TurnLoop

PROGRESS_US = 3_000_000
SPIN_US, SPIN_CORES_MIN = 200, 4
PRECISE_US = 20_000  # turns that are due sooner come to the microsecond
CLIENTS_LEAVE_NS, WORKERS_LEAVE_NS = 200_000_000, 500_000_000
log = logging.getLogger("coordinator")


class GracefulStop:
    """A requested stop: requests may run until the deadline, and are then handed back. Times in microseconds."""

    def __init__(self, now_us: int, drain_us: int) -> None:
        self.deadline_us = now_us + drain_us
        self._say_us = now_us

    def over(self, turned_us: int, live: int) -> bool:
        """Return whether the wait is over.

        The turn that hands the rest back is the first one at or after the deadline, and is always run.

        Args:
            turned_us: When the last turn ran.
            live: Live requests after it.
        """
        return not live or turned_us >= self.deadline_us

    def progress(self, now_us: int, live: int) -> str | None:
        """Return a progress line for the log every few seconds, else None."""
        if now_us < self._say_us or not live:
            return None
        self._say_us = now_us + PROGRESS_US
        left = "1 request" if live == 1 else f"{live} requests"
        seconds = max(0.0, (self.deadline_us - now_us) / 1e6)
        return f"draining: {left} left, {seconds:.1f} s until the rest is handed back"

    @property
    def due_us(self) -> int:
        """When the next progress line or the end is due."""
        return min(self._say_us, self.deadline_us)


def _nothing() -> None: ...


class Server:
    """Owns the sockets, the shared tables and the machine. `run` serves until it is stopped."""

    def __init__(
        self,
        config: CoordinatorConfig,
        flush_log: Callable[[], None] = _nothing,
        discard: bool = False,
        reread: Callable[[], CoordinatorConfig] | None = None,
    ) -> None:
        """Bind the sockets, recover the state if there is any, and create the tables.

        Args:
            config: The configuration.
            flush_log: Called in each turn to write pending log lines.
            discard: Discard the state of earlier processes.
            reread: Reads the configuration again on SIGHUP, to apply its [access]; None makes SIGHUP a signal to stop.

        Raises:
            InvalidConfiguration: A setting is invalid.
            Unavailable: A folder is in use.
            JournalCorrupt: The state is damaged.
        """
        self.config, self._flush_log = config, flush_log
        self.runtime = config.runtime_path
        check_descriptors(config.descriptors)
        return_large_blocks()
        prepare_runtime_dir(self.runtime)
        # If both are the same folder, `StateFolder` locks it.
        elsewhere = config.durability == "none" or not _same(self.runtime, config.state_path)
        self._lock = RuntimeLock(self.runtime, lock_folder=elsewhere)
        self._signals = self._signals_handled = 0
        self._reread_config, self._hung_up = reread, False
        try:
            self._open_sockets()
            store = self._store = MachineStore(config, lambda: self._signals > 0, discard)
        except KvforgeError:
            self._close_sockets()
            self._lock.release()
            raise
        self.machine, self.boot, self._now_us = store.machine, store.machine.boot, store.now_us
        self._ended = False
        self._graceful_stop: GracefulStop | None = None
        self._turned_us = self._due_us = 0
        self._left_out_ns = steady_clock.left_out_ns()
        self._replacer, self._watchdog = Replacer(), Watchdog()
        self.garbage = GarbageCollector(time.monotonic_ns)
        self._spin_ns, self._arrived_ns = spin_us(config.schedule.spin_us) * 1000, 0
        self._read_wakeup, self._write_wakeup = sockets.socketpair()
        try:
            self.tables = self._make_tables(geometry(self.machine.limits))
            self._gate.token = token.make(self.runtime)
        except OSError as error:
            self._release()
            raise InvalidConfiguration("runtime_dir", f"{self.runtime} cannot be used: {error}") from None
        for peers in self._sides:
            peers.offset_us = store.offset_us
        self._epoll = select.epoll()
        self._epoll.register(self._read_wakeup, select.EPOLLIN)
        self._on_input = self.clients.watch(self._epoll) | self.workers.watch(self._epoll)
        self._wake_timer = WakeTimer()
        if self._wake_timer.descriptor >= 0:
            self._epoll.register(self._wake_timer.descriptor, select.EPOLLIN)
            self._on_input[self._wake_timer.descriptor] = self._wake_timer.ended
        entropy, kept = partial(secrets.randbits, 64), (self._replacer, store.journal)
        self._turns = TurnLoop(
            self.machine,
            self.tables,
            self.clients,
            self.workers,
            entropy,
            self._now_us,
            config.limits,
            *kept,
            self._gate,
            self._make_event_stream(),
        )
        if store.again:
            self._turns.restarted(self._now_us())

    def _open_sockets(self) -> None:
        """Open the sockets, or raise InvalidConfiguration.

        This precedes the recovery, which may take seconds, so that returning peers wait instead of retrying.
        """
        self._event_sockets: Sockets | None = None
        self._sides: list[RouterSocket] = []
        config, runtime = self.config, self.runtime
        gate = self._gate = access.Gate("", config.access)
        endpoints = access.client_endpoints(runtime, config.tcp, gate)
        self.clients = RouterSocket(
            endpoints, self._next_number, config.client_limits(), together=True, rates=gate.rate
        )
        self._sides.append(self.clients)
        endpoints = access.worker_endpoints(runtime, config.tcp, gate)
        self.workers = RouterSocket(endpoints, self._next_number, config.worker_limits(), WORKER, self._silent)
        self._sides.append(self.workers)

        self._event_sockets = Sockets(config.kv_events) if config.kv_events.publish else None

    def _make_event_stream(self) -> EventStream | None:
        """Create the KV event stream, if configured."""
        event_sockets = self._event_sockets
        if event_sockets is None:
            return None
        if (descriptor := event_sockets.request_descriptor()) is not None:
            self._epoll.register(descriptor, select.EPOLLIN)
            self._on_input[descriptor] = event_sockets.note_input
        return EventStream(self.machine, event_sockets, self.config.kv_events, time.time)

    def _next_number(self) -> int:
        return self._store.next_number()

    def _close_sockets(self) -> None:
        if self._event_sockets is not None:
            self._event_sockets.close()
        for peers in self._sides:
            peers.close()

    def _make_tables(self, geometry: Geometry) -> TablesWriter:
        """Create the shared tables, with all their space reserved. Raise InvalidConfiguration or OSError."""
        try:
            return TablesWriter(self.runtime / TABLES_FILE, geometry, self.boot, self._fill)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._release()
            raise InvalidConfiguration(
                "runtime_dir",
                f"{self.runtime} has no room for the shared tables, {file_bytes(geometry)} bytes ({error.strerror}): "
                "make room there, or lower limits.sequences_max, blocks_max or blocks_per_sequence_max",
            ) from None

    def _fill(self, tables: TablesWriter) -> None:
        publish(self.machine, tables, self._now_us())

    def _release(self) -> None:
        self._close_sockets()
        self._store.close(ended=not self._store.again)
        self._lock.release()

    def _silent(self, worker: int) -> None:
        """Replace the process of a worker that was disconnected for silence; it may be suspended, for example."""
        self._replacer.silent(
            worker, f"nothing came from it for {self.config.limits.idle_timeout_s:g} s", self._now_us()
        )

    # ----------------------------------------------------------------------------------------------------------- loop

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Depending on `on_stop`, it then drains (requests end within `drain_s`, workers are stopped) or leaves everything
        to the next start. A second signal ends it immediately.

        Raises:
            StateRemoved: The state folder was removed while serving.
        """
        self._catch_signals()
        notify("READY=1", "STATUS=accepting clients and workers")
        log_event(log, "info", f"serving at {client_endpoint(self.runtime)} (boot {self.boot[:8]})", "serving")
        for peers in (self.clients, self.workers):
            for endpoint in filter(is_network, peers.endpoints):
                log.info("serving %ss listed in [access] at %s", peers.kind, endpoint)
        self.garbage.start()
        try:
            self._serve()
        except StateRemoved as error:
            log.error("%s", error)
            raise StateRemoved(str(self.config.state_path), self._store.rebuild()) from error
        finally:
            self.garbage.stop()
        if self._keeps:
            log.info("stopped; the next start resumes %d requests", len(self.machine.requests.live))
        else:
            self._stop_workers()
        self._ended = True

    def _serve(self) -> None:
        while not self._finished():
            arrived = self._wait()
            self._handle_signals()
            self.turn()
            self.garbage.turn(idle=not arrived)
        if not self._keeps:
            self._let_leave(self.clients, CLIENTS_LEAVE_NS)

    def _wait(self) -> bool:
        """Wait until input arrives or a turn is due. Return whether input arrived.

        Input often comes in bursts, and waking a sleeping core takes longer than a turn: after input, the loop polls
        for `spin_us` before it sleeps. An idle coordinator sleeps. If messages are left over or a turn is due, it polls
        once, so that busy peers cannot starve the others.
        """
        if self._look(0):
            self._arrived_ns = time.monotonic_ns()
            return True
        spin_until_ns = self._arrived_ns + self._spin_ns
        while (now_ns := time.monotonic_ns()) < spin_until_ns:
            if self._look(0):
                self._arrived_ns = now_ns
                return True
            if self._wait_ms() == 0:
                return False
        while (wait_ms := self._wait_ms()) > 0:
            if (due_us := self._due_us - self._now_us()) < PRECISE_US:
                self._wake_timer.arm(due_us)
            if self._look(wait_ms):
                self._arrived_ns = time.monotonic_ns()
                return True
            if self._signals > self._signals_handled or self._hung_up:
                return False
        return False

    def _look(self, wait_ms: int) -> bool:
        """Poll for at most `wait_ms`. Return whether input arrived; heartbeats alone do not count."""
        for descriptor, _ in self._epoll.poll(wait_ms / 1000):
            note_input = self._on_input.get(descriptor)
            if note_input is not None:
                note_input()
        requested = self._event_sockets is not None and self._event_sockets.waiting
        return requested or self.clients.waiting or self.workers.waiting

    def _let_leave(self, peers: RouterSocket, wait_ns: int) -> None:
        """Give peers a moment to read the last messages and disconnect."""
        end_ns = steady_clock.monotonic_ns() + wait_ns
        while len(peers) and (left_ns := end_ns - steady_clock.monotonic_ns()) > 0:
            self._look(-(-left_ns // 1_000_000))
            self._handle_signals()
            self.turn()

    def turn(self) -> None:
        """Run one turn of the loop, without waiting."""
        self._turned_us = self._now_us()
        if (left_out_ns := steady_clock.left_out_ns()) > self._left_out_ns:
            stood_s, self._left_out_ns = (left_out_ns - self._left_out_ns) / 1e9, left_out_ns
            words = f"this process was suspended for {stood_s:.1f} s, which counts against no peer"
            log_event(log, "warning", words, "stood_still", {"seconds": stood_s})
            self._turns.stood_still(self._turned_us)
        self._watchdog.feed(time.monotonic_ns() // 1000)  # systemd's clock continues during a suspension
        self._due_us = self._turns.turn(self._turned_us)
        self._store.turned(self._turned_us)
        self._flush_log()

    def _wait_ms(self) -> int:
        """Return how long to sleep without input, rounded up because an early turn would find no work.

        `_wake_timer` ends short waits in time.
        """
        due_us = self._due_us if self._graceful_stop is None else min(self._due_us, self._graceful_stop.due_us)
        return max(0, -(-(due_us - self._now_us()) // 1000))

    def _finished(self) -> bool:
        if self._graceful_stop is None:
            return False
        if self._keeps:
            return True
        return self._signals > 1 or self._graceful_stop.over(self._turned_us, len(self.machine.requests.live))

    # ----------------------------------------------------------------------------------------------------- termination

    def _catch_signals(self) -> None:
        self._write_wakeup.setblocking(False)
        self._read_wakeup.setblocking(False)
        signal.set_wakeup_fd(self._write_wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, self._on_signal if self._reread_config is None else self._on_hangup)

    def _on_hangup(self, _number: int, _frame: FrameType | None) -> None:
        self._hung_up = True

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1  # nothing else: a turn may be running

    def _handle_signals(self) -> None:
        now_us = self._now_us()
        if self._hung_up or self._signals > self._signals_handled:
            with suppress(BlockingIOError):
                self._read_wakeup.recv(1024)
        if self._hung_up:
            self._hung_up = False
            self._reread_access()
        if self._signals > self._signals_handled:
            self._signals_handled = self._signals
            if self._graceful_stop is None:
                self._graceful_stop = GracefulStop(now_us, int(self.config.drain_s * 1e6))
                if not self._keeps:
                    self._turns.begin_drain(now_us, self._graceful_stop.deadline_us)
                notify("STOPPING=1", "STATUS=draining")
        if self._graceful_stop is None or self._keeps:
            return
        if words := self._graceful_stop.progress(now_us, len(self.machine.requests.live)):
            log.info("%s", words)
            notify(f"STATUS={words}")

    def _reread_access(self) -> None:
        """Reload [access], and disconnect peers that it no longer permits. All other settings stay."""
        assert self._reread_config is not None
        try:
            read = self._reread_config().access
            of_client, of_worker = self._gate.reread(read)
        except InvalidConfiguration as error:
            log.error("cannot reload the configuration, [access] stays unchanged: %s", error)
            return
        self.clients.end_where(of_client)
        self.workers.end_where(of_worker)
        log.info("reloaded [access]: %d clients, %d workers", len(read.clients), len(read.workers))

    @property
    def _keeps(self) -> bool:
        """Whether a stop leaves everything to the next start."""
        return self.config.on_stop == "keep"

    def _stop_workers(self) -> None:
        for number in list(self.machine.workers):
            self.workers.send(number, codec.encode(Stop(reason="the coordinator is stopping")))
        self._let_leave(self.workers, WORKERS_LEAVE_NS)
        log.info("stopped; %d requests were left unfinished", len(self.machine.requests.live))
        collected = (self.garbage.collections, self.garbage.longest_us, self.garbage.total_us)
        log.debug("%d garbage collections, the longest %.0f us, %.0f us together", *collected)

    def close(self) -> None:
        """Remove sockets, tables and lock. Idempotent."""
        signal.set_wakeup_fd(-1)
        self._replacer.close()
        self._epoll.close()
        self._wake_timer.close()
        self._close_sockets()
        self.tables.close()
        self._read_wakeup.close()
        self._write_wakeup.close()
        if self._lock.covers(self.runtime):
            (self.runtime / token.TOKEN_FILE).unlink(missing_ok=True)
        self._store.close(self._ended)
        self._lock.release()


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # it does not exist yet
        return one.absolute() == other.absolute()


def spin_us(configured: int) -> int:
    """Return how long to poll before sleeping; -1 chooses 0 on machines with few cores."""
    if configured >= 0:
        return configured
    return SPIN_US if len(os.sched_getaffinity(0)) >= SPIN_CORES_MIN else 0
