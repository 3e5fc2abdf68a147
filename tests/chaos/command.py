"""What the programs of this folder share: a folder and a database of their own, and a report."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvforge.loadtest.machine import machine, versions
from tests.gateway.storage.postgres_server import PostgresServer

Log = Callable[[str], None]


@contextmanager
def storage(name: str, *, postgres: bool) -> Iterator[tuple[str, Path]]:
    """Yield the URL of an empty database and a folder, which are removed afterwards."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kvforge-{name}-")))
        url = f"sqlite:{folder}/stored.sqlite"
        if postgres:
            url = stack.enter_context(PostgresServer()).new_database()
        yield url, folder


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", action="store_true", help="instead of SQLite")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    return parser


def log(words: str) -> None:
    """Print progress."""
    print(words, flush=True)


def show(title: str, report: dict[str, Any], file: Path | None) -> int:
    """Print a report, and write it to a file if one is given. Return exit status 1 if it has faults."""
    print(json.dumps(report, indent=1))
    if file is not None:
        document = {"title": title, "machine": machine(), "versions": versions(), "results": report}
        file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if report["faults"] else 0
