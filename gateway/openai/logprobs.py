"""Log-probabilities in the formats of chat and of completions."""

from __future__ import annotations

from typing import Any

from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.replicas.stream import Stream


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


def _entry(prompts: Prompts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = prompts.spelled(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    """Return -9999 for minus infinity, as OpenAI's API does: JSON has no infinity."""
    return max(float(logprob), -9999.0)
