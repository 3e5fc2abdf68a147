"""`kvforge demo`: serve a real model end to end, in a temporary folder."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from kvforge.client.blocking import Client, Request
from kvforge.client.sampling import SamplingParams
from kvforge.launch.console import ConsoleReporter
from kvforge.launch.settings import Settings
from kvforge.launch.supervisor import Supervisor
from kvforge.models.store import pull
from kvforge.process.ending import Stopped
from kvforge.process.signals import Signals
from kvforge.protocol import transport
from kvforge.protocol.errors import InvalidConfiguration, KvforgeError
from kvforge.protocol.exits import FAILED, OK
from kvforge.protocol.messages import Stats
from kvforge.protocol.platforms import check_linux
from kvforge.text.tokenizer import Tokenizer

from . import parsing
from .progress import Progress
from .screen import screen
from .stats import hit_rate

BLOCKS = 512
STREAM_TIMEOUT_S = 120.0
STOP_S = 5.0
LOG_LINES = 15

# The first two share a prefix of more than one block, so that the second hits the first one's blocks in the cache.
_GUIDE = (
    "You are the guide of a small museum of natural history. You answer visitors in two or three plain sentences, "
    "without lists, and you never make anything up. "
)
PROMPTS: tuple[tuple[str, list[dict[str, str]]], ...] = tuple(
    (question, [{"role": "system", "content": system}, {"role": "user", "content": question}])
    for system, question in (
        (_GUIDE, "Why is the sky blue?"),
        (_GUIDE, "Why do leaves turn red in autumn?"),
        ("You are a helpful assistant.", "What is the capital of France?"),
        ("You are a helpful assistant.", "Write two lines about the sea."),
    )
)


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers, "demo", run, "Serve a small model, send it four prompts at once, show the cache, clean up."
    )
    parser.add_argument("--model", default="smollm2-135m", help="[smollm2-135m]")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="limit of each answer [48]")


def run(options: argparse.Namespace) -> int:
    """Run the demonstration."""
    check_linux("`kvforge demo`")
    return run_demo(options.model, options.max_tokens)


def run_demo(model: str, max_tokens: int) -> int:
    """Pull the model, serve it, send four prompts at once and remove all files.

    Args:
        model: The model's name or path.
        max_tokens: The limit of each answer.

    Returns:
        The exit status.

    Raises:
        KvforgeError: A call failed.
        Stopped: A process could not start.
        Interrupted: A signal asked to end.
    """
    progress = Progress()
    with Signals() as signals, _private_folder() as folder:
        with signals.interrupting():
            try:
                path = pull(model, progress=lambda phase, fraction: progress.step(model, phase, fraction))
            finally:
                progress.close()
        settings = Settings(
            model=path,
            runtime_dir=folder / "run",
            worker={"blocks": BLOCKS},
            log_dir=folder / "log",
            stop_s=STOP_S,
        )
        try:
            with Supervisor(settings, signals, ConsoleReporter()) as supervisor:
                try:
                    supervisor.wait_ready(progress.health)
                finally:
                    progress.close()
                with signals.interrupting():
                    return _ask(supervisor.endpoint, path, max_tokens)
        except (KvforgeError, Stopped):
            _show_logs(folder / "log")
            raise


def _ask(endpoint: str, model: Path, max_tokens: int) -> int:
    tokenizer = Tokenizer.load(model)
    # Wait for the first prompt's first token, so that its prefix is cached when the second one arrives.
    with Client(endpoint, stream_timeout_s=STREAM_TIMEOUT_S) as kv:
        started = monotonic()
        requests: list[Request] = []
        for _, messages in PROMPTS:
            ids = tokenizer.chat(messages)
            requests.append(kv.submit(ids, max_tokens=max_tokens, sampling=SamplingParams(temperature=0.0)))
            if len(requests) == 1:
                next(iter(requests[0]))
        _stream(kv, requests, tokenizer)
        took_s = monotonic() - started
        count = sum(len(request.result(STREAM_TIMEOUT_S).tokens) for request in requests)
        stats = kv.stats()
    _show_stats(stats, count, took_s)
    return OK if all(request.tokens for request in requests) else FAILED


def _stream(kv: Client, requests: list[Request], tokenizer: Tokenizer) -> None:
    shown = screen([question for question, _ in PROMPTS], sys.stdout)
    streams = {request.id: (index, tokenizer.stream()) for index, request in enumerate(requests)}
    try:
        for request, token in kv.merge(*requests):
            index, stream = streams[request.id]
            shown.add(index, stream.push((token.token_id,)))
            if request.done and token.offset == len(request.tokens) - 1:
                shown.add(index, stream.finish())
                shown.end(index)
    finally:
        shown.close()


def _show_stats(stats: Stats, tokens: int, took_s: float) -> None:
    blocks = sum(pool.blocks for pool in stats.pools)
    block_size = stats.pools[0].block_size if stats.pools else 0
    rows: tuple[tuple[str, object], ...] = (
        ("tokens generated", f"{tokens} in {took_s:.1f} s ({tokens / took_s:.1f} tokens/s)"),
        ("cache", f"{blocks} blocks of {block_size} tokens"),
        ("blocks used at peak", sum(pool.referenced_peak for pool in stats.pools)),
        ("blocks freed", sum(pool.freed_total for pool in stats.pools)),
        ("blocks used now", sum(pool.referenced for pool in stats.pools)),
        ("blocks cached now", sum(pool.cached for pool in stats.pools)),
        ("prefix hits", hit_rate(stats.tenants)),
    )
    print()
    for name, value in rows:
        print(f"{name:<22}{value}")


def _show_logs(folder: Path) -> None:
    for log in sorted(folder.glob("*.log")):
        for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            ConsoleReporter().child(log.stem, line)


@contextmanager
def _private_folder() -> Iterator[Path]:
    """Create a temporary folder with a path short enough for sockets; remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvforge-", dir=_short_base()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _short_base() -> Path:
    for base in (Path(tempfile.gettempdir()), Path("/tmp")):  # noqa: S108 - mkdtemp creates a private folder in it
        try:
            transport.worker_endpoint(base / "kvforge-12345678" / "run")
        except InvalidConfiguration:
            continue
        return base
    raise InvalidConfiguration("TMPDIR", "no temporary folder has a path short enough for sockets")
