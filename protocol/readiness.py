"""Waiting for descriptors of any number.

`select.select` refuses descriptors above 1,023. A server with a thousand connections gives such a number to every file
that it opens then: to the process of a worker that it watches, or to the pipe of a helper that it starts again. Nor may
the wait need a descriptor of its own, as epoll does: the server may have none left.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable
from typing import Protocol, TypeVar

# poll() is missing on Windows, where clients run and no server does.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class HasDescriptor(Protocol):
    """An object with a descriptor, such as a socket."""

    def fileno(self) -> int:
        """Return the descriptor."""


File = TypeVar("File", bound=int | HasDescriptor)


def readable(files: Iterable[File], seconds: float | None) -> list[File]:
    """Wait until one of the files can be read, or has ended.

    Args:
        files: Descriptors, or objects that have one; none twice.
        seconds: How long at most; None: without a limit.

    Returns:
        The files that can be read; none after that time.
    """
    with Selector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        ready: list[File] = [key.fileobj for key, _ in selector.select(seconds)]  # type: ignore[misc]
        return ready
