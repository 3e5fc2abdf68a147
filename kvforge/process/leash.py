"""Runs a command that dies with its parent.

Usage: `python leash.py PARENT_PID COMMAND...`. It asks the kernel for SIGKILL when the parent ends for any reason, then
executes the command. The signal is not a request to end: a child that loads a model, hangs or is stopped would not
react, and no process would be left to kill it. (A function between fork and exec could do the same, but the parent has
ZeroMQ's I/O thread.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def leashed(command: list[str]) -> list[str]:
    """Return a command that dies with this process.

    Args:
        command: A path and its arguments.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Execute the command, or exit if the parent is already gone. Never returns."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the command comes from kvforge, as a list


if __name__ == "__main__":
    main()
