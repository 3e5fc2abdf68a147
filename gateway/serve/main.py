"""The command `python -m kvforge.gateway`: one process, or several on one port with this one above them."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from kvforge.gateway.access import Access
from kvforge.gateway.access.rates import SharedRates
from kvforge.gateway.config import GENERATE, SEE, Settings, load_settings
from kvforge.launch.child import Child
from kvforge.launch.listener import listening, url_of
from kvforge.process.installation import install_command
from kvforge.process.parser import Parser
from kvforge.process.signals import Signals
from kvforge.protocol import logs
from kvforge.protocol.errors import KvforgeError, Unavailable
from kvforge.protocol.exits import OK, UNAVAILABLE, status_of
from kvforge.protocol.notify import Watchdog, notify
from kvforge.protocol.readiness import readable
from kvforge.protocol.steady_clock import monotonic

from .check import check_settings, effective_settings

TURN_S, DRAIN_TURN_S = 1.0, 0.1
KILL_S = 5.0
# A child that ran this long did not fail because of its settings.
SERVED_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal stops the process.

    Returns:
        The exit status, one of `protocol.exits`.
    """
    parser = Parser(prog="python -m kvforge.gateway", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="gateway.toml")
    parser.add_argument("--runtime-dir", help="the directory of the coordinator's socket")
    parser.add_argument("--state-dir", help="the directory of stored responses and conversations")
    parser.add_argument("--host", help="[127.0.0.1]")
    parser.add_argument("--port", type=int, help="0 picks a free port [8000]")
    parser.add_argument("--processes", type=int, metavar="N", help="[1]")
    parser.add_argument("--name", dest="names", action="append", help="a model name that requests may use")
    # Used by `kvforge up`; the options without `default` and the file take precedence.
    parser.add_argument("--default-state-dir", help=argparse.SUPPRESS)
    parser.add_argument("--default-name", dest="default_names", action="append", help=argparse.SUPPRESS)
    # Hashes of further API keys, one a line: `kvforge up --api-key`.
    parser.add_argument("--key-hashes", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="print the effective settings as JSON and exit")
    parser.add_argument("--listen", type=int, help=argparse.SUPPRESS)  # a listening socket's descriptor
    parser.add_argument("--rates", type=Path, help=argparse.SUPPRESS)
    # The supervising process kills this one soon after its own drain has ended.
    parser.add_argument("--drain-max-s", type=float, help=argparse.SUPPRESS)
    # With an inherited socket, connections wait this long for the model to be known.
    parser.add_argument("--patience", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        settings = settings_of(options)
        check_settings(settings)
        if options.check:
            print(json.dumps(effective_settings(settings)))
            return OK
        logs.configure("gateway", settings.log_level, settings.log_format)
        listener = (
            socket.socket(fileno=options.listen)
            if options.listen is not None
            else listening(settings.host, settings.port)
        )
        if options.listen is None:
            print(f"serving at {url_of(settings.host, listener)}", flush=True)
        return _serve(options, settings, listener)
    except ImportError as error:
        print(f"gateway: missing packages ({error}): {install_command('gateway')}", file=sys.stderr)
        return UNAVAILABLE
    except KvforgeError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return status_of(error)


def settings_of(options: argparse.Namespace) -> Settings:
    """Return the settings of the file, overridden by the options.

    Raises:
        InvalidConfiguration: A setting is invalid.
    """
    settings = load_settings(options.config, _more_keys(options.key_hashes))
    given = {name: getattr(options, name) for name in ("runtime_dir", "state_dir", "host", "port", "processes")}
    given["state_dir"] = options.state_dir or (options.default_state_dir if not settings.state_dir else None)
    given["names"] = options.names or (options.default_names if not settings.names else None)
    if options.drain_max_s is not None:
        given["drain_s"] = min(settings.drain_s, options.drain_max_s)
    changes = {name: value for name, value in given.items() if value is not None}
    return msgspec.convert({**msgspec.structs.asdict(settings), **changes}, Settings) if changes else settings


def _more_keys(hashes: Path | None) -> dict[str, dict[str, Any]]:
    """Return entries of [keys] for a file with one hash a line."""
    lines = hashes.read_text(encoding="utf-8").split() if hashes is not None else []
    return {f"api-key-{at}": {"hash": text, "rights": [GENERATE, SEE]} for at, text in enumerate(lines, 1)}


def _serve(options: argparse.Namespace, settings: Settings, listener: socket.socket) -> int:
    if settings.processes > 1:
        with tempfile.TemporaryDirectory(prefix="kvforge-gateway-") as folder, Signals() as signals:
            _Children(options, settings, listener, Path(folder)).run(signals)
        return OK
    from .process import serve

    with tempfile.TemporaryDirectory(prefix="kvforge-gateway-") as folder:
        shared = options.rates or Path(folder) / "rates"
        rates = SharedRates(shared)
        access = Access(settings, rates)

        def again() -> Settings:
            changed = settings_of(options)
            check_settings(changed)
            return changed

        try:
            serve(settings, listener, access, shared.with_name("requests"), again, options.patience)
        finally:
            rates.close()
    return OK


class _Children:
    """The children of a port. They accept from one shared socket, so pending connections survive a child's crash."""

    def __init__(self, options: argparse.Namespace, settings: Settings, listener: socket.socket, folder: Path) -> None:
        entry = Path(sys.modules["kvforge"].__file__ or "").parent / "launch" / "entry.py"
        command = [str(entry), "kvforge.gateway", *_passed(options), "--processes", "1"]
        command += ["--listen", str(listener.fileno()), "--rates", str(folder / "rates")]
        self._drain_s = settings.drain_s
        self._began: dict[str, float] = {}
        self._watchdog = Watchdog()  # systemd watches this process, not the children
        self._children = [
            Child(f"gateway-{at}", command, folder, _print, descriptors=(listener.fileno(),))
            for at in range(settings.processes)
        ]

    def run(self, signals: Signals) -> None:
        """Supervise the children until a signal arrives. Raises Unavailable if a child keeps failing."""

        def pass_on(number: int, frame: object) -> None:  # noqa: ARG001
            for child in self._children:
                child.send(signal.SIGHUP)

        signal.signal(signal.SIGHUP, pass_on)
        for child in self._children:
            self._start(child)
        notify("READY=1")
        try:
            while not signals.count:
                self._wait(signals, TURN_S)
                self._restart()
        finally:
            self._end(signals)

    def _start(self, child: Child) -> None:
        child.start()
        self._began[child.name] = monotonic()

    def _wait(self, signals: Signals, wait_s: float) -> None:
        self._watchdog.feed(time.monotonic_ns() // 1000)  # CLOCK_MONOTONIC, as systemd expects
        outputs = {child.output: child for child in self._children if child.output >= 0}
        for ready in readable([signals.fileno(), *outputs], wait_s):
            if ready == signals.fileno():
                signals.clear()
            else:
                outputs[ready].read()

    def _restart(self) -> None:
        for child in self._children:
            child.served |= child.running and monotonic() - self._began[child.name] > SERVED_S
            if child.ended() is not None:
                child.plan_restart()
                if child.given_up:
                    raise Unavailable(f"{child.name} keeps failing: {child.last_words()}")
            elif child.restart_at is not None and child.restart_at <= monotonic():
                self._start(child)

    def _end(self, signals: Signals) -> None:
        """Let the streams drain; a second signal ends them at once."""
        for child in self._children:
            child.send(signal.SIGTERM)
        deadline = monotonic() + self._drain_s + KILL_S
        while any(child.running for child in self._children) and monotonic() < deadline and signals.count < 2:
            self._wait(signals, DRAIN_TURN_S)
            for child in self._children:
                child.ended()
        for child in self._children:
            child.send(signal.SIGKILL)
            child.wait(monotonic() + KILL_S)


def _passed(options: argparse.Namespace) -> list[str]:
    """Return the command line options for a child."""
    given: list[str] = []
    for name in ("config", "runtime_dir", "state_dir", "default_state_dir", "host", "port", "key_hashes"):
        if (value := getattr(options, name)) is not None:
            given += [f"--{name.replace('_', '-')}", str(value)]
    if options.drain_max_s is not None:
        given += ["--drain-max-s", str(options.drain_max_s)]
    if options.patience:
        given += ["--patience", str(options.patience)]
    for option, several in (("name", options.names), ("default-name", options.default_names)):
        for name in several or ():
            given += [f"--{option}", name]
    return given


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
