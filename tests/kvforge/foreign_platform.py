"""Makes this Linux process look like macOS or Windows to code that is imported afterwards.

It sets sys.platform, and removes modules and names that the other platform lacks. Paths stay those of Linux (os.name),
and modules of other projects that choose their code by the platform are imported before.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import multiprocessing.util
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq.utils.monitor
import zmq.utils.z85

T = TypeVar("T")
CHOSEN = (importlib.metadata, multiprocessing.util, selectors, shutil, subprocess, tempfile, urllib.request, uuid)
OTHERS = (msgspec, np, zmq.utils.monitor, zmq.utils.z85)

# Names that Linux alone has, and those that Windows lacks too.
LINUX_NAMES: dict[Any, tuple[str, ...]] = {
    os: (
        *("eventfd", "memfd_create", "pidfd_open", "posix_fallocate", "copy_file_range"),
        *("sched_getaffinity", "sched_setaffinity"),
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal",),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "AF_NETLINK"),
}
POSIX_NAMES: dict[Any, tuple[str, ...]] = {
    os: (
        *("fork", "forkpty", "register_at_fork", "setsid", "getpgid", "killpg", "waitid", "wait4", "WNOHANG"),
        *("getuid", "geteuid", "getgid", "getegid", "getgrouplist", "chown", "fchown", "getpriority", "setpriority"),
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "uname", "sysconf", "statvfs", "getloadavg"),
    ),
    select: ("poll",),
    signal: (
        *("SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGQUIT", "SIGALRM", "SIGPROF", "SIGSTOP", "SIGCONT"),
        *("setitimer", "pthread_sigmask", "sigtimedwait"),
    ),
    socket: ("AF_UNIX", "SCM_RIGHTS", "CMSG_LEN", "recv_fds", "send_fds"),
}
POSIX_MODULES = (
    *("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog", "uvloop", "readline", "curses"),
)


def pretend(platform: str) -> None:
    """Turn this process into one of `darwin` or `win32`."""
    assert not any(name.startswith("kvforge") for name in sys.modules), "before kvforge is imported"
    _remove(LINUX_NAMES)
    if platform == "win32":
        # The event loop needs a pair. Windows' own is made of TCP connections.
        socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)
        _remove(POSIX_NAMES)
        for name in POSIX_MODULES:
            sys.modules[name] = None  # type: ignore[assignment]
    sys.platform = platform


def _remove(names: dict[Any, tuple[str, ...]]) -> None:
    for module, gone in names.items():
        for name in gone:
            if hasattr(module, name):
                delattr(module, name)


class CompletionLoop(asyncio.SelectorEventLoop):
    """A loop that cannot watch descriptors, as Windows' default one."""

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:
        raise NotImplementedError

    def remove_reader(self, fd: Any) -> bool:
        raise NotImplementedError


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the kind of loop that `asyncio.run` has on this platform."""
    factory = CompletionLoop if sys.platform == "win32" else asyncio.SelectorEventLoop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
