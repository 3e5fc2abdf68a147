"""Step times of devices that are not present: tables, and the time of a step according to one.

A step that mixes decode and prefill rows reads the weights once for all its tokens, then the context of each row. Its
time therefore has three parts: the pass, by the number of tokens; decode attention, by the context tokens that decode
rows read; and prefill attention, by the pairs of a new token and a token that it attends to.

`tables/` contains one file for each shape that ships; other files have the same fields.
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
# The share of device memory for weights and KV cache, as in other servers; the rest is workspace.
MEMORY_SHARE = 0.9

Positive = Annotated[int, msgspec.Meta(ge=1)]
# An upper bound for any step time, in milliseconds or nanoseconds.
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of step times.

    Attributes:
        name: The name of the model.
        source: One of SOURCES.
        origin: The measurements or the calculation that it is based on.
        gpus: The number of GPUs that compute a step together.
        memory_bytes: Their total memory.
        weight_bytes: The weights on all GPUs.
        kv_bytes_per_token: The KV of one token on all GPUs.
        vocabulary: The size of the vocabulary.
        context_tokens_max: The context length.
        tokens: [n] ascending token counts of a pass.
        pass_ms: [n] the time of such a pass without attention. It is interpolated linearly, and extrapolated from the
            last two points.
        context_ns: The time per context token that a decode row reads.
        pair_ns: The time per pair of a new prompt token and a token that it attends to.
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
        """Return how many KV blocks of this many tokens fit into memory beside the weights."""
        return (int(MEMORY_SHARE * self.memory_bytes) - self.weight_bytes) // (self.kv_bytes_per_token * block_size)

    def seconds(self, tokens: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """Return the time of one step.

        Args:
            tokens: The tokens of the step.
            context_tokens: The context of all decode rows.
            pairs: The attention pairs of all prefill rows.
        """
        return self._pass_ms(tokens) / 1e3 + (context_tokens * self.context_ns + pairs * self.pair_ns) / 1e9

    def step_s(self, starts: Int32Array, counts: Int32Array) -> float:
        """Return the time of one step.

        Args:
            starts: [rows] int32, as in `protocol.messages.Step`.
            counts: [rows] int32; a row with one token is a decode row.
        """
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
            return 0.0  # only block copies
        at, ms = self.tokens, self.pass_ms
        if len(at) == 1 or tokens <= at[0]:
            return ms[0]
        right = min(bisect_left(at, tokens), len(at) - 1)
        left = right - 1
        return ms[left] + (ms[right] - ms[left]) * (tokens - at[left]) / (at[right] - at[left])


def names() -> list[str]:
    """Return the names of the tables that ship."""
    return sorted(path.stem for path in TABLES.glob("*.json"))


def load(name: str) -> StepTimes:
    """Load a table by its name or from a file.

    Raises:
        InvalidRequest: Names the option and the invalid field.
    """
    shipped = TABLES / f"{name}.json"
    path = shipped if name in names() else Path(name)
    try:
        table = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), StepTimes)
    except FileNotFoundError:
        problem = f"{name!r} is neither a known table ({', '.join(names())}) nor a file"
        raise InvalidRequest(OPTION, problem) from None
    except OSError as error:
        raise InvalidRequest(OPTION, f"cannot read {name}: {error.strerror}") from None
    except ValueError as error:  # of json, of Unicode and of msgspec
        raise InvalidRequest(OPTION, f"{name} is not a table of step times: {error}") from None
    _check(name, table)
    return table


def _check(name: str, table: StepTimes) -> None:
    """Check the constraints that types cannot express. Raises InvalidRequest."""
    pass_ms, at = table.pass_ms, table.tokens
    problem = ""
    if table.source not in SOURCES:
        problem = f"source must be one of {', '.join(SOURCES)}, not {table.source!r}"
    elif any(left >= right for left, right in itertools.pairwise(at)):
        problem = "tokens must be ascending"
    elif len(pass_ms) != len(at):
        problem = f"pass_ms has {len(pass_ms)} items, but tokens has {len(at)}"
    elif any(left > right for left, right in itertools.pairwise(pass_ms)):
        problem = "pass_ms must not decrease with the number of tokens"
    elif table.blocks(1) < 1:
        problem = f"weight_bytes leaves no room for KV in {MEMORY_SHARE:.0%} of memory_bytes"
    if problem:
        raise InvalidRequest(OPTION, f"{name}: {problem}")
