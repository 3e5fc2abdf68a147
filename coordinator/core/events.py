"""What enters the core and what leaves it."""

from __future__ import annotations

import msgspec

from protocol.errors import Field
from protocol.messages import Message, Stream

# A peer's number is given by the shell when it connects and is never used again within a boot.


class FromClient(msgspec.Struct, frozen=True):
    """A client sent a message. `entropy` (64 bit) is drawn by the shell for a Submit, which may need a seed."""

    client: int
    message: Message
    entropy: int = 0


class ClientGone(msgspec.Struct, frozen=True):
    """A client's connection ended. goodbye: it said so; else it vanished and may come back."""

    client: int
    goodbye: bool = False


class ClientFull(msgspec.Struct, frozen=True):
    """A client takes nothing more for now: `lost` could not be sent to it."""

    client: int
    lost: Stream


class FromWorker(msgspec.Struct, frozen=True):
    """A worker sent a message."""

    worker: int
    message: Message


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker's connection ended. goodbye: it left on purpose; else it died, or is cut off."""

    worker: int
    goodbye: bool = False


class Turn(msgspec.Struct, frozen=True):
    """Everything that had arrived has been applied: plan steps, flush streams, let time pass."""


Event = FromClient | ClientGone | ClientFull | FromWorker | WorkerGone | Turn


class ToClient(msgspec.Struct, frozen=True):
    """Send to a client."""

    client: int
    message: Message


class ToWorker(msgspec.Struct, frozen=True):
    """Send to a worker."""

    worker: int
    message: Message


class DropWorker(msgspec.Struct, frozen=True):
    """Stop talking to a worker that broke the protocol or announced its end."""

    worker: int
    reason: str


class ReplaceWorker(msgspec.Struct, frozen=True):
    """End a worker process that is alive and does nothing, its stack to its log first: a successor is started by
    whoever keeps workers running."""

    worker: int
    pid: int
    reason: str


class Log(msgspec.Struct, frozen=True):
    """Tell the operator. level: debug, info, warning or error. event: its name for programs; fields: what belongs to
    it, which the text does not repeat (`protocol.logs`)."""

    level: str
    text: str
    event: str = ""
    fields: dict[str, Field] = {}


Effect = ToClient | ToWorker | DropWorker | ReplaceWorker | Log
