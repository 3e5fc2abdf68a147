"""Sampling parameters as a caller sets them. The model's own defaults apply to the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvforge.protocol import messages
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import (
    LOGIT_BIAS_LIMIT,
    LOGIT_BIAS_MAX,
    MODEL_DEFAULTS,
    SAMPLING_RANGES,
    TOP_LOGPROBS_MAX,
)
from kvforge.text.grammar import check

from .values import INT32_MAX, flag, number, shown, whole

SEED_MAX = (1 << 64) - 1
TEMPERATURE_MAX = 100.0
OPTIONAL = (*MODEL_DEFAULTS, "seed", "prompt_logprobs")  # may be None
KINDS: dict[str, Literal["json_schema", "regex", "lark"]] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "grammar": "lark",
}
SHAPES = ("json_schema", "json_object", "regex", "grammar")  # constraints on the answer, at most one
WORDS = {"json_schema": "mapping, or its JSON text", "regex": "text", "grammar": "text"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling parameters.

    They apply in this order: logit_bias, penalties (repetition, then frequency and presence), the answer's shape,
    temperature, top_k, top_p, min_p; then one draw. Greedy sampling (temperature 0) takes the largest logit after the
    shape.

    None means the value of the model's own generation_config (`Health.model.sampling`, or `kvforge health`); a model
    without one is sampled at temperature 0.6. All other defaults are off.

    At most one of json_schema, json_object, regex and grammar constrains the answer. The answer ends with reason `stop`
    where the constraint is complete, so that ignore_eos is not allowed; max_tokens may cut it off earlier.

    Attributes:
        temperature: 0 is greedy; otherwise the logits are divided by it (0 to 100).
        seed: 64-bit; the same request with the same seed draws the same. None: the coordinator draws one.
        stop_tokens: Token ids that end the request with reason `stop`; the stop token itself is the last token.
        ignore_eos: Do not end at the model's own end-of-sequence tokens.
        top_k: Keep the k most likely tokens (0: off).
        top_p: Keep the fewest most likely tokens that reach top_p together (1: off).
        min_p: Keep tokens at least min_p times as likely as the most likely one (0: off).
        repetition_penalty: Above 1, penalises tokens of the prompt and of the answer so far (1: off).
        presence_penalty: -2 to 2, subtracted once from the logit of each token in the answer so far.
        frequency_penalty: -2 to 2, subtracted once per occurrence in the answer so far.
        logit_bias: Added to the logits of token ids, {id: value} or pairs: -100 to 100, or -inf, which bans the token.
        logprobs: How many of the most likely tokens to report for each generated token (0 to 20).
        prompt_logprobs: Report the log-probability of each prompt token but the first, and this many of the most likely
            tokens in its place (0 to 20). None: do not. With it, max_tokens may be 0, and no cached prefix is used.
        json_schema: JSON of a schema, given as a mapping or as its text. Unsupported keywords are refused by name.
        json_object: Any JSON object.
        regex: The whole answer matches the regular expression (Rust's syntax: no look-around).
        grammar: A grammar in llguidance's dialect of Lark.
    """

    temperature: float | None = None
    seed: int | None = None
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    logprobs: int = 0
    prompt_logprobs: int | None = None
    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None

    @property
    def unnamed(self) -> tuple[str, ...]:
        """Return the fields that the model's own defaults decide."""
        return tuple(name for name in MODEL_DEFAULTS if getattr(self, name) is None)

    def message(self) -> messages.SamplingParams:
        """Return the message to send, in which fields that are not set are off.

        Raises:
            InvalidRequest: Names the wrong field.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in SHAPES}
        chosen = {name: value for name, value in given.items() if value is not None or name not in OPTIONAL}
        values = {name: _checked(name, value) for name, value in chosen.items()}
        grammar = self.shape()
        if grammar is not None and grammar.kind != "json_object":
            check(grammar)
        return messages.SamplingParams(**values, grammar=grammar)

    def shape(self) -> messages.Grammar | None:
        """Return the grammar of the answer, which llguidance has not checked yet; None: any text.

        Raises:
            InvalidRequest: Names the wrong field.
        """
        named = [name for name in SHAPES if getattr(self, name) is not None and getattr(self, name) is not False]
        if not named:
            return None
        field, value = f"sampling.{named[0]}", getattr(self, named[0])
        if len(named) > 1:
            raise InvalidRequest(field, f"give one of {' and '.join(named)}, not both")
        if self.ignore_eos:
            raise InvalidRequest(
                "sampling.ignore_eos", f"cannot be combined with {named[0]}, which ends the answer where it is complete"
            )
        if named[0] == "json_object":
            flag(field, value)
            return messages.Grammar(kind="json_object")
        if isinstance(value, Mapping) and named[0] == "json_schema":
            value = _as_json(field, value)
        if not isinstance(value, str):
            raise InvalidRequest(field, f"is {shown(value)}; it must be a {WORDS[named[0]]}")
        return messages.Grammar(kind=KINDS[named[0]], text=value)


def _as_json(field: str, schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, f"is not JSON ({error})") from None


def _checked(name: str, value: Any) -> Any:
    field = f"sampling.{name}"
    if name == "temperature":
        return number(field, value, 0, TEMPERATURE_MAX, "0 (greedy)")
    if name == "seed":
        return whole(field, value, 0, SEED_MAX)
    if name == "stop_tokens":
        return _tokens(field, value)
    if name == "ignore_eos":
        return flag(field, value)
    if name == "prompt_logprobs":
        return whole(field, value, 0, TOP_LOGPROBS_MAX)
    if name == "logit_bias":
        return _bias(field, value)
    low, high = SAMPLING_RANGES[name]
    is_whole = isinstance(getattr(messages.SamplingParams(), name), int)
    return whole(field, value, int(low), int(high)) if is_whole else number(field, value, low, high)


def _tokens(field: str, tokens: object) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes | Mapping) or not hasattr(tokens, "__iter__"):
        raise InvalidRequest(field, "is not a sequence of token ids")
    return tuple(_token(field, token) for token in tokens)


def _token(field: str, token: object) -> int:
    try:
        return whole(field, token, 0, INT32_MAX)
    except InvalidRequest:
        raise InvalidRequest(field, f"holds {token!r}, which is not a token id") from None


def _bias(field: str, pairs: object) -> tuple[tuple[int, float], ...]:
    items = list(pairs.items()) if isinstance(pairs, Mapping) else pairs
    if not isinstance(items, tuple | list) or not all(isinstance(p, tuple | list) and len(p) == 2 for p in items):
        raise InvalidRequest(field, "is neither {token id: value} nor a sequence of (token id, value) pairs")
    if len(items) > LOGIT_BIAS_MAX:
        raise InvalidRequest(field, f"has {len(items)} entries; at most {LOGIT_BIAS_MAX} are allowed")
    checked: dict[int, float] = {}
    for token, value in items:
        token_id = _token(field, token)
        if token_id in checked:
            raise InvalidRequest(field, f"names token id {token_id} twice")
        try:
            checked[token_id] = number(field, value, -LOGIT_BIAS_LIMIT, LOGIT_BIAS_LIMIT, also=-math.inf)
        except InvalidRequest:
            limit = f"-{LOGIT_BIAS_LIMIT:g} to {LOGIT_BIAS_LIMIT:g}, or -inf to ban the token"
            raise InvalidRequest(field, f"gives token id {token_id} the value {value!r}; it must be {limit}") from None
    return tuple(checked.items())
