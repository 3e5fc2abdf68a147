"""The end of a forked process, without the interpreter's teardown."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def leave(code: str | int | None) -> NoReturn:
    """End this process as SystemExit does, without the interpreter's teardown.

    The teardown frees the objects of all imported modules one by one: two seconds, twice, for each forked `kvforge up`.

    Args:
        code: That of SystemExit: an exit status, or a message.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    gc.freeze()  # functions that run at exit collect nothing of these objects either
    threading._shutdown()  # type: ignore[attr-defined] # it waits for threads, as the teardown does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(1 if isinstance(code, str) else code or 0)
