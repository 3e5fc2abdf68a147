"""Runs programs for an installation or a check: leashed to this process, with their output kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvforge.process.leash import leashed
from kvforge.protocol.errors import Unavailable

from .accounts import Account

CHECK_S_MAX = 120.0  # importing torch takes seconds, or minutes on a slow disk
# Where administrators' programs lie that `su` leaves out of PATH, such as `userdel`.
ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin"
INSTALL_S_MAX = 3600.0  # torch is gigabytes


@dataclass(frozen=True)
class Outcome:
    """A program's exit status and output."""

    status: int
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """Return the last line of its output, errors first."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit status {self.status}"


def run(
    command: Sequence[str | Path],
    timeout_s: float = CHECK_S_MAX,
    environment: Mapping[str, str] | None = None,
    account: Account | None = None,
    show: bool = False,
) -> Outcome:
    """Run a program to its end.

    Args:
        command: The program and its arguments.
        timeout_s: The limit in seconds.
        environment: The environment variables, by default this process's own.
        account: The user to run as, if this process is root.
        show: Show its output to the user.

    Raises:
        Unavailable: The program is missing, cannot be started or takes too long.
    """
    name = str(command[0])
    path = shutil.which(name) or shutil.which(name, path=ADMIN_PATH)
    if path is None:
        raise Unavailable(f"{name} is not installed")
    line, them = [path, *map(str, command[1:])], {}
    if account is not None and os.geteuid() == 0:
        them = {"user": account.uid, "group": account.gid, "extra_groups": sorted(account.groups.values())}
    else:  # only without an account: another user may be unable to read this interpreter, and its programs are short
        line = leashed(line)
    try:
        done = subprocess.run(
            line,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            cwd="/",
            env=dict(os.environ if environment is None else environment),
            **them,  # type: ignore[call-overload]
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{name} has not ended within {timeout_s:g} s") from None
    except OSError as error:
        raise Unavailable(f"{name} cannot be started: {error.strerror}") from None
    return Outcome(done.returncode, done.stdout or "", done.stderr or "")


def must(command: Sequence[str | Path], show: bool = False) -> None:
    """Run a program that must succeed.

    Raises:
        Unavailable: It failed; the error has its last line.
    """
    done = run(command, INSTALL_S_MAX, show=show)
    if done.status != 0:
        words = "see above" if show else done.last_words
        raise Unavailable(f"{' '.join(map(str, command[:4]))} ... failed with status {done.status}: {words}")
