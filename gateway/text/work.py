"""The jobs: rendering and tokenising, with size checks in advance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.text.grammar import validated
from kvforge.text.tokenizer import Tokenizer

from .jobs import ENDING_CHARACTERS, Check, Decode, Encode, Job, Result, TextLimits

# Longer texts are first counted in pieces, so that memory never holds the tokens of a far too long text.
PIECE_CHARACTERS = 1 << 20
UTF8_BYTES_MAX = 4  # per character
# A separate piece may have more tokens than within the whole text, but never twice as many.
COUNT_MARGIN = 2


def token_bytes_max(tokenizer: Tokenizer) -> int:
    """Return the number of bytes of the vocabulary's longest token: an upper bound."""
    return max((len(token.encode()) for token in tokenizer.vocabulary), default=1)


class SizeCheck:
    """Refuses texts that cannot fit, without tokenising them.

    Args:
        limits: The configured bounds.
        longest: Bytes of the vocabulary's longest token.
    """

    def __init__(self, limits: TextLimits, longest: int) -> None:
        self._context, self._longest = limits.context_tokens_max, longest
        self._bytes_max = limits.text_bytes_max or limits.context_tokens_max * longest

    def check(self, text: str, field: str) -> None:
        """Refuse a text with too many bytes.

        Raises:
            InvalidRequest: Names `field`, with the token counts if the text exceeds the context.
        """
        most = self._bytes_max
        if not most or len(text) * UTF8_BYTES_MAX <= most:
            return
        size = len(text) if len(text) > most else len(text.encode(errors="surrogatepass"))
        if size > most:
            problem = f"is too long: {size} bytes of text; at most {most} (text_bytes_max in gateway.toml)"
            raise too_long(field, problem, -(-size // self._longest), self._context)


def too_long(field: str, problem: str, tokens: int, context: int) -> InvalidRequest:
    """Return the error of a text with at least `tokens` tokens.

    It has the token counts if the text exceeds the context.
    """
    error = InvalidRequest(field, problem)
    if context and tokens > context:
        error.fields |= {"prompt_tokens": tokens, "max_tokens": 0, "context_tokens": context}
    return error


class TextWork:
    """Does jobs with a tokenizer, or without one those that need none."""

    def __init__(self, tokenizer: Tokenizer | None, limits: TextLimits, longest: int = 0) -> None:
        self._given, self._limits = tokenizer, limits
        self._size = SizeCheck(limits, longest or (token_bytes_max(tokenizer) if tokenizer is not None else 1))

    def do(self, job: Job, rendered: Callable[[], None] = lambda: None) -> Result:
        """Do one job.

        Args:
            job: The job.
            rendered: Called between the template and the tokenizer.

        Raises:
            InvalidRequest: The template refuses the conversation, or the text is too long or not valid Unicode.
        """
        if isinstance(job, Check):
            return Result(text=validated(job.grammar, job.field))
        if isinstance(job, Decode):
            return Result(text=self._tokenizer.decode(np.frombuffer(job.ids, "<i4").tolist()))
        if isinstance(job, Encode):
            return Result(self._encode(job.text, job.field, special=job.special))
        text = self._tokenizer.render(job.messages, job.options)
        rendered()
        ids = self._encode(text, "messages", special=False) if job.tokens else b""
        return Result(ids, text if job.whole else text[-ENDING_CHARACTERS:])

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._given is None:
            raise InvalidRequest("prompt", "there is no tokenizer")
        return self._given

    def _encode(self, text: str, field: str, *, special: bool) -> bytes:
        limits = self._limits
        self._size.check(text, field)
        if len(text) > PIECE_CHARACTERS and limits.context_tokens_max:
            self._check_count(text, field)
        return np.array(self._tokenizer.encode(text, special=special), "<i4").tobytes()

    def _check_count(self, text: str, field: str) -> None:
        counted, most = 0, COUNT_MARGIN * self._limits.context_tokens_max
        for start in range(0, len(text), PIECE_CHARACTERS):
            counted += len(self._tokenizer.encode(text[start : start + PIECE_CHARACTERS], special=False))
            if counted > most:
                context = self._limits.context_tokens_max
                problem = f"is too long: more than {most} tokens of text; the context has {context} tokens"
                raise too_long(field, problem, counted, context)
