"""The log-probabilities of a prompt in a stream of events, before those of its answers.

A part of 256 tokens is one event of each choice, spelled when it is due. However long the prompt is, no more than that
is held as text, and other requests go on between two parts. A prompt of at most 256 tokens is one event, as in vLLM.
"""

from __future__ import annotations

from typing import Any

from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.replicas.stream import Stream

from . import logprobs


class PromptEvents:
    """The parts of one prompt.

    Args:
        prompts: Spells the tokens.
        ids: The prompt, [n].
        text: The text of the prompt, for `echo`.
        echoed: How many of the most likely tokens `echo` lists for each token; None without `echo`.
        listed: The same for `prompt_logprobs`; None without it.
    """

    def __init__(self, prompts: Prompts, ids: list[int], text: str, echoed: int | None, listed: int | None) -> None:
        self._prompts, self._ids, self._text, self._echoed, self._listed = prompts, ids, text, echoed, listed
        self._sent = self._offset = 0

    @property
    def over(self) -> bool:
        """Whether all parts were taken."""
        return self._sent == len(self._ids)

    def pop_part(self, stream: Stream) -> dict[str, Any] | None:
        """Return the fields of the next part as a choice has them; None while its tokens have not all arrived.

        Args:
            stream: The answer that reports the prompt's log-probabilities.
        """
        end = min(self._sent + logprobs.PROMPT_TOKENS_AT_A_TIME, len(self._ids))
        scored = stream.prompt_logprobs
        if scored is None or _arrived(scored) < end:
            return None
        places, first = range(self._sent, end), not self._sent
        self._sent = end
        part: dict[str, Any] = {"text": self._text if first else "", "logprobs": None, "finish_reason": None}
        if self._echoed is not None:
            echoed = logprobs.EchoedLogprobs(self._offset)
            self._offset = echoed.add(self._prompts, self._ids, scored, places, self._echoed)
            part["logprobs"] = echoed.body(most_likely=self._echoed > 0)
        if self._listed is not None:
            part["prompt_logprobs"] = logprobs.prompt_part(self._prompts, self._ids, scored, places, self._listed)
        return part


def _arrived(scored: PromptStream) -> int:
    """Return how many tokens of the prompt are known with their log-probabilities; the first one has none."""
    return 1 + min(len(scored.logprobs), len(scored.ranks), len(scored.top_logprobs))
