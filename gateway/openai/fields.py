"""Fields that both completions and chat have, and the sampling parameters that they become.

`IGNORED` lists fields of these structures without effect; `known.py` lists known fields that no structure has. The
documentation is generated from both.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvforge import SamplingParams
from kvforge.client.arguments import PRIORITY_MAX, SAMPLES_MAX, stop_strings
from kvforge.gateway.chat.shapes import Shape
from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import SAMPLING_RANGES

from .shapes import OTHER_NAMES, ResponseFormat, StructuredOutputs, shape_of

# Fields without effect, with the reason.
IGNORED = {
    "user": "a label for the caller; no user data is stored",
    "safety_identifier": "a label for the caller, as `user`",
    "metadata": "a label for the caller; /v1/responses stores and returns it",
    "service_tier": "there is only one tier",
    "prompt_cache_key": "prefix caching is automatic and based on content",
    "prompt_cache_retention": "blocks stay cached until they are evicted",
    "skip_special_tokens": "special tokens never appear in text; `false` is refused",
    "spaces_between_special_tokens": "special tokens never appear in text",
    "detokenize": "always on; `false` is refused",
    "response_format.json_schema.description": "not given to the model; the schema is enforced",
    "response_format.json_schema.name": "not given to the model; the schema is enforced",
    "stream_options.include_obfuscation": "events are not padded",
    "parallel_tool_calls": "always allowed, unless a tool is forced",
}
LOGPROBS_MAX = 20
TOP_P_MIN = SAMPLING_RANGES["top_p"][0]

Text = Annotated[str, msgspec.Meta(max_length=1 << 26)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a stream.

    Attributes:
        include_usage: Send a last event with the token counts.
        continuous_usage_stats: Send the token counts with each event (vLLM).
        include_obfuscation: Without effect.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that both APIs have. None stands for a missing field."""

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
    # vLLM extensions
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # aliases of the fields of structured_outputs
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


def sampling_of(asked: Common, logprobs: int, shape: Shape, prompt_logprobs: int | None = None) -> SamplingParams:
    """Return the sampling parameters.

    Args:
        asked: The request.
        logprobs: How many of the most likely tokens to report.
        shape: The output constraint.
        prompt_logprobs: The same for each prompt token; None: report nothing of the prompt.

    Raises:
        InvalidRequest: Names the field.
    """
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
    sampling = SamplingParams(logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)
    sampling.message()
    return sampling


def top_k_of(asked: int | None) -> int | None:
    """Return top_k; a negative one means all tokens, as in vLLM."""
    return None if asked is None else max(asked, 0)


def top_p_of(asked: float | None) -> float | None:
    """Return top_p; 0 means the most likely token alone, as in both APIs."""
    return TOP_P_MIN if asked is not None and asked == 0 else asked


def check_ignored(asked: Common) -> None:
    """Refuse values that cannot be ignored.

    Raises:
        InvalidRequest: Names the field.
    """
    for name, wanted in (("skip_special_tokens", True), ("detokenize", True)):
        value = getattr(asked, name)
        if value is not None and value is not wanted:
            raise InvalidRequest(name, f"must be {str(wanted).lower()}: {IGNORED[name]}")


def requested_shape(asked: Common) -> Shape:
    """Return the output constraint.

    Raises:
        InvalidRequest: Names the field.
    """
    others = {name: value for name in OTHER_NAMES if (value := getattr(asked, name)) is not None}
    return shape_of(asked.response_format, asked.structured_outputs, others)


def stops_of(asked: Common) -> tuple[str, ...]:
    """Return the stop strings.

    Raises:
        InvalidRequest: Names `stop`.
    """
    return () if asked.stop is None else stop_strings(asked.stop)


def _biases(biases: dict[str, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for token, bias in biases.items():
        try:
            token_id = int(token)
        except ValueError:
            raise InvalidRequest("logit_bias", f"invalid token id: {token[:40]!r}") from None
        # In OpenAI's API -100 bans a token; kvforge uses -inf.
        checked[token_id] = float("-inf") if bias <= -100 else bias
    return checked
