"""fleet.toml: the description of a fleet, in one file that every reader validates in the same way."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar

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
    """[replicas]: their number and the resources of one.

    Attributes:
        count: The number of replicas, unless [autoscale] sets it.
        coordinator_cpus: CPUs for the coordinator and the programs beside it.
        rank_cpus: CPUs for each process of the workers.
        rank_gpus: GPUs for each process of the workers.
        resources: Further resources of Ray, for the whole replica.
        surge: How many replicas above `count` may exist during an update; 0: one leaves before its successor starts.
        drain_s: How long requests on a leaving replica may take to end; then they are computed elsewhere.
        start_s: How long a replica may take until it serves.
        retry_s: When to replace a replica that cannot start, possibly on another node.
        unresponsive_timeout_s: When to remove an unneeded replica that does not answer.
        folder: The folder of each node for the files of replicas and gateways; "": `fleet` in its runtime folder.
    """

    DEPRECATED: ClassVar = {"silent_s": "unresponsive_timeout_s"}

    count: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] | None = None
    coordinator_cpus: Amount = 1.0
    rank_cpus: Amount = 1.0
    rank_gpus: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    resources: dict[str, Amount] = {}
    surge: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    drain_s: Wait = 600.0
    start_s: Wait = 3600.0
    retry_s: Wait = 300.0
    unresponsive_timeout_s: Wait = 60.0
    folder: str = ""


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[autoscale]: scales the number of replicas to keep the queueing time of requests within bounds.

    Attributes:
        replicas_min: The smallest number.
        replicas_max: The largest number.
        queue_up_s: Scale up while requests wait longer than this, averaged over the replicas; in proportion, at most to
            twice as many.
        up_after_s: How long that must last without a break.
        queue_down_s: Scale down by one while requests wait less than this.
        down_after_s: How long that must last without a break.
        pause_s: The pause after a change.
    """

    replicas_min: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)] = 1
    replicas_max: Annotated[int, msgspec.Meta(ge=1, le=REPLICAS_MAX)]
    queue_up_s: Wait = 2.0
    queue_down_s: Annotated[float, msgspec.Meta(ge=0, le=WAIT_S_MAX)] = 0.1
    up_after_s: Wait = 10.0
    down_after_s: Wait = 300.0
    pause_s: Wait = 60.0


class Gateways(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[gateways]: their number and addresses.

    Attributes:
        count: The number of gateways, on different nodes where possible.
        cpus: CPUs of each on its node.
        host: The address on its node.
        port: The port on its node; 0: any free one, which `kvforge fleet status` shows.
    """

    count: Number = 1
    cpus: Amount = 1.0
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 8000


# Settings of gateways that the fleet sets itself.
GATEWAY_OURS = ("runtime_dir", "endpoint", "server_key", "key_file", "host", "port", "replicas")


# Settings of replicas that the fleet sets itself, or that belong into [gateways] and [gateway].
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
    """fleet.toml.

    Attributes:
        name: The name of the fleet, one of several in a cluster.
        up: The settings of each replica, as in the file of `kvforge up --config`.
        gateway: The settings of each gateway, as in gateway.toml.
    """

    name: str = "fleet"
    replicas: Replicas = Replicas()
    autoscale: Autoscale | None = None
    gateways: Gateways = Gateways()
    up: UpFile = UpFile()
    gateway: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidConfiguration("name", "must be 1 to 32 of a-z, 0-9 and -, like chat-8b")
        _check_up(self.up)
        for name in GATEWAY_OURS:
            if name in self.gateway:
                where = "belongs into [gateways]" if name in ("host", "port") else "is set by the fleet"
                raise InvalidConfiguration(f"gateway.{name}", where)
        _check_sizes(self)

    @property
    def count(self) -> int:
        """Return the number of replicas to start with."""
        return self.autoscale.replicas_min if self.autoscale is not None else self.replicas.count or 1

    @property
    def ranks(self) -> int:
        """Return the number of processes of all workers of one replica."""
        return (self.up.workers or 1) * (self.up.tensor_parallel or 1)

    @property
    def bundle(self) -> dict[str, float]:
        """Return the resources of a replica, by Ray's names. One bundle is never split over nodes."""
        own = self.replicas
        cpus = own.coordinator_cpus + self.ranks * own.rank_cpus
        taken = {"CPU": cpus, "GPU": float(self.ranks * own.rank_gpus), **own.resources}
        return {name: amount for name, amount in taken.items() if amount}

    @property
    def gateway_bundle(self) -> dict[str, float]:
        """Return the resources of a gateway, by Ray's names."""
        return {"CPU": self.gateways.cpus} if self.gateways.cpus else {}

    @property
    def revision(self) -> str:
        """Return the revision of replicas; a replica of another revision is replaced."""
        own = self.replicas
        return _digest([self.up, own.folder, self.bundle])

    @property
    def gateway_revision(self) -> str:
        """Return the revision of gateways; a gateway of another one is replaced.

        Running gateways reload [gateway] themselves, so it is not part of the revision.
        """
        own = self.gateways
        return _digest([own.host, own.port, self.replicas.folder, self.gateway_bundle])


def load_fleet(path: Path) -> tuple[FleetFile, str]:
    """Return the file and its text.

    Raises:
        InvalidConfiguration: Names the file or the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InvalidConfiguration(str(path), f"cannot be read: {problem}") from None
    return parse(text, str(path)), text


def parse(text: str, name: str = "fleet.toml") -> FleetFile:
    """Return the file with this text.

    Raises:
        InvalidConfiguration: Names the key.
    """
    try:
        return convert(tomllib.loads(text), FleetFile)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfiguration(name, f"is not TOML: {error}") from None


def _check_up(up: UpFile) -> None:
    for name in OURS:
        if name in up.worker:
            raise InvalidConfiguration(f"up.worker.{name}", "is set by the fleet")
    for name in REPLICA_OURS:
        if getattr(up, name) is not None:
            raise InvalidConfiguration(f"up.{name}", "is set by the fleet")
    if up.tcp:
        raise InvalidConfiguration("up.tcp", "is set by the fleet, with a free port of the node")
    if ACCESS_NAME in up.access.get("clients", {}):
        raise InvalidConfiguration(f"up.access.clients.{ACCESS_NAME}", "is the name of the fleet's own gateways")
    if (up.model is None) == (up.model_config is None):
        raise InvalidConfiguration("up.model", "is required, or up.model_config for random weights, but not both")
    for name in ("workers", "tensor_parallel"):
        if (given := getattr(up, name)) is not None and not 1 <= given <= WORKERS_MAX:
            raise InvalidConfiguration(f"up.{name}", f"must be 1 to {WORKERS_MAX}")


def _check_sizes(file: FleetFile) -> None:
    scale, own = file.autoscale, file.replicas
    if scale is not None:
        if own.count is not None:
            raise InvalidConfiguration(
                "replicas.count", "conflicts with [autoscale], which sets the number: remove one"
            )
        if scale.replicas_min > scale.replicas_max:
            problem = f"is {scale.replicas_min}, more than replicas_max = {scale.replicas_max}"
            raise InvalidConfiguration("autoscale.replicas_min", problem)
        if scale.queue_down_s >= scale.queue_up_s:
            problem = (
                f"is {scale.queue_down_s:g}; must be below queue_up_s = {scale.queue_up_s:g}, to avoid oscillation"
            )
            raise InvalidConfiguration("autoscale.queue_down_s", problem)
    if own.surge == 0 and file.count == 1:
        problem = "is 0, but with one replica an update would interrupt the service: set 1, or more replicas"
        raise InvalidConfiguration("replicas.surge", problem)
    if not file.bundle:
        raise InvalidConfiguration(
            "replicas", "need no resources, so all would be placed on one node: set coordinator_cpus or rank_cpus"
        )


def _digest(values: list[Any]) -> str:
    encoded = msgspec.json.encode(values, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:8]
