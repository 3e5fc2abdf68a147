"""What messages of several directions share: their base, arrays on the wire, sampling, errors, the model, a refusal."""

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
# The lowest and highest value of the numeric fields of Sampling. Where 0 would make no sense, the lowest is a bit more.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "top_k": (0, (1 << 31) - 1),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "logprobs": (0, TOP_LOGPROBS_MAX),
}

# Fields of Sampling for which a model may have defaults of its own.
MODEL_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

GRAMMAR_BYTES_MAX = 1 << 17


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the text of an answer must be.

    json_schema: JSON that the schema in `text` allows. json_object: any JSON object; `text` is empty. regex: what all
    of the regular expression `text` matches. lark: what the grammar `text` derives, in the dialect of Lark that
    llguidance reads. text: at most GRAMMAR_BYTES_MAX bytes of UTF-8.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the next token is chosen. Applied in this order: logit_bias, penalties (repetition, then frequency and
    presence), grammar, temperature, top_k, top_p, min_p; then one draw. Greedy (temperature 0) takes the largest after
    the grammar: the filters keep that one always. Each default means "off"; ranges are in SAMPLING_RANGES.

    temperature: 0 is greedy; otherwise logits are divided by it (finite, 0 to 100).
    seed: 64-bit; the same request with the same seed draws the same numbers. None: the coordinator draws one.
    stop_tokens: token ids that end the request with reason `stop`; the stop token itself is the last token.
    ignore_eos: do not end at the model's own end-of-sequence tokens.
    top_k: only the k most likely tokens; of equal ones the lowest ids (0: off; more than the vocabulary: all).
    top_p: only the fewest most likely tokens whose probabilities, of what top_k left, reach top_p together; at least
    one (nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration", ICLR 2020).
    min_p: only tokens at least min_p times as likely as the most likely one (Nguyen et al., "Turning Up the Heat:
    Min-p Sampling", ICLR 2025).
    repetition_penalty: logits of tokens that the prompt or the answer so far holds are divided by it where above 0,
    else multiplied with it (Keskar et al., "CTRL", 2019, section 4.1).
    presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer so far, not of the prompt:
    the one once, the other times the count (as OpenAI's API defines them).
    logit_bias: (token id, value) pairs added to the raw logits: -100 to 100, or -inf, which bans the token. Distinct
    ids, at most LOGIT_BIAS_MAX. A request all of whose vocabulary is banned fails.
    logprobs: how many of the most likely tokens to report with their log-probabilities for each generated token.
    grammar: only tokens by which the answer's text stays the beginning of one that it allows. Where that text may end,
    the model's end-of-sequence tokens are allowed too, where it must end they alone: so it is not for ignore_eos.

    Log-probabilities, of the chosen token too, are natural ones of the model's own float32 distribution: before bias,
    penalties, grammar, temperature and filters.
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
    grammar: Grammar | None = None

    @property
    def penalises(self) -> bool:
        """Whether tokens that occurred are less likely to."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    @property
    def counts_answer(self) -> bool:
        """Whether the choice depends on the tokens generated so far."""
        return self.penalises or self.grammar is not None


ERROR_TEXT_MAX = 2000


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error on the wire; `protocol.errors.restore` makes the exception of it again."""

    code: str
    message: str
    fields: dict[str, Field] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, error: KvforgeError) -> ErrorInfo:
        text = error.message if len(error.message) <= ERROR_TEXT_MAX else error.message[: ERROR_TEXT_MAX - 3] + "..."
        return cls(error.code, text, error.fields)


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker serves. All workers of one coordinator must agree on it.

    source: the path or name it was loaded from (a client on the same host may load its tokenizer from there).
    sampling: what a request gets that names nothing; only fields of MODEL_DEFAULTS are not off.
    fingerprint: hex digest of what determines the tokens (weights file or configuration, architecture, dtype).
    dtype: what it computes in, by torch's name; "": not said. weight_dtype: the same, or int8 or int4 where most of its
    matrices are quantised.
    determinism: `batch-invariant` where a request's tokens and log-probabilities depend on nothing that is computed
    beside it; else `fast`, or `not promised: ` and why; "": not said.
    """

    name: str
    source: str
    architecture: str
    fingerprint: str
    vocab_size: int
    context_tokens_max: int
    eos_tokens: tuple[int, ...] = ()
    sampling: Sampling = Sampling()
    dtype: str = ""
    weight_dtype: str = ""
    determinism: str = ""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds since submission, on the coordinator's monotonic clock; -1 where it never happened.

    From queue_us to recovering_us: how long it was in each phase; together they are its age (of a coordinator that does
    not say: all 0). queue: until it started. prefill: until its first token. decode: while tokens came. preempted: from
    each preemption to its next token, so with what was computed again. stalled: it held its place, and blocks were
    missing. recovering: since its worker was lost, or the coordinator was, to its next token.
    paused_us: how long its stream stood still because its client did not read, or was gone; beside the phases.
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
    """The stable wire tag of a message class."""
    config: Any = cls.__struct_config__
    return str(config.tag)
