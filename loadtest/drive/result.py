"""The results of a driver process as MessagePack, with long columns in native byte order."""

from __future__ import annotations

from array import array
from dataclasses import fields
from typing import Any, BinaryIO

import msgspec

from kvforge.protocol.messages import Timings

from .outcome import NEVER, DriverStats, Outcome

NAMES = tuple(field.name for field in fields(Outcome))


def pack(file: BinaryIO, outcomes: list[Outcome], drove: DriverStats) -> None:
    """Write the results."""
    rows = [[getattr(outcome, name) for name in NAMES] for outcome in outcomes]
    found = {"outcomes": rows, "late_s": drove.late_s, "cpu_s": drove.cpu_s, "wall_s": drove.wall_s}
    file.write(msgspec.msgpack.encode(found, enc_hook=_plain))


def unpack(data: bytes | memoryview) -> tuple[list[Outcome], DriverStats]:
    """Read what `pack` wrote in a process of ours."""
    found = msgspec.msgpack.decode(data)
    drove = DriverStats(late_s=_column("d", found["late_s"]), cpu_s=found["cpu_s"], wall_s=found["wall_s"])
    return [_outcome(dict(zip(NAMES, row, strict=True))) for row in found["outcomes"]], drove


def _outcome(row: dict[str, Any]) -> Outcome:
    timings = Timings(**row.pop("timings"))
    row["tokens_s"], row["tokens"] = _column("d", row["tokens_s"]), _column("i", row["tokens"])
    return Outcome(**row, timings=NEVER if timings == NEVER else timings)


def _plain(value: object) -> object:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} is not a column")


def _column(code: str, data: bytes) -> array[Any]:
    column = array(code)
    column.frombytes(data)
    return column
