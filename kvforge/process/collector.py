"""The garbage collector around imports of large packages.

Modules live as long as the process, but while they are imported, and when the interpreter exits, the collector walks
their objects again and again: 0.9 of 3.3 s of a worker's imports, and 1.0 s of its exit.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause automatic collections, unless they are off."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def keep_all() -> None:
    """Exempt all live objects from later collections, those of the interpreter's exit included.

    There is no collection first: imports leave little garbage.
    """
    gc.freeze()
