"""The parser of command lines: an error shows the usage of the command that was typed, and the nearest known word."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

from kvforge.protocol.suggestions import did_you_mean, nearest

UNRECOGNIZED = "unrecognized arguments"
_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """A parser that reports an error where its help cannot be written (argparse ignores it)."""

    _given: Sequence[str] = ()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        print(self.format_help(), end="", file=file)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse what this parser does not know: argparse leaves that to the outermost one, with its usage."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"{UNRECOGNIZED}: {' '.join(left)}{self._suggestion(left)}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with status 2."""
        choice, suggestion = _CHOICE.search(message), ""
        if choice is not None:
            suggestion = did_you_mean(choice[1], [name.strip(" '\"") for name in choice[2].split(",")])
        if not suggestion and not message.startswith(UNRECOGNIZED):
            # A misspelt option, or one of another command, may be why the rest is not understood.
            suggestion = self._suggestion([word for word in self._given if self._lacks(word)])
        message += suggestion
        super().error(message)

    def _lacks(self, word: str) -> bool:
        """Whether a word is an option that is not known here, not abbreviated either."""
        name = word.partition("=")[0]
        return name.startswith("--") and len(name) > 2 and not any(own.startswith(name) for own in self.options())

    def _suggestion(self, left: list[str]) -> str:
        """The option that was probably meant by the first unknown one, here or at another command."""
        word = next((word for word in left if word.startswith("--")), None)
        if word is None:
            return ""
        name = word.partition("=")[0]
        if found := did_you_mean(name, self.options()):
            return found
        others: dict[str, str] = {}
        for command, parser in self.commands().items():
            for option in parser.options():
                others.setdefault(option, command)
        found = nearest(name, others)
        return f"; did you mean `{self.prog} {others[found]} {found}`?" if found else ""

    def options(self) -> list[str]:
        """The options that it takes."""
        return [text for action in self._actions for text in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """Its subcommands, by their names and aliases."""
        found: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= action.choices
        return found
