"""Log-probabilities in the formats of chat and of completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.replicas.stream import Stream
from kvforge.protocol.errors import InvalidRequest

PROMPT_TOKENS_AT_A_TIME = 256
PROMPT_ENTRIES_MAX = 1 << 20  # about 100 bytes each until the response is encoded


def of_chat(prompts: Prompts, stream: Stream, start: int, end: int) -> dict[str, Any]:
    """Return the log-probabilities of tokens [start, end) for a chat choice."""
    content = []
    for at in range(start, end):
        most_likely = [_entry(prompts, token, logprob) for token, logprob in stream.top_logprobs[at]]
        content.append(_entry(prompts, stream.tokens[at], stream.logprobs[at]) | {"top_logprobs": most_likely})
    return {"content": content, "refusal": None}


def of_completion(
    prompts: Prompts, stream: Stream, start: int, end: int, *, most_likely: bool, offset: int
) -> tuple[dict[str, Any], int]:
    """Return the log-probabilities of tokens [start, end) for a completion choice.

    Args:
        prompts: Spells the tokens.
        stream: The tokens.
        start: The first token.
        end: Behind the last token.
        most_likely: Whether the most likely tokens are requested.
        offset: The text offset of the first token, in characters.

    Returns:
        The body, and the text offset of the next token.
    """
    names, offsets, best = [], [], []
    for at in range(start, end):
        name, _ = prompts.spelled(stream.tokens[at])
        names.append(name)
        offsets.append(offset)
        offset += len(name)
        best.append({prompts.spelled(token)[0]: _finite(logprob) for token, logprob in stream.top_logprobs[at]})
    body = {
        "tokens": names,
        "token_logprobs": [_finite(logprob) for logprob in stream.logprobs[start:end]],
        "top_logprobs": best if most_likely else None,
        "text_offset": offsets,
    }
    return body, offset


def check_size(field: str, prompt_tokens: int, most_likely: int) -> None:
    """Refuse more log-probabilities of prompts than a response may hold.

    Raises:
        InvalidRequest: Names `field`.
    """
    entries = prompt_tokens * (1 + most_likely)
    if entries > PROMPT_ENTRIES_MAX:
        problem = f"{most_likely} for each of {prompt_tokens} prompt tokens are {entries} entries"
        raise InvalidRequest(
            field, f"{problem}; the limit is {PROMPT_ENTRIES_MAX}: ask for fewer, or send fewer tokens"
        )


class EchoedLogprobs:
    """The log-probabilities of a prompt, as part of those of a completion choice. The first token has none."""

    @classmethod
    async def of(cls, prompts: Prompts, ids: Sequence[int], scored: PromptStream, most_likely: int) -> EchoedLogprobs:
        """Spell the tokens of a prompt.

        Args:
            prompts: Spells the tokens.
            ids: The prompt, [n].
            scored: Its log-probabilities, [n - 1].
            most_likely: How many of the most likely tokens are requested.
        """
        echoed = cls()
        for start in range(0, len(ids), PROMPT_TOKENS_AT_A_TIME):
            if start:
                await asyncio.sleep(0)
            echoed.add(prompts, ids, scored, range(start, min(start + PROMPT_TOKENS_AT_A_TIME, len(ids))), most_likely)
        return echoed

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self.tokens: list[str] = []
        self.text_offset: list[int] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []

    def add(self, prompts: Prompts, ids: Sequence[int], scored: PromptStream, places: range, most_likely: int) -> int:
        """Add the tokens in some places, as in `of`. Return the text offset behind them."""
        for at in places:
            name, _ = prompts.spelled(ids[at])
            self.tokens.append(name)
            self.text_offset.append(self._offset)
            self._offset += len(name)
            self.token_logprobs.append(_finite(scored.logprobs[at - 1]) if at else None)
            best = scored.top_logprobs[at - 1][:most_likely] if at else ()
            self.top_logprobs.append(
                {prompts.spelled(other)[0]: _finite(value) for other, value in best} if at else None
            )
        return self._offset

    def body(self, *, most_likely: bool) -> dict[str, Any]:
        """Return them as the log-probabilities of a choice. most_likely: as in `of_completion`."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs if most_likely else None,
            "text_offset": self.text_offset,
        }

    def before(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the log-probabilities of the prompt and, behind them, those of the answer in `body`."""
        joined = {name: getattr(self, name) + body[name] for name in ("tokens", "token_logprobs", "text_offset")}
        tops = None if body["top_logprobs"] is None else self.top_logprobs + body["top_logprobs"]
        return {**body, **joined, "top_logprobs": tops}


async def of_prompt(
    prompts: Prompts, ids: Sequence[int], scored: PromptStream, most_likely: int
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format.

    Args:
        prompts: Spells the tokens.
        ids: The prompt, [n].
        scored: Its log-probabilities, [n - 1].
        most_likely: How many of the most likely tokens are requested.

    Returns:
        [n] entries: null for the first token, then by token id the token itself and the most likely ones.
    """
    entries: list[dict[str, Any] | None] = []
    for start in range(0, len(ids), PROMPT_TOKENS_AT_A_TIME):
        places = range(start, min(start + PROMPT_TOKENS_AT_A_TIME, len(ids)))
        if start:
            await asyncio.sleep(0)
        entries += prompt_part(prompts, ids, scored, places, most_likely)
    return entries


def prompt_part(
    prompts: Prompts, ids: Sequence[int], scored: PromptStream, places: range, most_likely: int
) -> list[dict[str, Any] | None]:
    """Return the entries of some places of a prompt, as `of_prompt` does."""
    entries: list[dict[str, Any] | None] = []
    for at in places:
        if not at:
            entries.append(None)
            continue
        rows = [(ids[at], scored.logprobs[at - 1], scored.ranks[at - 1])]
        best = scored.top_logprobs[at - 1][:most_likely]
        rows += [(other, value, rank) for rank, (other, value) in enumerate(best, 1)]
        entries.append(
            {
                str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": _spelled(prompts, other)}
                for other, value, rank in rows
            }
        )
    return entries


def _spelled(prompts: Prompts, token: int) -> str | None:
    return prompts.spelled(token)[0] if prompts.has_text else None


def _entry(prompts: Prompts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = prompts.spelled(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """Return -9999 for minus infinity, as OpenAI's API does: JSON has no infinity."""
    return max(float(logprob), -9999.0)
