"""Recorded agent sessions with their text: the task `session` of `benchmarks.drafts`.

A folder of sessions has files `*.traj` and `*.json`, at any depth, which are read in the order of their paths:

| format | the messages |
|---|---|
| SWE-agent's trajectories | the list `history` |
| OpenAI's chat | the list `messages` |

A message has a `role` and a `content`: text, a list of parts with `text`, or null beside `tool_calls`. Parts without
text, such as images, count as nothing. Each call is one more line of text, `{"name": ..., "arguments": ...}`.

Each assistant message with ANSWER_MIN tokens or more is an answer: its first `--tokens` tokens, thought and calls. Its
prompt is the last `--session-prompt` tokens of what precedes it in the session, each message behind its role. A token
is a word of at most 6 characters, as in the other tasks, or what the tokenizer of `--tokenizer` makes of the text.
Messages that the format marks as a demonstration (`is_demo`) are parts of prompts, and no answers. An answer that an
earlier session has too is left out, so that a session that lies in two files counts once. `--requests` answers are
taken at equal distances from all, in the order of files and messages.

| a file | is |
|---|---|
| `*.traj` without such a list | refused |
| `*.json` without such a list: settings, results | skipped, and named on stderr |
| that is no JSON, or has a message that is not as above | refused |
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from kvforge.protocol.errors import KvforgeError
from kvforge.text.tokenizer import Tokenizer

from .drafts_tasks import FIRST_TOKEN, PIECES, Task, Vocabulary

SESSION = "session"
LISTS = ("history", "messages")
SUFFIXES = (".traj", ".json")
ANSWER_MIN = 16  # tokens
DEMONSTRATION = "demonstration"


class SessionError(ValueError):
    """A folder of sessions, or a file in it, is not as expected."""


class Message(NamedTuple):
    """A message of a session.

    Attributes:
        role: Its role.
        text: Its content, and a line for each tool call.
        is_demo: Whether the format marks it as a demonstration.
    """

    role: str
    text: str
    is_demo: bool

    @property
    def is_answer(self) -> bool:
        """Return whether it is long enough for an answer, and the model's own."""
        return self.role == "assistant" and not self.is_demo and len(PIECES.findall(self.text)) >= ANSWER_MIN


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the task."""
    group = parser.add_argument_group(f"the task {SESSION}")
    group.add_argument("--sessions", type=Path, metavar="FOLDER", help="recorded sessions: *.traj and *.json files")
    group.add_argument("--requests", type=int, default=32, help="requests of a round [32]")
    group.add_argument(
        "--session-prompt", type=int, default=8192, help="the most tokens of a prompt, or what the model has [8192]"
    )
    group.add_argument(
        "--tokenizer",
        help="a folder or a GGUF file whose tokenizer splits the text; without it tokens are as in others",
    )


def make_asked(parser: argparse.ArgumentParser, options: argparse.Namespace, vocabulary: int, context: int) -> Task:
    """Return the task that the options ask for. Options or files that are wrong end the program.

    Args:
        parser: For its error.
        options: Those of `add_options`, and tokens and batch.
        vocabulary: Token ids of the model.
        context: The most tokens of its sequences.
    """
    if options.sessions is None:
        parser.error(f"the task {SESSION} needs --sessions FOLDER")
    prompt = min(options.session_prompt, context - options.tokens)
    split: Callable[[str], Iterable[Hashable]] = PIECES.findall
    try:
        if options.tokenizer:
            split = partial(Tokenizer.load(options.tokenizer).encode, special=False)
        task = make_task(options.sessions, options.requests, prompt, options.tokens, vocabulary, split)
    except (SessionError, KvforgeError) as error:
        parser.error(str(error))
    if len(task.prompts) < max(options.batch):
        parser.error(f"--batch {max(options.batch)}: the round has {len(task.prompts)} requests")
    return task


def make_task(
    folder: Path,
    requests: int,
    prompt: int,
    answer: int,
    vocabulary: int,
    split: Callable[[str], Iterable[Hashable]] = PIECES.findall,
) -> Task:
    """Return the task, the same for the same files.

    Args:
        folder: The sessions.
        requests: How many requests it has; fewer, if the sessions have fewer answers.
        prompt: The most tokens of a prompt, at least 2.
        answer: The most tokens of an answer.
        vocabulary: Token ids of the model.
        split: Returns the tokens of a text.

    Raises:
        SessionError: Names the file and what is missing, or the number that is too small.
    """
    if requests < 1 or prompt < 2:
        raise SessionError(f"{requests} requests with prompts of {prompt} tokens (expected at least 1, and at least 2)")
    sessions = read_sessions(folder)
    places = answers_of(sessions)
    if not places:
        raise SessionError(f"no assistant message of at least {ANSWER_MIN} tokens below {folder}")
    numbers, prompts, answers = Vocabulary(split), [], []
    for number, (session, at) in enumerate(spread(places, requests)):
        own = FIRST_TOKEN + number  # no two prompts share a prefix
        prompts.append([own, *last_tokens(prompt_texts(sessions[session][:at]), prompt - 1, numbers)])
        answers.append(numbers.encode(sessions[session][at].text)[:answer])
    if numbers.end > vocabulary:
        pieces = numbers.end - FIRST_TOKEN
        room = vocabulary - FIRST_TOKEN
        raise SessionError(f"{pieces} distinct pieces of text, and ids for {room} in the model (try fewer --requests)")
    return Task(prompts, answers)


def read_sessions(folder: Path) -> list[list[Message]]:
    """Return the messages of each session below a folder, in the order of paths.

    Raises:
        SessionError: Names the file, and what is wrong with it.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    sessions = [session for path in paths if (session := _read(path)) is not None]
    if not sessions:
        raise SessionError(f"no sessions below {folder} (expected *.traj or *.json files with a list {_names()})")
    return sessions


def answers_of(sessions: Sequence[Sequence[Message]]) -> list[tuple[int, int]]:
    """Return session and message of each answer, without those that an earlier session has."""
    places: list[tuple[int, int]] = []
    earlier: set[str] = set()
    for number, session in enumerate(sessions):
        own = [at for at, each in enumerate(session) if each.is_answer and each.text not in earlier]
        places += [(number, at) for at in own]
        earlier.update(session[at].text for at in own)
    return places


def spread(places: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return so many of the places, at equal distances; all, if there are fewer."""
    count = min(count, len(places))
    return [places[(2 * number + 1) * len(places) // (2 * count)] for number in range(count)]


def prompt_texts(messages: Iterable[Message]) -> list[str]:
    """Return the texts of a prompt, which are tokens on their own: each role, what follows, and the answer's role."""
    texts = [text for each in messages for text in (f"{each.role}:\n", each.text, "\n")]
    return [*texts, "assistant:\n"]


def last_tokens(texts: Sequence[str], count: int, vocabulary: Vocabulary) -> list[int]:
    """Return the last tokens of a list of texts, at most `count`."""
    parts: list[list[int]] = []
    held = 0
    for text in reversed(texts):
        parts.append(vocabulary.encode(text))
        held += len(parts[-1])
        if held >= count:
            break
    return [token for part in reversed(parts) for token in part][-count:]


def sizes(task: Task) -> dict[str, Any]:
    """Return the requests of a task, with the median and the largest length of prompts and answers, in tokens."""
    found: dict[str, Any] = {"requests": len(task.prompts)}
    for name, texts in (("prompt", task.prompts), ("answer", task.answers)):
        lengths = [len(text) for text in texts]
        found |= {f"{name}_median": median(lengths), f"{name}_max": max(lengths), f"{name}s_sum": sum(lengths)}
    return found


def _names() -> str:
    return " or ".join(f"`{name}`" for name in LISTS)


def _read(path: Path) -> list[Message] | None:
    """Return the messages of a file, None for a `.json` file that holds no session."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise SessionError(f"not a session: {path} (not JSON: {error})") from None
    found = document if isinstance(document, dict) else {}
    name = next((name for name in LISTS if isinstance(found.get(name), list)), None)
    if name is None:
        if path.suffix == ".traj":
            raise SessionError(f"not a session: {path} (no list {_names()})")
        print(f"skipped: {path} (no list {_names()})", file=sys.stderr)
        return None
    messages: list[Message] = []
    for at, each in enumerate(found[name]):
        try:
            messages.append(_message(each))
        except SessionError as error:
            raise SessionError(f"invalid session: {path} ({name}[{at}]: {error})") from None
    return messages


def _message(found: Any) -> Message:
    """Return a message as it is in a file. Raises SessionError without the file's name."""
    if not isinstance(found, dict):
        raise SessionError("not a JSON object")
    role, calls = found.get("role"), found.get("tool_calls") or []
    if not isinstance(role, str):
        raise SessionError("no `role`")
    if not isinstance(calls, list):
        raise SessionError("`tool_calls` is not a list")
    content = _content(found.get("content"), bool(calls))
    text = "\n".join(part for part in (content, *map(_call, calls)) if part)
    return Message(role, text, bool(found.get("is_demo")) or found.get("message_type") == DEMONSTRATION)


def _content(content: Any, is_optional: bool) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    if content is None and is_optional:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise SessionError("no `content` (expected text or a list of parts)")
    return "".join(part["text"] for part in content if isinstance(part.get("text"), str))


def _call(call: Any) -> str:
    """Return the text of a tool call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SessionError("a tool call has no `function` with a `name`")
    arguments = function.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {written}}}'
