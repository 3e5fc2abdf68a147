"""The jobs of a helper process and their results: MessagePack behind four bytes of length."""

from __future__ import annotations

from typing import Any

import msgspec

from kvforge.protocol.messages import Grammar

HEAD_BYTES = 4
# A message on the first helper's socket.
FIRST_BYTES_MAX = 1 << 16
# The gateway reads the end of a rendered prompt: a template may have begun the model's reasoning there.
ENDING_CHARACTERS = 256


class TextLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one job.

    Args:
        text_bytes_max: Longest text that is tokenised; 0: derived from context_tokens_max and the vocabulary.
        context_tokens_max: The model's longest context; 0: not known.
        template_s: Processor time of a chat template.
        text_s: Wall time of a whole job, the wait for a helper included; also the processor time of a job.
        memory_bytes_max: Memory that a job may add to its process.
    """

    text_bytes_max: int = 0
    context_tokens_max: int = 0
    template_s: float = 2.0
    text_s: float = 30.0
    memory_bytes_max: int = 1 << 30


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message.

    Args:
        source: The tokenizer; None: there is none.
        template_file: A Jinja file in place of the model's own, or "".
        limits: The bounds of each job.
        table: Send the tokenizer's table of tokens.
    """

    source: str | None
    template_file: str
    limits: TextLimits
    table: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """It is there.

    Args:
        token_bytes_max: Bytes of the vocabulary's longest token.
        table_bytes: Bytes of its `TokenTable`, which follow in messages of at most FIRST_BYTES_MAX; 0: none follow.
        no_table: Why there is no table, where one was wanted.
    """

    token_bytes_max: int
    table_bytes: int = 0
    no_table: str = ""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A helper's first message."""

    pid: int


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tokenise a text. `field` is its name in the request."""

    text: str
    special: bool
    field: str = "prompt"


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode token ids (int32, little-endian)."""

    ids: bytes


class Render(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Render a conversation. `tokens`: tokenise it as well; `whole`: return the complete text instead of its end."""

    messages: list[Any]
    options: dict[str, Any]
    tokens: bool = True
    whole: bool = False


class Check(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Validate a shape. `field` is its name in the request. The text of the result is the refusal, or ""."""

    grammar: Grammar
    field: str


class Result(msgspec.Struct, frozen=True, tag=True):
    """The result of a job. `ids` are int32, little-endian."""

    ids: bytes = b""
    text: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A typed error, for `protocol.errors.restore`."""

    code: str
    message: str
    fields: dict[str, Any]


Job = Encode | Decode | Render | Check
Answer = Result | Failed
FIRST = msgspec.msgpack.Decoder(Load)
JOB: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
LOADED: msgspec.msgpack.Decoder[Loaded | Failed] = msgspec.msgpack.Decoder(Loaded | Failed)
HELLO = msgspec.msgpack.Decoder(Hello)


def framed(message: msgspec.Struct) -> bytes:
    """Return the message with its length in front."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEAD_BYTES, "little") + body
