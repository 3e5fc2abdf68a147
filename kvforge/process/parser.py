"""A command-line parser that reports errors with the usage of the typed command and the nearest known word."""

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
    """A parser that also reports errors when its help cannot be written (argparse ignores these)."""

    _given: Sequence[str] = ()

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        """Print the help to a file, by default standard output."""
        print(self.format_help(), end="", file=file)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown arguments here: argparse leaves them to the outermost parser, with its usage."""
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
            # A misspelt option, or one of another command, may have caused the error.
            suggestion = self._suggestion([word for word in self._given if self._lacks(word)])
        message += suggestion
        super().error(message)

    def _lacks(self, word: str) -> bool:
        """Return whether a word is an option that this parser does not know, even abbreviated."""
        name = word.partition("=")[0]
        return name.startswith("--") and len(name) > 2 and not any(own.startswith(name) for own in self.options())

    def _suggestion(self, left: list[str]) -> str:
        """Suggest the option that the first unknown one probably meant, of this or another command."""
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
        """Return its options."""
        return [text for action in self._actions for text in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """Return its subcommands by name and alias."""
        found: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= action.choices
        return found
