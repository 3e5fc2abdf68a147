"""What steps take on a device that is not here: tables of step times, and how a step's time is read from one.

A step of rows that decode and rows that compute a prompt reads the weights once for all its tokens, then the context of
each row. So its time has three parts: the pass, by the tokens in it; decode attention, by the tokens of context that
the decoding rows read; attention of prompts, by the pairs of a new token and one that it looks at.

`tables/` has one file for each shape that ships; a file of one's own has the same fields.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from pathlib import Path
from typing import Annotated

import msgspec

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

TABLES = Path(__file__).parent / "tables"
SOURCES = ("measured", "modelled")
OPTION = "--no-model"
# Of the device's memory; the rest is for what steps work in, as other servers have it too.
MEMORY_SHARE = 0.9

Positive = Annotated[int, msgspec.Meta(ge=1)]
# Of milliseconds and nanoseconds alike: what is longer is no time of a step.
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table. source: one of SOURCES; origin: which measurements it is made of, or what it was computed from.

    gpus: that work on one step together; memory_bytes, weight_bytes, kv_bytes_per_token: of all of them.
    tokens: [n] rising, pass_ms: [n] the time of a pass over so many tokens that look at nothing; between them it is
    interpolated, beyond the last it goes on as between the last two. context_ns: for each token of context that a
    decoding row reads. pair_ns: for each pair of a prompt's new token and a token that it looks at.
    """

    name: str
    source: str
    origin: str
    gpus: Positive = 1
    memory_bytes: Positive
    weight_bytes: Annotated[int, msgspec.Meta(ge=0)]
    kv_bytes_per_token: Positive
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=(1 << 31) - 1)]
    context_tokens_max: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    tokens: Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1)]
    pass_ms: Annotated[tuple[NotNegative, ...], msgspec.Meta(min_length=1)]
    context_ns: NotNegative
    pair_ns: NotNegative

    def blocks(self, block_size: int) -> int:
        """How many KV blocks of so many tokens the memory has room for, beside the weights."""
        return (int(MEMORY_SHARE * self.memory_bytes) - self.weight_bytes) // (self.kv_bytes_per_token * block_size)

    def seconds(self, tokens: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """The time of one step of so many tokens. context_tokens: over its decoding rows; pairs: over its prompts."""
        return self._pass_ms(tokens) / 1e3 + (context_tokens * self.context_ns + pairs * self.pair_ns) / 1e9

    def step_s(self, starts: Int32Array, counts: Int32Array) -> float:
        """The time of one step. starts, counts: [rows] int32, as in `protocol.messages.Step`; one token is a decode."""
        rows, tokens = counts.size, int(counts.sum(dtype="i8"))
        context = int(starts.sum(dtype="i8")) + rows
        if tokens == rows:
            return self.seconds(tokens, context)
        prompts = counts > 1
        behind, new = starts[prompts].astype("i8"), counts[prompts].astype("i8")
        pairs = int((new * behind + new * (new + 1) // 2).sum())
        return self.seconds(tokens, context - int(behind.sum()) - new.size, pairs)

    def _pass_ms(self, tokens: int) -> float:
        if not tokens:
            return 0.0  # nothing but copies
        at, ms = self.tokens, self.pass_ms
        if len(at) == 1 or tokens <= at[0]:
            return ms[0]
        right = min(bisect_left(at, tokens), len(at) - 1)
        left = right - 1
        return ms[left] + (ms[right] - ms[left]) * (tokens - at[left]) / (at[right] - at[left])


def names() -> list[str]:
    """The tables that ship with this."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


def load(name: str) -> StepTimes:
    """A table by its name, or from a file. Raises InvalidRequest naming the option, and the field that is wrong."""
    shipped = TABLES / f"{name}.json"
    path = shipped if name in names() else Path(name)
    try:
        table = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), StepTimes)
    except FileNotFoundError:
        problem = f"{name!r} is neither a table that ships ({', '.join(names())}) nor a file"
        raise InvalidRequest(OPTION, problem) from None
    except OSError as error:
        raise InvalidRequest(OPTION, f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of json, of Unicode and of msgspec
        raise InvalidRequest(OPTION, f"{name} is no table of step times: {error}") from None
    _check(name, table)
    return table


def _check(name: str, table: StepTimes) -> None:
    """What types cannot say. Raises InvalidRequest."""
    pass_ms, at = table.pass_ms, table.tokens
    problem = ""
    if table.source not in SOURCES:
        problem = f"source must be one of {', '.join(SOURCES)}, not {table.source!r}"
    elif any(left >= right for left, right in itertools.pairwise(at)):
        problem = "tokens must rise"
    elif len(pass_ms) != len(at):
        problem = f"pass_ms has {len(pass_ms)} items, and tokens {len(at)}"
    elif any(left > right for left, right in itertools.pairwise(pass_ms)):
        problem = "pass_ms must not fall: more tokens take no less time"
    elif table.blocks(1) < 1:
        problem = f"weight_bytes leave nothing of {MEMORY_SHARE:.0%} of memory_bytes for a token"
    if problem:
        raise InvalidRequest(OPTION, f"{name}: {problem}")
