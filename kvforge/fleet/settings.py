"""fleet.toml: what a fleet is, in one file that is validated once, by everybody who reads it in the same way."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvforge.launch.settings import WORKERS_MAX
from kvforge.launch.up_file import OURS, UpFile
from kvforge.protocol.configuration import convert
from kvforge.protocol.errors import InvalidConfiguration

REPLICAS_MAX = 256  # as many as a gateway may have
WAIT_S_MAX = 7 * 86_400.0
ACCESS_NAME = "fleet-gateways"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
Wait = Annotated[float, msgspec.Meta(gt=0, le=WAIT_S_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=REPLICAS_MAX)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class Replicas(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[replicas]: how many, and what one takes of its node.

    count: so many, where [autoscale] does not say it. coordinator_cpus: for its coordinator and the programs beside it.
    rank_cpus, rank_gpus: for each process of its workers. resources: of Ray's own kinds, for the whole replica.
    surge: how many more than `count` there may be while others take their place; 0: one leaves before its successor
    comes. drain_s: so long what runs on one that leaves may take to end; then it is computed elsewhere. start_s: so
    long one may take until it serves. retry_s: one that cannot start is tried anew, perhaps elsewhere, after so long.
    silent_s: one that is not needed any more and has not been heard of for so long is removed. folder: where each node
    keeps the files of its replicas and gateways; "": `fleet` in its runtime folder.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] | None = None
    coordinator_cpus: Amount = 1.0
    rank_cpus: Amount = 1.0
    rank_gpus: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    resources: dict[str, Amount] = {}
    surge: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    drain_s: Wait = 600.0
    start_s: Wait = 3600.0
    retry_s: Wait = 300.0
    silent_s: Wait = 60.0
    folder: str = ""


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[autoscale]: as many replicas as keep the time that requests wait in the queue within bounds.

    replicas_min, replicas_max: never fewer, never more. queue_up_s: where requests wait longer than this, on average of
    the replicas, there are more: in proportion, at most twice as many. up_after_s: for so long they must do that,
    without a break. queue_down_s: where they wait less, there is one fewer. down_after_s: for so long they must do
    that. pause_s: so long after a change there is no other.
    """

    replicas_min: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] = 1
    replicas_max: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)]
    queue_up_s: Wait = 2.0
    queue_down_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.1
    up_after_s: Wait = 10.0
    down_after_s: Wait = 300.0
    pause_s: Wait = 60.0


class Gateways(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[gateways]: how many, and where each serves.

    count: so many, on different nodes where that is possible. cpus: of its node. host, port: on its node; port 0: any
    that is free, which `kvforge fleet status` shows.
    """

    count: Number = 1
    cpus: Amount = 1.0
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 8000


# What the fleet says to each gateway itself.
GATEWAY_OURS = ("runtime_dir", "endpoint", "server_key", "key_file", "host", "port", "replicas")


# Settings that the fleet gives each replica, and settings that [gateways] and [gateway] hold.
REPLICA_OURS = (
    "runtime_dir",
    "state_dir",
    "fresh",
    "http",
    "host",
    "port",
    "http_processes",
    "gateway",
    "name",
    "api_key",
)


class FleetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """fleet.toml. [up]: what each replica is, as in the file of `kvforge up --config`. [gateway]: what each gateway is,
    as in gateway.toml.

    name: of the fleet, one of several in a cluster.
    """

    name: str = "fleet"
    replicas: Replicas = Replicas()
    autoscale: Autoscale | None = None
    gateways: Gateways = Gateways()
    up: UpFile = UpFile()
    gateway: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidConfiguration("name", "1 to 32 of a-z, 0-9 and -, like chat-8b")
        _check_up(self.up)
        for name in GATEWAY_OURS:
            if name in self.gateway:
                where = "say it in [gateways]" if name in ("host", "port") else "is given to each gateway by the fleet"
                raise InvalidConfiguration(f"gateway.{name}", where)
        _check_sizes(self)

    @property
    def count(self) -> int:
        """So many replicas, where nothing else is known."""
        return self.autoscale.replicas_min if self.autoscale is not None else self.replicas.count or 1

    @property
    def ranks(self) -> int:
        """Processes of all workers of one replica."""
        return (self.up.workers or 1) * (self.up.tensor_parallel or 1)

    @property
    def bundle(self) -> dict[str, float]:
        """What a replica takes of its node, in Ray's words. One bundle, for that is what is never split over nodes."""
        own = self.replicas
        cpus = own.coordinator_cpus + self.ranks * own.rank_cpus
        taken = {"CPU": cpus, "GPU": float(self.ranks * own.rank_gpus), **own.resources}
        return {name: amount for name, amount in taken.items() if amount}

    @property
    def gateway_bundle(self) -> dict[str, float]:
        """What a gateway takes of its node."""
        return {"CPU": self.gateways.cpus} if self.gateways.cpus else {}

    @property
    def revision(self) -> str:
        """Of replicas: where it differs, they are others."""
        own = self.replicas
        return _digest([self.up, own.folder, self.bundle])

    @property
    def gateway_revision(self) -> str:
        """Of gateways: where it differs, others take their place. [gateway] itself is taken by those that are there."""
        own = self.gateways
        return _digest([own.host, own.port, self.replicas.folder, self.gateway_bundle])


def load_fleet(path: Path) -> tuple[FleetFile, str]:
    """The file, and its text. Raises InvalidConfiguration naming the file or the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidConfiguration(str(path), f"cannot be read: {problem}") from None
    return parse(text, str(path)), text


def parse(text: str, name: str = "fleet.toml") -> FleetFile:
    """The file of this text. Raises InvalidConfiguration naming the key."""
    try:
        return convert(tomllib.loads(text), FleetFile)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfiguration(name, f"is not TOML: {error}") from None


def _check_up(up: UpFile) -> None:
    for name in OURS:
        if name in up.worker:
            raise InvalidConfiguration(f"up.worker.{name}", "is given to each worker by the fleet")
    for name in REPLICA_OURS:
        if getattr(up, name) is not None:
            raise InvalidConfiguration(f"up.{name}", "is given to each replica and gateway by the fleet")
    if up.tcp:
        raise InvalidConfiguration("up.tcp", "is given to each replica by the fleet, with a free port of its node")
    if ACCESS_NAME in up.access.get("clients", {}):
        raise InvalidConfiguration(f"up.access.clients.{ACCESS_NAME}", "is the name of the fleet's own gateways")
    if (up.model is None) == (up.model_config is None):
        raise InvalidConfiguration("up.model", "is required, or up.model_config for random weights, and not both")
    for name in ("workers", "tensor_parallel"):
        if (given := getattr(up, name)) is not None and not 1 <= given <= WORKERS_MAX:
            raise InvalidConfiguration(f"up.{name}", f"must be 1 to {WORKERS_MAX}")


def _check_sizes(file: FleetFile) -> None:
    scale, own = file.autoscale, file.replicas
    if scale is not None:
        if own.count is not None:
            raise InvalidConfiguration("replicas.count", "is given, and [autoscale] too, which says how many there are")
        if scale.replicas_min > scale.replicas_max:
            problem = f"is {scale.replicas_min}, more than replicas_max = {scale.replicas_max}"
            raise InvalidConfiguration("autoscale.replicas_min", problem)
        if scale.queue_down_s >= scale.queue_up_s:
            problem = f"is {scale.queue_down_s:g}; below queue_up_s = {scale.queue_up_s:g}, or it would go up and down"
            raise InvalidConfiguration("autoscale.queue_down_s", problem)
    if own.surge == 0 and file.count == 1:
        problem = "is 0, and there may be one replica: nobody would serve while another takes its place"
        raise InvalidConfiguration("replicas.surge", problem)
    if not file.bundle:
        raise InvalidConfiguration("replicas", "take nothing of a node: all of them would come to one")


def _digest(values: list[Any]) -> str:
    said = msgspec.json.encode(values, order="deterministic")
    return hashlib.sha256(said).hexdigest()[:8]
