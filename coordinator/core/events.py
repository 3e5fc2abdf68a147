"""What enters the core and what leaves it.

Nothing else enters: the same events at the same times, from the Boot on, make the same state and the same effects.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvforge.protocol.errors import Field
from kvforge.protocol.messages import Message, Stream

from .limits import Limits
from .rights import Access

# A peer's number is given by the shell when it connects and is never used again within a boot.


class Boot(msgspec.Struct, frozen=True):
    """The process starts: the first event of a machine, and what it is made from.

    boot: names this life to whoever talks to it; hash_key: 1 to 64 secret bytes that nobody can foresee the hashes
    of the prefix index without.
    first_id: the ids of requests and sequences are larger, and first_generation: those of blocks are not smaller; so
    that no name of one life means something in another.
    """

    boot: str
    hash_key: bytes
    limits: Limits
    first_id: int = 0
    first_generation: int = 0


class ClientCame(msgspec.Struct, frozen=True):
    """A client said hello: nothing comes from it before.

    session: a name of its own by which it can come back under the same number; "": none. access: what it may do.
    """

    client: int
    session: str = ""
    access: Access = Access()


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


class CommandRefused(msgspec.Struct, frozen=True):
    """A client's command was refused, which changed nothing but a counter. It stands for the command in a journal.

    submit: it was a Submit.
    """

    client: int
    submit: bool


class FromWorker(msgspec.Struct, frozen=True):
    """A worker sent a message."""

    worker: int
    message: Message


class WorkerGone(msgspec.Struct, frozen=True):
    """A worker's connection ended. goodbye: it left on purpose; else it died, or is cut off.

    away: it ended while the coordinator stood still, and the process may be there: it may come back with its pool.
    """

    worker: int
    goodbye: bool = False
    away: bool = False


class BeginDrain(msgspec.Struct, frozen=True):
    """The process is told to stop: nothing more is admitted, and what has not ended by `deadline_us` is handed back."""

    deadline_us: int


class Restarted(msgspec.Struct, frozen=True):
    """The process is another one, which has made this machine anew from its journal: all connections are gone. Whoever
    was connected may come back, and goes on where it was."""


class Turn(msgspec.Struct, frozen=True):
    """Everything that had arrived has been applied: let time pass, plan steps, flush streams."""


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


class Applied(NamedTuple):
    """What an event comes to: effects, in order, and when a Turn is due though nothing else happens.

    due_us: absolute, the time of the event itself where a Turn must follow from it; None: not before something happens.
    """

    effects: list[Effect]
    due_us: int | None
