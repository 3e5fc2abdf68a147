"""Fields that both completions and chat take, and what is made of them.

Fields of these structures that have no effect are in `IGNORED`, known fields that no structure has are in `known.py`;
the documentation is made of both.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvforge import Sampling
from kvforge.client.arguments import PRIORITY_MAX, SAMPLES_MAX, stop_strings
from kvforge.gateway.chat.shapes import Shape
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import SAMPLING_RANGES

from .shapes import OTHER_NAMES, ResponseFormat, StructuredOutputs, shape_of

# Accepted and without effect, with the reason.
IGNORED = {
    "user": "a label of the caller's own: nothing is kept about users",
    "safety_identifier": "a label of the caller's own, as `user`",
    "metadata": "a label of the caller's own: responses are not stored",
    "service_tier": "there is one",
    "prompt_cache_key": "prefixes are found by what they hold, wherever they come from",
    "prompt_cache_retention": "blocks stay as long as there is room",
    "skip_special_tokens": "special tokens are never text; `false` is refused",
    "spaces_between_special_tokens": "special tokens are never text",
    "detokenize": "`true` is how it is; `false` is refused",
    "response_format.json_schema.description": "it is not given to the model; the schema is enforced",
    "response_format.json_schema.name": "it is not given to the model; the schema is enforced",
    "stream_options.include_obfuscation": "events are not padded",
    "parallel_tool_calls": "`true` is how it is where tools are not forced",
}
LOGPROBS_MAX = 20
TOP_P_MIN = SAMPLING_RANGES["top_p"][0]

Text = Annotated[str, msgspec.Meta(max_length=1 << 26)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: a last event with the counts. continuous_usage_stats: they are in each (vLLM)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request may say in both APIs. None is as if it was not said."""

    model: str = ""
    n: Annotated[int, msgspec.Meta(ge=1, le=SAMPLES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # other names of the fields of structured_outputs
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    # without effect
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None


def sampling_of(asked: Common, logprobs: int, shape: Shape) -> Sampling:
    """How tokens are chosen. logprobs: how many of the most likely ones to report. Raises InvalidRequest."""
    named = {
        "temperature": asked.temperature,
        "seed": None if asked.seed is None else asked.seed % (1 << 64),
        "top_k": top_k_of(asked.top_k),
        "top_p": top_p_of(asked.top_p),
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "ignore_eos": asked.ignore_eos,
        "stop_tokens": asked.stop_token_ids,
        "logit_bias": None if asked.logit_bias is None else _biases(asked.logit_bias),
    }
    given = {name: value for name, value in named.items() if value is not None} | shape.named
    sampling = Sampling(logprobs=logprobs, **given)
    sampling.message()
    return sampling


def top_k_of(asked: int | None) -> int | None:
    """Less than 0 is what vLLM has for all tokens."""
    return None if asked is None else max(asked, 0)


def top_p_of(asked: float | None) -> float | None:
    """0 is what both APIs allow, and means the most likely token alone."""
    return TOP_P_MIN if asked is not None and asked == 0 else asked


def check_ignored(asked: Common) -> None:
    """Refuses a value that cannot be ignored. Raises InvalidRequest naming the field."""
    for name, wanted in (("skip_special_tokens", True), ("detokenize", True)):
        value = getattr(asked, name)
        if value is not None and value is not wanted:
            raise InvalidRequest(name, f"may only be {str(wanted).lower()}: {IGNORED[name]}")


def shape_asked(asked: Common) -> Shape:
    """Return the shape that an answer must have. Raises InvalidRequest."""
    others = {name: value for name in OTHER_NAMES if (value := getattr(asked, name)) is not None}
    return shape_of(asked.response_format, asked.structured_outputs, others)


def stops_of(asked: Common) -> tuple[str, ...]:
    """The strings that end an answer. Raises InvalidRequest naming `stop`."""
    return () if asked.stop is None else stop_strings(asked.stop)


def _biases(biases: dict[str, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for token, bias in biases.items():
        try:
            token_id = int(token)
        except ValueError:
            raise InvalidRequest("logit_bias", f"names {token[:40]!r}, which is not a token id") from None
        # OpenAI says that -100 bans a token; here that is what -inf does.
        checked[token_id] = float("-inf") if bias <= -100 else bias
    return checked
