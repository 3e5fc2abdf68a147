"""`kvforge completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from kvforge.process.installation import install_command
from kvforge.protocol.errors import Unavailable

from . import parsing

SHELLS = ("bash", "zsh", "fish")
INSTALL = """\
  bash   kvforge completion bash > ~/.local/share/bash-completion/completions/kvforge
  zsh    kvforge completion zsh > ~/.zfunc/_kvforge      with ~/.zfunc in fpath, before compinit
  fish   kvforge completion fish > ~/.config/fish/completions/kvforge.fish
"""


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers,
        "completion",
        run,
        "Print a script that completes commands and options in a shell.",
        connects=False,
        epilog=INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(options: argparse.Namespace) -> int:
    """Print the script.

    Raises:
        Unavailable: The extra `terminal` is not installed.
    """
    if find_spec("shtab") is None:
        raise Unavailable(f"completion needs the extra `terminal`: {install_command('terminal')}")
    import shtab

    print(shtab.complete(_with_files(options.parser), options.shell))
    return 0


def _with_files(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Mark the options that name files and folders, for the shell to complete them."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in set(action.choices.values()):
                _with_files(inner)
        elif action.metavar in ("FILE", "PATH"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in ("DIR", "FOLDER"):
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser
