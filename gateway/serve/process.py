"""One process that serves a port."""

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
YOUNG_OBJECTS = 20_000  # made and not freed, until Python looks through them for cycles


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to us."""

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
    """Serves until SIGTERM or SIGINT; then streams may end within `drain_s`. counted, patience_s: as in `make_app`.

    again: reads the settings, of which [keys] and [replicas] are taken at SIGHUP. Raises KvforgeError: then all stays
    as it was.
    """
    early: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: early.append(number))  # until the loop is there that can do it
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
    if soft != hard:  # a stream is a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvicorns = logging.getLogger("uvicorn.error")
    uvicorns.addFilter(_untraced)
    if log.getEffectiveLevel() > logging.DEBUG:  # its steps of starting and ending matter to those who debug
        uvicorns.setLevel(logging.WARNING)
    server = _Server(config)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        loop = runner.get_loop()

        def end() -> None:
            log.info("stopping: streams may end within %g s", settings.drain_s)
            server.force_exit = server.should_exit
            server.should_exit = app.state.ending = True

        def read_again() -> None:
            try:
                changed = again()
                app.state.use(changed)
                access.use(changed)
            except KvforgeError as error:
                print(f"gateway: the keys stay as they were, and the replicas: {error}", file=sys.stderr, flush=True)

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
    """A stream that has not ended within `drain_s` is cut off, which uvicorn has said: that is no fault of the code."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        record.msg, record.args, record.exc_info = "a request was cut off as the gateway ended", (), None
    return True


def _freeze() -> None:
    """What lives now, modules and a tokenizer above all, is not looked through by each full collection: all streams
    would wait for that. What a former model left is collected first. And as requests leave next to no cycles, young
    objects are looked through less often than Python would by itself."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def _feed(loop: asyncio.AbstractEventLoop, watchdog: Watchdog) -> None:
    """A loop that hangs does not come by."""
    watchdog.feed(round(loop.time() * 1e6))
    loop.call_later(watchdog.every_us / 1e6, _feed, loop, watchdog)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    if sys.platform not in ("linux", "darwin"):
        return None
    import uvloop

    return uvloop.Loop
