"""Scenario commands that are client messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvforge.protocol.messages import (
    Append,
    Cancel,
    CreateSequence,
    Drain,
    Explain,
    Fork,
    GetBlock,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Message,
    PurgeFinished,
    RefBlock,
    RemoveSequences,
    SamplingParams,
    Submit,
    UnrefBlock,
)
from tests.scenarios.describing import Names

Options = dict[str, str]
Build = Callable[[int, list[str], Options, Names], Message]


def tokens(text: str) -> Any:
    """Parse `1,2,3` or `-` into [n] int32."""
    return np.array([int(part) for part in text.split(",")] if text != "-" else [], np.int32)


def _create(rid: int, words: list[str], options: Options, names: Names) -> Message:
    names.expect_sequences([words[0]])
    return CreateSequence(
        rid=rid,
        tenant=options.get("tenant", "ant"),
        salt=options.get("salt", ""),
        idle_ttl_ms=int(options.get("ttl_ms", 0)),
        tokens=tokens(words[1]),
    )


def _append(rid: int, words: list[str], _options: Options, names: Names) -> Message:
    parts = [tokens(text) for text in words[1::2]]
    return Append(
        rid=rid,
        sequence_ids=np.array([names.sequence(name) for name in words[0::2]], np.int64),
        counts=np.array([part.size for part in parts], np.int32),
        tokens=np.concatenate(parts),
    )


def _fork(rid: int, words: list[str], _options: Options, names: Names) -> Message:
    names.expect_sequences(words[1:])
    return Fork(rid=rid, sequence_id=names.sequence(words[0]), count=len(words) - 1)


def _submit(rid: int, words: list[str], options: Options, names: Names) -> Message:
    names.expect_request(words[0])
    stops = tuple(int(part) for part in options.get("stop", "").split(",") if part)
    return Submit(
        rid=rid,
        max_tokens=int(options.get("max", 4)),
        sampling=SamplingParams(temperature=0.0, seed=1, stop_tokens=stops),
        tenant=options.get("tenant", "ant"),
        stream=options.get("stream", "yes") == "yes",
        sequence_id=names.sequence(options["on"]) if "on" in options else 0,
        salt=options.get("salt", ""),
        prompt=tokens(words[1]),
    )


def _remove(rid: int, words: list[str], _options: Options, names: Names) -> Message:
    return RemoveSequences(rid=rid, sequence_ids=np.array([names.sequence(name) for name in words], np.int64))


def _hold(cls: type[RefBlock | UnrefBlock]) -> Build:
    def build(rid: int, words: list[str], options: Options, _names: Names) -> Message:
        generation = int(options.get("generation", -1))
        return cls(rid=rid, block_id=int(words[0]), holder=words[1], generation=generation)

    return build


def _explain(rid: int, _words: list[str], options: Options, names: Names) -> Message:
    ((kind, what),) = options.items()
    if kind == "tenant":
        return Explain(rid=rid, tenant=what)
    if kind == "block":
        return Explain(rid=rid, block_id=int(what))
    if kind == "request":
        return Explain(rid=rid, request_id=names.request(what))
    return Explain(rid=rid, sequence_id=names.sequence(what))


COMMANDS: dict[str, Build] = {
    "create": _create,
    "append": _append,
    "fork": _fork,
    "submit": _submit,
    "remove": _remove,
    "ref": _hold(RefBlock),
    "unref": _hold(UnrefBlock),
    "explain": _explain,
    "info": lambda rid, words, _, names: GetSequence(rid=rid, sequence_id=names.sequence(words[0])),
    "tokens": lambda rid, words, _, names: GetTokens(rid=rid, sequence_id=names.sequence(words[0])),
    "cancel": lambda rid, words, _, names: Cancel(rid=rid, request_id=names.request(words[0])),
    "request": lambda rid, words, _, names: GetRequest(rid=rid, request_id=names.request(words[0]), with_tokens=True),
    "block": lambda rid, words, _, __: GetBlock(rid=rid, block_id=int(words[0])),
    "purge": lambda rid, words, _, __: PurgeFinished(rid=rid, older_than_ms=int(words[0])),
    "drain": lambda rid, _, __, ___: Drain(rid=rid),
    "stats": lambda rid, _, __, ___: GetStats(rid=rid),
}
