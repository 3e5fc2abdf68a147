"""What a program on a node, its keeper and the controller say to each other: small JSON documents, and no token."""

from __future__ import annotations

import msgspec

from kvforge.protocol.errors import InternalError

# Of a replica or gateway. placing: no node has room for it yet. silent: nothing was heard of it. unready: it served,
# and does not now. stopped: it has ended as it was asked to, and left nothing. failed: it cannot start.
PLACING, STARTING, READY, UNREADY, SILENT, DRAINING, STOPPED, FAILED = PHASES = (
    *("placing", "starting", "ready", "unready", "silent", "draining", "stopped", "failed"),
)
REPLICA, GATEWAY = KINDS = ("replica", "gateway")
DOCUMENT_BYTES_MAX = 1 << 17


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways find a replica. server_key: its public key."""

    endpoint: str
    server_key: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first that a program hears. address: of its node. text: fleet.toml. public, secret: the gateways' own keys;
    a replica is told the first alone. places: for a gateway."""

    name: str
    address: str
    text: str
    public: str
    secret: str = ""
    places: dict[str, Place] = {}


class Use(msgspec.Struct, frozen=True, kw_only=True, tag="use"):
    """To a gateway: these replicas, and what [gateway] of this fleet.toml says."""

    text: str
    places: dict[str, Place]


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """To a replica: take nothing new; what has not ended after so long is handed back."""

    deadline_s: float


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End, and leave nothing."""


Order = Begin | Use | Drain | Stop
_ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What one says of itself. reason: why it does not serve. node: where it is, in Ray's words; life: of its keeper,
    another one after each of its starts. age_s: since it began to start; failed_s, draining_s: since it failed, since
    it was told to drain.

    Of a replica: running, pending: requests; queue_s: how long those wait that wait. place: where gateways find it.
    Of a gateway: url; ready: the replicas that it sends requests to; used: those that it knows of. pids: by name.
    """

    phase: str
    reason: str = ""
    node: str = ""
    life: str = ""
    age_s: float = 0.0
    failed_s: float = 0.0
    draining_s: float = 0.0
    running: int = 0
    pending: int = 0
    queue_s: float = 0.0
    place: Place | None = None
    url: str = ""
    ready: tuple[str, ...] = ()
    used: tuple[str, ...] = ()
    pids: dict[str, int] = {}


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One of a fleet, as its controller sees it."""

    name: str
    revision: str
    told: Told


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet. count: replicas that are wanted. revision: of new ones. sentences: why it is not as it should be.
    ended: it is to be no more."""

    fleet: str
    count: int = 0
    revision: str = ""
    ended: bool = False
    sentences: tuple[str, ...] = ()
    replicas: tuple[Seen, ...] = ()
    gateways: tuple[Seen, ...] = ()
    pid: int = 0

    @property
    def serves(self) -> bool:
        """Whether all are there that are wanted, and nothing is under way."""
        whole = (*self.replicas, *self.gateways)
        return not self.sentences and len(self.replicas) == self.count and all(s.told.phase == READY for s in whole)


def encode(document: Order | Told) -> bytes:
    """As it is sent. Raises InternalError for one that is too large."""
    said = msgspec.json.encode(document)
    if len(said) > DOCUMENT_BYTES_MAX:
        raise InternalError(f"a document of {len(said)} bytes for a node; {DOCUMENT_BYTES_MAX} may be")
    return said


def order_of(said: bytes) -> Order:
    """Raises msgspec.ValidationError."""
    return _ORDERS.decode(said)


def told_of(said: bytes) -> Told:
    """Raises msgspec.ValidationError."""
    return msgspec.json.decode(said, type=Told)
