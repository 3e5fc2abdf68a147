"""One process that serves a port: uvicorn with our signal handling, reload and drain."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from kvforge.gateway.access import Access
from kvforge.gateway.app import make_app
from kvforge.gateway.config import Settings
from kvforge.launch.listener import BACKLOG
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.notify import Watchdog, notify

from .protocol import protocol_of

log = logging.getLogger("gateway")
YOUNG_OBJECTS = 20_000  # the garbage collector's threshold of generation 0


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        notify("READY=1")


def serve(
    settings: Settings,
    listener: socket.socket,
    access: Access,
    counted: Path | None,
    again: Callable[[], Settings],
    patience_s: float = 0.0,
) -> None:
    """Serve until SIGTERM or SIGINT; open streams then have `drain_s` to end.

    Args:
        settings: The settings.
        listener: The listening socket.
        access: API keys and rate limits.
        counted: As in `make_app`.
        again: Reads the settings again at SIGHUP, for [keys] and [replicas]. If it raises KvforgeError, the old ones
            stay.
        patience_s: As in `make_app`.
    """
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))  # handled once the event loop runs
    app = make_app(settings, access, counted, _freeze, patience_s)
    config = uvicorn.Config(
        app,
        http=protocol_of(settings),
        lifespan="on",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=int(settings.drain_s),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # each stream needs a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.addFilter(_untraced)
    if log.getEffectiveLevel() > logging.DEBUG:  # uvicorn logs each step of startup and shutdown
        uvicorns.setLevel(logging.WARNING)
    server = _Server(config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        loop = runner.get_loop()

        def end() -> None:
            log.info("stopping: open streams have %g s to end", settings.drain_s)
            server.force_exit = server.should_exit
            server.should_exit = app.state.ending = True

        def read_again() -> None:
            try:
                changed = again()
                app.state.use(changed)
                access.use(changed)
            except KvforgeError as error:
                print(
                    f"gateway: reload failed, the old keys and replicas stay in use: {error}",
                    file=sys.stderr,
                    flush=True,
                )

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end)
        loop.add_signal_handler(signal.SIGHUP, read_again)
        if early:
            loop.call_soon(read_again)
        watchdog = Watchdog()
        if watchdog.every_us:
            loop.call_soon(_feed, loop, watchdog)
        runner.run(server.serve([listener]))


def _untraced(record: logging.LogRecord) -> bool:
    """Drop the traceback of a request that was cut off at the end of the drain: it is not a bug."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        record.msg, record.args, record.exc_info = "a request was cut off by the shutdown", (), None
    return True


def _freeze() -> None:
    """Exempt the loaded modules from garbage collection: its full runs would stall all streams.

    Garbage of a previous model is collected first. Requests leave few cycles, so young objects are collected less often
    than by default.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _feed(loop: asyncio.AbstractEventLoop, watchdog: Watchdog) -> None:
    """Feed the watchdog from the event loop, so that a hanging loop is noticed."""
    watchdog.feed(round(loop.time() * 1e6))
    loop.call_later(watchdog.every_us / 1e6, _feed, loop, watchdog)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform not in ("linux", "darwin"):
        return None
    import uvloop

    return uvloop.Loop
