"""Text helpers that a forked gateway forks, without the second that each needs to import transformers.

For the gateways of the fork server of `SERVICES`, which imports transformers before the first of them. A helper gets
the command line, environment, process group and leash that `kvforge.gateway.text.pool` gives a fresh interpreter. The
tests of the pool start fresh ones.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any


def import_transformers() -> None:
    """Import what the helpers import, without torch as they do."""
    from kvforge.gateway.text.process import _hide_torch
    from kvforge.text.tokenizer import _gguf_converter, _transformers

    _hide_torch()
    try:
        transformers: Any = _transformers()
        _ = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
        _gguf_converter()
    finally:
        del sys.modules["torch"]


class ForkedHelper:
    """The part of subprocess.Popen that the pool needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        if self._status is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._status = os.waitstatus_to_exitcode(ended[1])
        return self._status

    def wait(self) -> int:
        """Wait for the exit status."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork_helpers() -> None:
    """Let the gateway of this process fork its text helpers."""
    from kvforge.gateway.text import pool

    forking = ModuleType("subprocess")
    vars(forking).update(vars(subprocess), Popen=_forked)
    vars(pool)["subprocess"] = forking


def _forked(
    command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], stdin: int, process_group: int
) -> ForkedHelper:
    from kvforge.gateway.text import pool

    assert (stdin, process_group, len(pass_fds)) == (subprocess.DEVNULL, 0, 1), "the pool starts its helpers otherwise"
    begin = command.index(str(pool.ENTRY)) - 2  # without the leash
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become(parent, list(command[begin:]), pass_fds[0], dict(env))
            status = 0
        except BaseException:  # noqa: BLE001 - the caller's frames, an event loop among them, must not run on
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return ForkedHelper(pid)


def _become(parent: int, command: list[str], descriptor: int, environment: dict[str, str]) -> None:
    """Run the text helper in a child of the gateway, without the descriptors and signal handlers of the gateway."""
    from kvforge.gateway.text.process import main

    from .fork_server import die_with_parent, set_command_line

    gc.freeze()
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    set_command_line(command)
    sys.argv = [command[3], str(descriptor)]
    main(descriptor)
