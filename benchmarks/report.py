"""Reports of benchmarks: title, machine, versions and a table, and the same as JSON on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvforge.loadtest.machine import machine, table, versions

__all__ = ["machine", "report", "table", "versions"]


def report(title: str, header: Sequence[str], rows: Sequence[Sequence[object]], results: Any, path: str | None) -> None:
    """Prints title, machine, versions and table; writes `results` with them as JSON to `path` unless it is None."""
    where, what = machine(), versions()
    print(title)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(", ".join(f"{key} {value}" for key, value in what.items()))
    print(table(header, rows))
    if path is not None:
        document = {"title": title, "machine": where, "versions": what, "results": results}
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
