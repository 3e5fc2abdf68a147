"""Traces of single requests in memory, and the formats of Azure and Mooncake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import numpy as np

from kvforge.protocol.errors import InvalidRequest

from . import draws
from .draws import FloatArray, IntArray
from .files import broken
from .lengths import LENGTH_MAX

MOONCAKE_BLOCK = 512
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
# With more requests than this per distinct time, times are ticks of a coarse clock.
_TICK_REQUESTS = 2.0


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The requests of a trace in the order of their arrival.

    Attributes:
        times: [n] float64 seconds from the first one.
        inputs, outputs: [n] int64 tokens; None if not recorded.
        kinds: Their classes, or none.
        blocks: The block ids of each prompt, [blocks] int64, or none.
    """

    times: FloatArray
    inputs: IntArray | None = None
    outputs: IntArray | None = None
    kinds: Sequence[str] = ()
    blocks: Sequence[IntArray] = ()

    def __len__(self) -> int:
        return len(self.times)


def azure(file: str, lines: Iterable[tuple[int, str]]) -> Recorded:
    """Read rows `TIMESTAMP,ContextTokens,GeneratedTokens` after a header; times are UTC.

    Raises:
        InvalidRequest: A row is malformed.
    """
    times, inputs, outputs = [], [], []
    for number, line in lines:
        if number == 1 or not line.strip():
            continue
        try:
            stamp, prompt, answer = line.split(",")
            moment = datetime.fromisoformat(stamp)
            times.append((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
            inputs.append(_tokens(prompt, 1))
            outputs.append(_tokens(answer, 0))
        except ValueError as error:
            raise broken(file, number, f"{line.strip()!r} is not {AZURE_HEADER}: {error}") from None
    return _sorted(file, times, inputs, outputs)


class _Mooncake(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=LENGTH_MAX)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=LENGTH_MAX)]
    hash_ids: list[int]


def mooncake(file: str, lines: Iterable[tuple[int, str]], *, seed: int) -> Recorded:
    """Read rows of JSON: timestamp (ms), input_length, output_length, hash_ids (one per 512 tokens).

    If many requests share a timestamp, it is a tick: they are spread within it, in the order of the rows.

    Raises:
        InvalidRequest: A row is malformed.
    """
    decoder = msgspec.json.Decoder(_Mooncake)
    times, inputs, outputs, blocks = [], [], [], []
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
            blocks.append(np.array(row.hash_ids, np.int64))
        except (msgspec.DecodeError, OverflowError) as error:
            raise broken(file, number, str(error)) from None
        if len(row.hash_ids) != -(-row.input_length // MOONCAKE_BLOCK):
            raise broken(
                file,
                number,
                f"{len(row.hash_ids)} hash_ids do not match {row.input_length} tokens in blocks of {MOONCAKE_BLOCK}",
            )
        times.append(row.timestamp / 1000)
        inputs.append(row.input_length)
        outputs.append(row.output_length)
    recorded = _sorted(file, times, inputs, outputs, blocks)
    spread = spread_ticks(recorded.times, seed=seed)
    return Recorded(times=spread, inputs=recorded.inputs, outputs=recorded.outputs, blocks=recorded.blocks)


def spread_ticks(times: FloatArray, *, seed: int) -> FloatArray:
    """Move each of the ascending times [n] to a random place before the next tick, if they are ticks."""
    ticks, tick = np.unique(times, return_inverse=True)
    if len(ticks) < 2 or len(times) < _TICK_REQUESTS * len(ticks):
        return times
    gaps = np.diff(ticks)
    # Gaps after empty ticks are longer, and the length of the last tick is unknown.
    widths = np.append(np.minimum(gaps, np.median(gaps)), np.median(gaps))
    places = draws.uniform(draws.key(seed, draws.TICKS), len(times))
    places = places[np.lexsort((places, tick))]
    spread: FloatArray = ticks[tick] + places * widths[tick]
    return spread


def _tokens(text: str, low: int) -> int:
    count = int(text)
    if not low <= count <= LENGTH_MAX:
        raise ValueError(f"{count} tokens (must be {low} to {LENGTH_MAX})")
    return count


def _sorted(
    file: str, times: list[float], inputs: list[int], outputs: list[int], blocks: Sequence[IntArray] = ()
) -> Recorded:
    if not times:
        raise InvalidRequest("trace", f"{file} contains no requests")
    order = np.argsort(times, kind="stable")
    return Recorded(
        times=np.array(times)[order] - min(times),
        inputs=np.array(inputs, np.int64)[order],
        outputs=np.array(outputs, np.int64)[order],
        blocks=[blocks[row] for row in order] if blocks else (),
    )
