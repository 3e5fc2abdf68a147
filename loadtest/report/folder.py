"""The folder of a report: index.html, its pictures, result.json, and requests.csv with what it was all made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..drive.outcome import Measured
from . import sweep as sweeping
from .page import page
from .pictures import pictures
from .result import NAME, REQUESTS, encoded, requests, save

PAGE = "index.html"


def write(
    folder: Path,
    document: dict[str, Any],
    measured: Measured | None,
    *,
    compare: dict[str, Any] | None = None,
    sweep: dict[str, Any] | None = None,
) -> None:
    """Writes everything; what was there by those names is replaced, each file in one step, and others are left alone.

    measured: None: no requests.csv. compare, sweep: as `compare.compare` and `sweep.sweep` made them. They are kept in
    result.json as `compare` and `sweep`. Raises OSError, and Unavailable where the extra `loadtest` is missing.
    """
    found = dict(document)
    if compare is not None:
        found["compare"] = compare
    if sweep is not None:
        found["sweep"] = sweep
    folder.mkdir(parents=True, exist_ok=True)
    # First what cannot be had again; a picture can.
    save(folder / NAME, encoded(found))
    if measured is not None:
        save(folder / REQUESTS, requests(measured.outcomes))
    drawn = pictures(found)
    if sweep is not None and sweep["points"]:
        drawn.append(sweeping.picture(sweep))
    for picture in drawn:
        save(folder / f"{picture.name}.png", picture.png)
    save(folder / PAGE, page(found, drawn, compare=compare, sweep=sweep).encode())
