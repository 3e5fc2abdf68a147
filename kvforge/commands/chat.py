"""`kvforge chat`: a conversation in the terminal, or one prompt per line from a pipe."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kvforge.client.blocking import Client
from kvforge.client.options import MAX_TOKENS
from kvforge.client.results import Finished
from kvforge.client.sampling import SamplingParams
from kvforge.process.ending import Interrupted
from kvforge.protocol.errors import CoordinatorUnavailable, InvalidRequest, KvforgeError, UnsupportedModel
from kvforge.protocol.exits import OK

from . import parsing
from .screen import printable
from .waiting import add_wait, wait_for_model

BLOCK = '"""'
HELP = f"""\
/help              this list
/reset             forget the conversation (the system prompt stays)
/system TEXT       set the system prompt and start over; without TEXT: none
/temperature X     0 is greedy; without X: the model's own
/stats             tokens a second and cached tokens of the last answer
/save FILE         write the conversation as text; an existing file is not overwritten
/quit              leave (also Ctrl-D)
A line that ends with \\ continues on the next one; {BLOCK} starts and ends several lines. Ctrl-C stops an answer.\
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers, "chat", run, "Talk to the model; each line from a pipe is a prompt of one conversation."
    )
    parser.add_argument("--system", metavar="TEXT", default="", help="the system prompt")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy [the model's own]")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"limit of an answer [{MAX_TOKENS}]"
    )
    parser.add_argument("--tenant", default="default", metavar="NAME")
    parser.add_argument("--tokenizer", metavar="PATH", help="where to load the tokenizer from [KVFORGE_TOKENIZER]")
    add_wait(parser)


def run(options: argparse.Namespace) -> int:
    """Chat until the input ends.

    Raises:
        UnsupportedModel: The model has no chat template.
    """
    with parsing.open_client(options, options.tokenizer) as kv:
        health = wait_for_model(kv, options.wait)
        if not kv.has_chat_template():
            name = health.model.name if health.model is not None else "the model"
            raise UnsupportedModel(name, "it has no chat template; use `kvforge generate --raw` to continue a text")
        return Chat(kv, options, interactive=sys.stdin.isatty() and sys.stdout.isatty()).run()


class Chat:
    """One conversation.

    Args:
        kv: The client.
        options: The options of the command.
        interactive: Print prompts and notes; an error or Ctrl-C ends only the current answer.
    """

    def __init__(self, kv: Client, options: argparse.Namespace, *, interactive: bool) -> None:
        self._kv, self._interactive = kv, interactive
        self._tenant, self._max_tokens = options.tenant, options.max_tokens
        self._temperature: float | None = options.temperature
        self._system: str = options.system
        self._history: list[dict[str, str]] = []
        self._last: tuple[Finished, float] | None = None
        self._sampling()

    def run(self) -> int:
        """Read prompts and print answers until the end of the input or /quit."""
        if self._interactive:
            with suppress(ImportError):
                import readline  # noqa: F401 - line editing and history for input(); no history file
            self._note("/help lists the commands; Ctrl-D ends")
        while True:
            try:
                text = self._read()
                if not text.strip():
                    continue
                if text.startswith("/"):
                    if not self._command(*_parted(text)):
                        return OK
                else:
                    self._answer(text)
            except EOFError:
                if self._interactive:
                    print()
                return OK
            except KeyboardInterrupt as interrupt:
                if isinstance(interrupt, Interrupted) or not self._interactive:
                    raise
                print()
            except CoordinatorUnavailable:
                raise
            except KvforgeError as error:
                if not self._interactive:
                    raise
                self._note(str(error))

    def _read(self) -> str:
        """Return a prompt, which may have several lines. Raises EOFError."""
        line = self._line("> ")
        if line.startswith(BLOCK):
            lines = [line.removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._line("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
            return "\n".join(lines).strip("\n")
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line("... "))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        return input(prompt if self._interactive else "")

    def _answer(self, text: str) -> None:
        """Print the answer as it arrives. A stopped answer joins the conversation as far as it was received."""
        asked = [*self._history, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        began = monotonic()
        answer = self._kv.generate_stream(
            [*system, *asked], max_tokens=self._max_tokens, sampling=self._sampling(), tenant=self._tenant
        )
        pieces: list[str] = []
        try:
            for piece in answer:
                pieces.append(piece)
                print(printable(piece) if self._interactive else piece, end="", flush=True)
        except KeyboardInterrupt:
            answer.cancel()
            raise
        finally:
            if pieces:
                print(flush=True)
                self._history = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        finished = answer.result().finished
        self._history = [*asked, {"role": "assistant", "content": "".join(pieces)}]
        self._last = finished, monotonic() - began
        if finished.reason == "length" and self._interactive:
            self._note(f"cut after {self._max_tokens} tokens (--max-tokens)")

    def _command(self, name: str, rest: str) -> bool:
        """Run a command; return whether the chat continues. Raises InvalidRequest for an unknown command."""
        if name == "quit":
            return False
        if name == "help":
            self._note(HELP)
        elif name == "reset":
            self._history = []
        elif name == "system":
            self._system, self._history = rest, []
        elif name == "temperature":
            self._set_temperature(rest)
        elif name == "stats":
            self._stats()
        elif name == "save":
            self._save(rest)
        else:
            raise InvalidRequest("command", f"unknown command /{name}; /help lists the commands")
        return True

    def _set_temperature(self, text: str) -> None:
        before = self._temperature
        try:
            self._temperature = float(text) if text else None
            self._sampling()
        except ValueError:
            raise InvalidRequest("temperature", f"{text!r} is not a number") from None
        except InvalidRequest:
            self._temperature = before
            raise

    def _sampling(self) -> SamplingParams:
        sampling = SamplingParams(temperature=self._temperature)
        sampling.message()
        return sampling

    def _stats(self) -> None:
        if self._last is None:
            self._note("no answer yet")
            return
        done, took_s = self._last
        rate = len(done.tokens) / took_s if took_s > 0 else 0.0
        cached = f"{done.cached_tokens} of {done.prompt_tokens} prompt tokens cached"
        self._note(f"{len(done.tokens)} tokens, {rate:.1f} tokens/s, {cached}")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidRequest("file", "is missing: /save FILE")
        system = [{"role": "system", "content": self._system}] if self._system else []
        text = "\n\n".join(f"{entry['role']}: {entry['content']}" for entry in [*system, *self._history])
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise InvalidRequest("file", f"{name} cannot be written: {error.strerror}") from None
        self._note(f"written to {name}")

    def _note(self, text: str) -> None:
        """Print a note of the chat itself; from a pipe, to standard error, apart from the answers."""
        print(printable(text), file=sys.stdout if self._interactive else sys.stderr, flush=True)


def _parted(text: str) -> tuple[str, str]:
    name, _, rest = text.removeprefix("/").partition(" ")
    return name.strip(), rest.strip()
