"""Messages between a program on a node, its keeper and the controller: small JSON documents, without tokens."""

from __future__ import annotations

import msgspec

from kvforge.protocol.errors import InternalError

# Phases of a replica or gateway. placing: no node has room yet. silent: it does not answer. unready: it has served, but
# does not now. stopped: it has ended as ordered and removed its files. failed: it cannot start.
PLACING, STARTING, READY, UNREADY, SILENT, DRAINING, STOPPED, FAILED = PHASES = (
    *("placing", "starting", "ready", "unready", "silent", "draining", "stopped", "failed"),
)
REPLICA, GATEWAY = KINDS = ("replica", "gateway")
DOCUMENT_BYTES_MAX = 1 << 17


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Address of a replica for gateways. server_key: its public key."""

    endpoint: str
    server_key: str


class BeginOrder(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """The first message to a program.

    Attributes:
        address: The address of its node.
        text: fleet.toml.
        public: The gateways' public key.
        secret: The gateways' secret key, for gateways only.
        places: The replicas, for gateways only.
    """

    name: str
    address: str
    text: str
    public: str
    secret: str = ""
    places: dict[str, Place] = {}


class UseOrder(msgspec.Struct, frozen=True, kw_only=True, tag="use"):
    """Orders a gateway to use these replicas and [gateway] of this fleet.toml."""

    text: str
    places: dict[str, Place]


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Orders a replica to stop admission, and to hand back requests that have not ended after `deadline_s`."""

    deadline_s: float


class StopOrder(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Orders a program to end and to remove its files."""


Order = BeginOrder | UseOrder | DrainOrder | StopOrder
_ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The status of a replica or gateway.

    Attributes:
        phase: One of PHASES.
        reason: Why it does not serve.
        node: Ray's id of its node.
        life: Identifies the keeper's present process.
        age_s: Time since its start.
        failed_s: Time since it failed.
        draining_s: Time since the order to drain.
        running: Running requests of a replica.
        pending: Waiting requests of a replica.
        queue_s: How long these wait.
        place: The address of a replica.
        url: The URL of a gateway.
        ready: The replicas to which a gateway sends requests.
        used: The replicas that a gateway knows.
        pids: Its processes by name.
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
    """A replica or gateway as the controller sees it."""

    name: str
    revision: str
    status: NodeStatus = msgspec.field(name="told")  # the name in messages stays


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a fleet.

    Attributes:
        count: The wanted number of replicas.
        revision: The revision of new replicas.
        ended: The fleet is being removed.
        sentences: Why the fleet is not in its wanted state.
    """

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
        """Return whether all replicas and gateways are ready and no change is pending."""
        whole = (*self.replicas, *self.gateways)
        return not self.sentences and len(self.replicas) == self.count and all(s.status.phase == READY for s in whole)


def encode(document: Order | NodeStatus) -> bytes:
    """Encode a message.

    Raises:
        InternalError: It is too large.
    """
    data = msgspec.json.encode(document)
    if len(data) > DOCUMENT_BYTES_MAX:
        raise InternalError(f"a message of {len(data)} bytes for a node exceeds {DOCUMENT_BYTES_MAX}")
    return data


def order_of(data: bytes) -> Order:
    """Decode an order.

    Raises:
        msgspec.ValidationError: The bytes are not an order.
    """
    return _ORDERS.decode(data)


def node_status_of(data: bytes) -> NodeStatus:
    """Decode a status.

    Raises:
        msgspec.ValidationError: The bytes are not a status.
    """
    return msgspec.json.decode(data, type=NodeStatus)
