"""The tasks of `benchmarks.drafts`: prompts and the answers that are replayed, fixed by a seed.

| task | prompt | answer |
|---|---|---|
| `edit` | a file of generated code, and the names to change | the file with the names changed |
| `agent` | files that an agent has read | new prose, then an edit: lines of a file, and the lines in their place |
| `random` | words by Zipf's law | more words by Zipf's law |
| `again` | names | a file that is the same in every answer but for these names |
| `session` | what precedes the answer in a recorded session | what an agent wrote; see `benchmarks.drafts_sessions` |

The first four are generated. The recorded agent sessions that ship with kvforge hold lengths and no text. The answers
of `agent` have their lengths, at most `--tokens`, and generated text: how much of it repeats the prompt is a choice
(`PROSE`), not a measurement. `session` reads sessions with their text from a folder. In `random`, pairs of words repeat
and are not continued alike, so that most proposals are wrong. A token is a word of at most 6 characters, a part of a
longer one, or another character.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from kvforge.loadtest.load.build import build
from kvforge.loadtest.load.options import LoadOptions

WORD_LIST = """
account address amount balance batch branch buffer cache client column count customer device entry event field
filter frame group header index invoice item ledger limit line list message method node number offset order owner
packet page parent part path payment pool price product queue record region report request result row schema score
session shelf source state status step stock table target ticket token total user value vendor window
"""
WORDS = WORD_LIST.split()
BODIES = (
    "    for {a} in {b}:\n        {c} = {c} + {a}.{d} * {a}.{e}\n",
    "    if {a} is None or {a}.{d} > {b}.{d}:\n        {a} = {b}\n",
    "    {a} = [{b}.{c} for {b} in {d} if {b}.{e} > 0]\n",
    "    while {a} < len({b}):\n        {c} = {b}[{a}]\n        {a} += 1\n",
    "    {a} = {{{b}.{c}: {b} for {b} in {d}}}\n",
    "    if not {a}:\n        raise ValueError(f'{b} {{{b}}} has no {c}')\n",
    "    {a}, {b} = sorted(({c}, {d}))\n",
)
TASKS = ("edit", "agent", "random", "again")
FIRST_TOKEN = 300  # lower ids are special in some vocabularies
PIECES = re.compile(r"\w{1,6}|\s+|[^\w\s]")
PROSE = 0.5  # share of an agent's answer that is new text
RENAMED = 3
WORDS_MAX = 2000


@dataclass(frozen=True)
class Task:
    """Requests by number: the tokens of each prompt and of its answer."""

    prompts: list[list[int]]
    answers: list[list[int]]


class Vocabulary:
    """Numbers pieces of text in the order of their first occurrence.

    Args:
        split: Returns the pieces of a text.
    """

    def __init__(self, split: Callable[[str], Iterable[Hashable]] = PIECES.findall) -> None:
        self._ids: dict[Hashable, int] = {}
        self._split = split

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [self._ids.setdefault(piece, FIRST_TOKEN + len(self._ids)) for piece in self._split(text)]

    @property
    def end(self) -> int:
        """Return the first token id that no piece has."""
        return FIRST_TOKEN + len(self._ids)


def make(name: str, requests: int, prompt: int, answer: int) -> Task:
    """Return a task of `TASKS`.

    Args:
        name: Its name.
        requests: How many requests it has; the first ones are the same for any number.
        prompt: Tokens of a prompt, about.
        answer: The most tokens of an answer.
    """
    vocabulary, prompts, answers = Vocabulary(), [], []
    vocabulary.encode(" ".join(WORDS))
    lengths = agent_lengths(requests, answer) if name == "agent" else [answer] * requests
    for number, length in enumerate(lengths):
        text = random.Random(f"{name} {number}")
        if name == "random":
            asked, written = zipf(text, prompt), zipf(text, length)
        else:
            make_texts = {"edit": edit_texts, "agent": agent_texts, "again": again_texts}[name]
            asked, written = map(vocabulary.encode, make_texts(text, prompt, length))
        prompts.append([FIRST_TOKEN + number, *asked])  # no two share a prefix
        answers.append(written[:length])
    return Task(prompts, answers)


def agent_lengths(requests: int, answer: int) -> list[int]:
    """Return the lengths of the first recorded answers of agents, cut to [32, answer]."""
    load = build(LoadOptions(trace="claude-code", closed=1, requests=requests))
    turns = [turn.output_tokens for index in range(len(load)) for turn in load.session(index).turns]
    return [min(max(length, 32), answer) for length in turns[:requests]]


def zipf(text: random.Random, count: int) -> list[int]:
    """Return random words, [count]; the n-th of WORDS_MAX has a weight of 1 / n."""
    words = range(FIRST_TOKEN + 1000, FIRST_TOKEN + 1000 + WORDS_MAX)
    return text.choices(words, [1 / (1 + rank) for rank in range(WORDS_MAX)], k=count)


def code(text: random.Random, tokens: int) -> str:
    """Return functions of about so many tokens."""
    parts: list[str] = []
    while sum(len(PIECES.findall(part)) for part in parts) < tokens:
        name, own = "_".join(text.sample(WORDS, 2)), text.sample(WORDS, 7)
        body = "".join(
            text.choice(BODIES).format(**dict(zip("abcde", text.sample(own, 5), strict=True))) for _ in range(3)
        )
        parts.append(f"def {name}({own[0]}, {own[1]}):\n{body}    return {own[2]}\n\n\n")
    return "".join(parts)


def edit_texts(text: random.Random, prompt: int, answer: int, file: str = "") -> tuple[str, str]:
    """Return a prompt and an answer of `edit`; file: the file to edit, "" for a new one."""
    file = file or code(text, max(prompt, answer))
    renames = {word: f"{word}_{text.choice(WORDS)}" for word in text.sample(WORDS, RENAMED)}
    changed = re.sub(r"\b(" + "|".join(renames) + r")\b", lambda found: renames[found[0]], file)
    asked = ", ".join(f"{old} to {new}" for old, new in renames.items())
    return f"{file}Rename {asked} and return the file.\n", changed


def again_texts(text: random.Random, _prompt: int, answer: int) -> tuple[str, str]:
    """Return a prompt and an answer of `again`."""
    asked, changed = edit_texts(text, 0, answer, code(random.Random("again"), answer))
    return asked.splitlines()[-1], changed


def agent_texts(text: random.Random, prompt: int, answer: int) -> tuple[str, str]:
    """Return a prompt and an answer of `agent`."""
    file, written = code(text, prompt), ""
    lines = file.splitlines(keepends=True)
    while len(PIECES.findall(written)) < answer:
        written += " ".join(text.choices(WORDS, k=max(4, int(answer * PROSE / 2)))) + ".\n"  # a word and a space each
        first, old, new = text.choice(WORDS), text.choice(WORDS), text.choice(WORDS)
        size = max(2, int(answer * (1 - PROSE) / 2 / 12))  # lines of about 12 tokens, twice
        begin = text.randrange(max(1, len(lines) - size))
        part = "".join(lines[begin : begin + size])
        written += f'edit({first}, old="""{part}""", new="""{part.replace(old, new)}""")\n'
    return file, written
