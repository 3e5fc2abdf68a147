"""Exceptions that end a command early. `kvforge.protocol.exits` documents the exit statuses."""

from __future__ import annotations


class Stopped(Exception):
    """A command ends early with an exit status; the message is one sentence for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to end. Clean-up code handles it like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number
