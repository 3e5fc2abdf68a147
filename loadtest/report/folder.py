"""The folder of a report: index.html, its pictures, result.json, and requests.csv with the raw data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..drive.outcome import RunResult
from . import sweep as sweeping
from .page import page
from .pictures import pictures
from .result import NAME, REQUESTS, encoded, requests, save

PAGE = "index.html"


def write(
    folder: Path,
    document: dict[str, Any],
    measured: RunResult | None,
    *,
    compare: dict[str, Any] | None = None,
    sweep: dict[str, Any] | None = None,
) -> None:
    """Write the report. Existing files of these names are replaced atomically; other files are kept.

    Args:
        folder: The folder, created if missing.
        document: The document.
        measured: The raw data for requests.csv; None to skip it.
        compare: The result of `compare.compare`, stored in result.json as `compare`.
        sweep: The result of `sweep.sweep`, stored in result.json as `sweep`.

    Raises:
        OSError: A file cannot be written.
        Unavailable: The extra `loadtest` is missing.
    """
    found = dict(document)
    if compare is not None:
        found["compare"] = compare
    if sweep is not None:
        found["sweep"] = sweep
    folder.mkdir(parents=True, exist_ok=True)
    # Write the data first: pictures can be redrawn.
    save(folder / NAME, encoded(found))
    if measured is not None:
        save(folder / REQUESTS, requests(measured.outcomes))
    drawn = pictures(found)
    if sweep is not None and sweep["points"]:
        drawn.append(sweeping.picture(sweep))
    for picture in drawn:
        save(folder / f"{picture.name}.png", picture.png)
    save(folder / PAGE, page(found, drawn, compare=compare, sweep=sweep).encode())
