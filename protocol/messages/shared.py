"""Common parts of all directions: the base class, wire arrays, sampling, errors, the model, refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import numpy as np

from ..errors import Field, KvforgeError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32Array = npt.NDArray[np.int32]
    Int64Array = npt.NDArray[np.int64]
    Float32Array = npt.NDArray[np.float32]
else:  # msgspec checks isinstance(value, np.ndarray); the dtype is fixed by FRAMES
    Int32Array = Int64Array = Float32Array = np.ndarray

PROTOCOL_VERSION = 1
PROTOCOL_VERSION_MIN = 1

NO_INT32: Int32Array = np.zeros(0, np.int32)
NO_INT64: Int64Array = np.zeros(0, np.int64)
NO_FLOAT32: Float32Array = np.zeros(0, np.float32)
NO_INT32.setflags(write=False)
NO_INT64.setflags(write=False)
NO_FLOAT32.setflags(write=False)


class Message(msgspec.Struct, frozen=True, tag_field="t", eq=False):
    """Base of all wire messages."""

    FRAMES: ClassVar[tuple[tuple[str, str], ...]] = ()


TOP_LOGPROBS_MAX = 20
LOGIT_BIAS_MAX = 300
LOGIT_BIAS_LIMIT = 100.0
# The lowest and highest value of the numeric fields of SamplingParams. Where 0 is invalid, the lowest is just above it.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, TOP_LOGPROBS_MAX),
}

# Fields of SamplingParams for which a model may have defaults of its own.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

GRAMMAR_BYTES_MAX = 1 << 17


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A constraint on the text of an answer.

    Attributes:
        kind: json_schema (JSON that the schema in `text` allows), json_object (any JSON object; `text` is empty), regex
            (the whole answer matches the regular expression `text`), or lark (the grammar `text` in the dialect of Lark
            that llguidance reads).
        text: At most GRAMMAR_BYTES_MAX bytes of UTF-8.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling parameters of a request. Each default means "off"; SAMPLING_RANGES holds the ranges.

    They apply in this order: logit_bias, penalties (repetition, then frequency and presence), grammar, temperature,
    top_k, top_p, min_p; then one draw. Greedy sampling (temperature 0) takes the largest logit after the grammar, which
    the filters always keep.

    Log-probabilities, including that of the chosen token, are natural logarithms of the model's own float32
    distribution before bias, penalties, grammar, temperature and filters.

    Attributes:
        temperature: Divisor of the logits, finite, 0 to 100; 0 is greedy.
        seed: 64-bit; the same request with the same seed draws the same numbers. None: the coordinator draws one.
        stop_tokens: Token ids that end the request with reason `stop`; the stop token itself is the last token.
        ignore_eos: Do not end at the model's own end-of-sequence tokens.
        top_k: Keep the k most likely tokens; the lowest ids win ties (0: off; above the vocabulary size: all).
        top_p: Keep the fewest most likely tokens, at least one, such that their probabilities after top_k sum to top_p
            (nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020).
        min_p: Keep tokens at least min_p times as likely as the most likely one (Nguyen et al., "Turning Up the Heat:
            Min-p Sampling", ICLR 2025).
        repetition_penalty: Divides positive logits, and multiplies others, of tokens in the prompt or the answer so far
            (Keskar et al., "CTRL", 2019, section 4.1).
        presence_penalty: Subtracted once from the logit of each token in the answer so far (as OpenAI's API defines
            it).
        frequency_penalty: Subtracted once per occurrence in the answer so far (as OpenAI's API defines it).
        logit_bias: (token id, value) pairs added to the raw logits: -100 to 100, or -inf, which bans the token.
            Distinct ids, at most LOGIT_BIAS_MAX. A request that bans the whole vocabulary fails.
        logprobs: How many of the most likely tokens to report with their log-probabilities for each generated token.
        prompt_logprobs: Report the log-probability of each prompt token but the first, given those before it, and this
            many of the most likely tokens in its place (0 to TOP_LOGPROBS_MAX). None: off.
        grammar: Keep tokens that leave the answer a prefix of a text that the grammar allows. End-of-sequence tokens
            are allowed where the text may end, and required where it must end; ignore_eos is therefore not available.
    """

    temperature: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        """Return whether tokens that occurred become less likely."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def counts_answer(self) -> bool:
        """Return whether sampling depends on the tokens generated so far."""
        return self.penalises or self.grammar is not None


ERROR_TEXT_MAX = 2000


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on the wire; `protocol.errors.restore` rebuilds the exception."""

    code: str
    message: str
    fields: dict[str, Field] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, error: KvforgeError) -> ErrorInfo:
        """Return the wire form of an error, with its text cut to ERROR_TEXT_MAX characters."""
        text = error.message if len(error.message) <= ERROR_TEXT_MAX else error.message[: ERROR_TEXT_MAX - 3] + "..."
        return cls(error.code, text, error.fields)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a worker serves. All workers of one coordinator must agree on it.

    Attributes:
        source: The path or name it was loaded from. A client on the same host may load its tokenizer from there.
        fingerprint: Hex digest of all that determines the tokens (weights file or configuration, architecture, dtype).
        sampling: The defaults of a request. Only fields of MODEL_DEFAULTS are set.
        dtype: torch's name of the compute type; "": unknown.
        weight_dtype: The same for the weights, or fp8, int8 or int4 if most matrices are quantised.
        determinism: `batch-invariant` if a request's tokens and log-probabilities do not depend on the rest of the
            batch; else `fast`, or `not promised: ` and the reason; "": unknown.
        kv_layout: What the cache holds: of each token and layer `K and V`, or `latents` (multi-head latent attention);
            `states` if no layer attends; "": unknown.
        state_dtype: The dtype in which recurrent states that layers compute in float32 are kept; "": there are none.
    """

    name: str
    source: str
    architecture: str
    fingerprint: str
    vocab_size: int
    context_tokens_max: int
    eos_tokens: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    dtype: str = ""
    weight_dtype: str = ""
    determinism: str = ""
    kv_layout: str = ""
    state_dtype: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds since submission, on the coordinator's monotonic clock; -1 for events that have not happened.

    The fields from queue_us to recovering_us hold the time in each phase and add up to the request's age. All are 0
    from a coordinator that does not report phases.

    Attributes:
        queue_us: Until it started.
        prefill_us: Until its first token.
        decode_us: While it generated tokens.
        preempted_us: From each preemption to the next token, including recomputation.
        stalled_us: In its slot, waiting for free blocks.
        recovering_us: From the loss of its worker or of the coordinator to the next token.
        paused_us: How long its stream was paused because the client was slow or gone; overlaps the phases.
    """

    first_scheduled_us: int = -1
    first_token_us: int = -1
    ended_us: int = -1
    queue_us: int = 0
    prefill_us: int = 0
    decode_us: int = 0
    preempted_us: int = 0
    stalled_us: int = 0
    recovering_us: int = 0
    paused_us: int = 0


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The sender closes its connection on purpose."""


class Refused(Message, frozen=True, tag="refused"):
    """A command failed and changed nothing."""

    rid: int
    error: ErrorInfo


def tag_of(cls: type[Message]) -> str:
    """Return the stable wire tag of a message class."""
    config: Any = cls.__struct_config__
    return str(config.tag)
