"""Events that enter the core, and effects that leave it.

The core has no other inputs: the same events at the same times, from `Boot` on, give the same state and effects.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvforge.protocol.errors import Field
from kvforge.protocol.messages import Message, Stream

from .limits import Limits
from .rights import Access

# The shell numbers peers as they connect. Numbers are unique within a boot.


class Boot(msgspec.Struct, frozen=True):
    """The coordinator process starts: the first event, from which the machine is built.

    Attributes:
        boot: Identifies this boot to its peers.
        hash_key: 1 to 64 secret bytes that make the hashes of the prefix index unpredictable.
        limits: All limits of the core.
        first_id: Ids of requests and sequences are greater, so that ids of one boot mean nothing in another.
        first_generation: Generations of blocks are not smaller, for the same reason.
    """

    boot: str
    hash_key: bytes
    limits: Limits
    first_id: int = 0
    first_generation: int = 0


class ClientCame(msgspec.Struct, frozen=True):
    """A client completed its handshake. Nothing is accepted from a client before.

    Attributes:
        session: A name with which the client can reconnect under the same number; "" for none.
        access: The client's rights and limits.
    """

    client: int
    session: str = ""
    access: Access = Access()


class FromClient(msgspec.Struct, frozen=True):
    """A client sent a message.

    Attributes:
        entropy: 64 random bits that the shell draws for a Submit, which may need a seed.
    """

    client: int
    message: Message
    entropy: int = 0


class ClientGone(msgspec.Struct, frozen=True):
    """A client's connection ended.

    Attributes:
        goodbye: The client said goodbye; otherwise it vanished and may return.
    """

    client: int
    goodbye: bool = False


class ClientFull(msgspec.Struct, frozen=True):
    """A client's send buffer is full: `lost` could not be sent."""

    client: int
    lost: Stream


class CommandRefused(msgspec.Struct, frozen=True):
    """A client's command was refused. In a journal, this stands for the command, because only a counter changed.

    Attributes:
        submit: The command was a Submit.
    """

    client: int
    submit: bool


class FromWorker(msgspec.Struct, frozen=True):
    """A worker sent a message."""

    worker: int
    message: Message


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker's connection ended.

    Attributes:
        goodbye: The worker left on purpose; otherwise it died or is cut off.
        away: The connection ended while the coordinator was down, and the worker may return with its pool.
    """

    worker: int
    goodbye: bool = False
    away: bool = False


class BeginDrain(msgspec.Struct, frozen=True):
    """The coordinator shuts down: it admits nothing more, and hands back what has not ended by `deadline_us`."""

    deadline_us: int


class Restarted(msgspec.Struct, frozen=True):
    """A new process has rebuilt this machine from its journal. All connections are gone; peers may reconnect."""


class Turn(msgspec.Struct, frozen=True):
    """All arrived events have been applied: let time pass, plan steps, flush streams."""


Event = (
    ClientCame
    | FromClient
    | CommandRefused
    | ClientGone
    | ClientFull
    | FromWorker
    | WorkerGone
    | BeginDrain
    | Restarted
    | Turn
)


class ToClient(msgspec.Struct, frozen=True):
    """Send to a client."""

    client: int
    message: Message


class ToWorker(msgspec.Struct, frozen=True):
    """Send to a worker."""

    worker: int
    message: Message


class DropWorker(msgspec.Struct, frozen=True):
    """Disconnect a worker that broke the protocol or announced its end."""

    worker: int
    reason: str


class ReplaceWorker(msgspec.Struct, frozen=True):
    """End a worker process that hangs, after it has logged its stack. Its supervisor starts a successor."""

    worker: int
    pid: int
    reason: str


class Log(msgspec.Struct, frozen=True):
    """Write a log entry.

    Attributes:
        level: debug, info, warning or error.
        event: The name of the event, for programs.
        fields: Values that the text does not repeat (`protocol.logs`).
    """

    level: str
    text: str
    event: str = ""
    fields: dict[str, Field] = {}


Effect = ToClient | ToWorker | DropWorker | ReplaceWorker | Log


class Applied(NamedTuple):
    """The outcome of an event.

    Attributes:
        effects: Effects, in order.
        due_us: Absolute time when a Turn is due without a further event; the event's own time if a Turn must follow
            now, None if only another event can make one necessary.
    """

    effects: list[Effect]
    due_us: int | None
