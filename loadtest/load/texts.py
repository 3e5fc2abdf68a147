"""Text prompts: passages of a poem or a novel, and questions, some with a second turn."""

from __future__ import annotations

import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from kvforge.protocol.errors import InvalidRequest
from kvforge.protocol.messages import Int32Array

from . import draws
from .content import cut_turn
from .draws import IntArray
from .files import sample_lines
from .workload import ALL, Turn

Encode = Callable[[str], list[int]]
PASSAGES = {"sonnet": "sonnet.txt", "prideandprejudice": "prideandprejudice.txt.gz"}
# The field with the question: one text, or one for each turn.
QUESTIONS = {
    "mt-bench": ("mt_bench_question.jsonl.gz", "turns"),
    "vicuna": ("vicuna_bench_question.jsonl.gz", "turns"),
    "gsm8k": ("gsm8k_test.jsonl.gz", "question"),
    "humaneval": ("HumanEval.jsonl.gz", "prompt"),
}


def encoder(encode: Encode | None, vocab: int) -> Encode:
    """Return `encode` with a range check; without a tokenizer each word is a token with a fixed id.

    Raises:
        InvalidRequest: A token is outside the vocabulary.
    """
    if encode is None:
        return lambda text: [zlib.crc32(word.encode()) % vocab for word in text.split()]

    def watched(text: str) -> list[int]:
        ids = encode(text)
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            raise InvalidRequest(
                "vocab", f"is {vocab}, but the tokenizer returned token {max(ids)}: use the tokenizer of this model"
            )
        return ids

    return watched


class Text:
    """A text with each line encoded separately, so that a passage can start at any line."""

    def __init__(self, text: str, encode: Encode) -> None:
        # Blank lines belong to the next line: a passage cannot start at a line without tokens.
        lines = [(line, encode(line)) for line in re.findall(r"\s*\S.*\n?", text)]
        self._lines = [line for line, ids in lines if ids]
        self._starts: list[int] = np.cumsum([0, *(len(ids) for _, ids in lines if ids)]).tolist()
        self._ids: Int32Array = np.array([token for _, ids in lines for token in ids], np.int32)
        assert self._lines, "the text has a token"

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self._lines)

    def passage(self, line: int, length: int) -> tuple[Int32Array, str]:
        """Return a passage from the start of a line on, wrapping around at the end.

        The last line of the text is cut at a word, in proportion to its tokens.

        Returns:
            [length] int32, and the text.
        """
        start = self._starts[line]
        tokens = np.take(self._ids, np.arange(start, start + length), mode="wrap")
        laps, end = divmod(start + length, len(self))
        last = bisect_right(self._starts, end, hi=self.lines) - 1
        count = self.lines
        words = re.findall(r"\s*\S+", self._lines[last])
        share = (end - self._starts[last]) / (self._starts[last + 1] - self._starts[last])
        pieces = [self._lines[index % count] for index in range(line, laps * count + last)]
        pieces.append("".join(words[: round(share * len(words))]))
        for first in range(count - line, len(pieces), count):
            if pieces[first] and not pieces[first - 1].endswith("\n"):
                pieces[first - 1] += "\n"
        return tokens, "".join(pieces)


class Passages:
    """`Prompts` that are passages of one text, each from a random line.

    Args:
        name: One of PASSAGES.
        encode: The tokenizer.
        seed: The seed.
        prefix: The number of leading tokens that all prompts share.
    """

    def __init__(self, name: str, encode: Encode, *, seed: int, prefix: int = 0) -> None:
        whole = "".join(line for _, line in sample_lines(PASSAGES[name]))
        self._text = Text(whole.rstrip() + "\n", encode)
        self._places = draws.key(seed, draws.PLACES)
        self._prefix = prefix

    def make(self, index: int, length: int) -> tuple[Int32Array, str]:
        """Return a prompt; see `Prompts`."""
        place = int(draws.noise(self._places, np.array([index]))[0]) % self._text.lines
        shared = min(self._prefix, length)
        if not shared:
            return self._text.passage(place, length)
        tokens, text = self._text.passage(0, shared)
        if shared == length:
            return tokens, text
        more, more_text = self._text.passage(place, length - shared)
        return np.concatenate((tokens, more)), f"{text.rstrip()}\n{more_text}"


class Questions:
    """The `Content` of a set of questions in a random order. A later turn follows the actual answer without a pause.

    Args:
        name: One of QUESTIONS.
        encode: The tokenizer.
        inputs: [sessions] int64 tokens of a turn, by truncating or repeating its question; None for its own length.
        outputs: [sessions] int64 tokens. Both lengths apply before scaling and truncation.
        seed: The seed.
        length_scale: The factor of all lengths.
        context_max: The context that each request must fit.
    """

    def __init__(
        self,
        name: str,
        encode: Encode,
        inputs: IntArray | None,
        outputs: IntArray,
        *,
        seed: int,
        length_scale: float = 1.0,
        context_max: int | None = None,
    ) -> None:
        file, field = QUESTIONS[name]
        asked: list[str | list[str]] = [json.loads(line)[field] for _, line in sample_lines(file)]
        self._questions = [[Text(text, encode) for text in ([one] if isinstance(one, str) else one)] for one in asked]
        self._order = np.random.default_rng((seed, draws.PLACES)).permutation(len(self._questions))
        self._inputs, self._outputs = inputs, outputs
        self._scale, self._context_max = length_scale, context_max
        plans = [self._plan(index) for index in range(len(outputs))]
        self.requests = sum(len(plan) for plan in plans)
        self.shortened = sum(cut for plan in plans for *_, cut in plan)

    def __len__(self) -> int:
        return len(self._outputs)

    def turns(self, index: int) -> tuple[Turn, ...]:
        """Return the turns of a session; see `Content`."""
        made = []
        for question, (kept, new, output, cut) in zip(self._questions_of(index), self._plan(index), strict=True):
            tokens, text = question.passage(0, new)
            # With text prompts a server can only continue from a complete conversation.
            made.append(Turn(tokens=tokens, text=text, output_tokens=output, kept=kept if cut or not kept else ALL))
        return tuple(made)

    def kind(self, index: int) -> str:  # noqa: ARG002
        """Return the class of a session's requests; see `Content`."""
        return ""

    def _questions_of(self, index: int) -> Sequence[Text]:
        return self._questions[self._order[index % len(self._order)]]

    def _plan(self, index: int) -> list[tuple[int, int, int, bool]]:
        """Return the kept, new and generated tokens of each turn, and whether it was truncated."""
        row, held, made = index % len(self), 0, []
        for question in self._questions_of(index):
            length = len(question) if self._inputs is None else int(self._inputs[row])
            new, output = (max(1, int(tokens * self._scale + 0.5)) for tokens in (length, int(self._outputs[row])))
            made.append(cut_turn(held, new, output, self._context_max))
            held = sum(made[-1][:3])
        return made
