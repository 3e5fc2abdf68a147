"""Runs a command that ends when its starter does: `python leash.py PARENT_PID COMMAND...`

The kernel is asked to kill it when the parent ends, however that ends; then the command takes this process over. It is
not asked to end: one that loads a model, hangs or is stopped would not hear it, and nobody is left who could kill it.
(A function between fork and exec would do the same, but the parent has ZeroMQ's I/O thread.)
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def leashed(command: list[str]) -> list[str]:
    """The command that hangs on a leash of this process. command: a path, and its arguments."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    """Never returns: becomes the command, or ends if the parent is gone already."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - the command is ours, from a list


if __name__ == "__main__":
    main()
