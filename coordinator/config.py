"""The coordinator's configuration: one frozen structure, validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec

from kvforge.protocol import codec, logs
from kvforge.protocol.configuration import convert, expand, load
from kvforge.protocol.deprecated_settings import Warn, log_warning
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.layout import Geometry
from kvforge.protocol.transport import HEARTBEAT_TIMEOUT_MS, default_runtime_dir, default_state_dir

from . import access
from .access import AccessSection, TcpSection
from .core.limits import DURATION_S_MAX, Bounds, CacheLimits, Count, Limits, Quota, Range, ScheduleLimits, Section
from .journal.log import DURABILITIES
from .kv_events.settings import KvEventsSection
from .transport import zmtp
from .transport.connection import ConnectionLimits
from .transport.router_socket import PeerLimits
from .turn import TurnLimits

S = TypeVar("S", bound=Section)
BUFFER_BYTES_MIN = 1 << 20
IDLE_TIMEOUT_S_MIN = 2.0  # an idle loop checks once a second
BufferBytes = Annotated[int, Range(BUFFER_BYTES_MIN)]


class LimitsSection(TurnLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[limits]: limits of the core (`core.limits.Bounds`), of one turn (`TurnLimits`), and of connections.

    Attributes:
        pending_handshakes_max: Connections of clients, and of workers, with a pending handshake.
        client_share_ms: Share of `client_ms_per_turn_max` for one connection, while others have messages.
        client_buffer_messages: Messages queued for a slow client; at the limit its streams pause, and its messages are
            not read until half of the queue has drained.
        client_buffer_bytes: The same limit in bytes.
        partial_bytes_max: Memory for incomplete messages of clients, and of workers.
        idle_timeout_s: A peer that sends nothing for this long, not even heartbeats, is disconnected; a worker's
            process is then killed, so that a successor can start.
    """

    DEPRECATED: ClassVar = {"strangers_max": "pending_handshakes_max", "silence_s": "idle_timeout_s"}

    pending_handshakes_max: Count = 64
    client_share_ms: Annotated[float, Range(1e-3, DURATION_S_MAX)] = 0.5
    client_buffer_messages: Count = 1024
    client_buffer_bytes: BufferBytes = 16 << 20
    partial_bytes_max: BufferBytes = 256 << 20
    idle_timeout_s: Annotated[float, Range(IDLE_TIMEOUT_S_MIN, DURATION_S_MAX)] = HEARTBEAT_TIMEOUT_MS / 1000


class ScheduleSection(ScheduleLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[schedule]: limits of the core (`core.limits.ScheduleLimits`), and how the loop waits.

    Attributes:
        spin_us: How long to poll after an event before sleeping; -1 means 200 with 4 or more cores, else 0.
    """

    spin_us: Annotated[int, Range(-1, 1_000_000)] = -1


class JournalSection(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[journal]: when a snapshot replaces it, and limits of recovery.

    Attributes:
        bytes_max: Bytes of records since the last snapshot, beyond which another one is written.
        replay_ms_max: Loop time of the records since the last snapshot, which replay would take again; beyond it,
            another snapshot is written. A busy loop postpones it until there is twice as much.
        away_s_max: After a reboot, at most the uptime plus this many seconds count as time without a coordinator. A
            wall clock that was set therefore ends no leases, keys or deadlines.
        message_deaths_max: A client's message is refused after this many coordinators in a row died while handling it;
            the last record of a journal is set aside after this many died while applying it.
    """

    bytes_max: Annotated[int, Range(1 << 16)] = 64 << 20
    replay_ms_max: Annotated[float, Range(1.0, DURATION_S_MAX * 1e3)] = 500.0
    away_s_max: Annotated[float, Range(0.0, DURATION_S_MAX)] = 300.0
    message_deaths_max: Count = 3


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of a coordinator.

    Attributes:
        runtime_dir: Folder of the sockets and the shared tables; "" means KVFORGE_RUNTIME_DIR, else `kvforge` in
            XDG_RUNTIME_DIR, else `/tmp/kvforge-UID`.
        state_dir: Folder of the journal; "" means `kvforge` in XDG_STATE_HOME or ~/.local/state, or `state` in the
            runtime folder if one is configured or the user has no home.
        durability: The failure that an accepted command survives: "process" a crash of the coordinator, "power" a crash
            of the host (each turn waits for the disk), "none" no failure.
        on_stop: "drain" lets requests run for up to `drain_s` and hands the rest back; "keep" leaves them to the next
            start, which resumes them, and leaves workers running.
        drain_s: How long requests may continue to run, 0 to 86400.
        log_level: debug, info, warning or error.
        log_format: text, or json for one document a line.
    """

    runtime_dir: str = ""
    state_dir: str = ""
    durability: str = "process"
    on_stop: str = "drain"
    log_level: str = "info"
    log_format: str = "text"
    drain_s: float = 30.0
    limits: LimitsSection = LimitsSection()
    cache: CacheLimits = CacheLimits()
    schedule: ScheduleSection = ScheduleSection()
    journal: JournalSection = JournalSection()
    quotas: dict[str, dict[str, int | float]] = {}
    tcp: TcpSection = TcpSection()
    access: AccessSection = AccessSection()
    kv_events: KvEventsSection = KvEventsSection()

    def __post_init__(self) -> None:
        logs.check(self.log_level, self.log_format)
        if not 0 <= self.drain_s <= 86_400:
            raise InvalidConfiguration("drain_s", f"must be 0 to 86400 seconds, not {self.drain_s:g}")
        for name, value, choices in (
            ("durability", self.durability, DURABILITIES),
            ("on_stop", self.on_stop, ("drain", "keep")),
        ):
            if value not in choices:
                raise InvalidConfiguration(name, f"must be one of {', '.join(choices)}, not {value!r}")
        if self.on_stop == "keep" and self.durability == "none":
            problem = '"keep" needs a journal: set durability to "process" or "power", or on_stop to "drain"'
            raise InvalidConfiguration("on_stop", problem)
        self.journal.check("journal")
        self.limits.check("limits")
        self.schedule.check("schedule")
        self.kv_events.check("kv_events")
        self._check_message_bytes()
        access.check(self.tcp, self.access)

    def _check_message_bytes(self) -> None:
        """Check that a message can hold a prompt of the maximum context length."""
        needed = codec.BODY_BYTES_MAX + 4 * self.core_limits().context_tokens_max
        if self.limits.message_bytes_max < needed:
            problem = f"must be at least {needed} for sequences of limits.blocks_per_sequence_max blocks"
            raise InvalidConfiguration("limits.message_bytes_max", f"{problem}, not {self.limits.message_bytes_max}")

    @property
    def runtime_path(self) -> Path:
        """The folder of the sockets and the shared tables."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()

    @property
    def state_path(self) -> Path:
        """The folder of the journal."""
        return expand(self.state_dir) if self.state_dir else default_state_dir(self.runtime_path)

    def client_limits(self) -> PeerLimits:
        """Return the limits of the clients' socket."""
        limits = self.limits
        turn_us = int(limits.client_ms_per_turn_max * 1000)  # also the loop's budget, which includes sending replies
        share_us = int(limits.client_share_ms * 1000)
        connection = ConnectionLimits(
            message_bytes_max=limits.message_bytes_max,
            skipped_bytes_max=zmtp.MESSAGE_BYTES_MAX,
            queue_messages_max=limits.client_buffer_messages,
            queue_bytes_max=limits.client_buffer_bytes,
        )
        peers = self._peer_limits(limits.clients_max, connection)
        return msgspec.structs.replace(peers, turn_us=turn_us, share_us=share_us)

    def worker_limits(self) -> PeerLimits:
        """Return the limits of the workers' socket."""
        return self._peer_limits(self.limits.pools_max, ConnectionLimits())

    @property
    def descriptors(self) -> int:
        """Number of file descriptors for the connections of both sockets, and for each worker process."""
        return self.client_limits().descriptors + self.worker_limits().descriptors + self.limits.pools_max

    def _peer_limits(self, admitted_max: int, connection: ConnectionLimits) -> PeerLimits:
        limits = self.limits
        return PeerLimits(
            admitted_max=admitted_max,
            pending_handshakes_max=limits.pending_handshakes_max,
            partial_bytes_max=limits.partial_bytes_max,
            idle_timeout_ms=int(limits.idle_timeout_s * 1000),
            connection=connection,
        )

    def core_limits(self) -> Limits:
        """Return the limits that the core uses.

        Raises:
            InvalidConfiguration: A field, which the error names, is invalid.
        """
        return Limits(
            bounds=_of_core(Bounds, self.limits),
            cache=self.cache,
            schedule=_of_core(ScheduleLimits, self.schedule),
            quotas={tenant: _quota(tenant, values) for tenant, values in self.quotas.items()},
        )


def geometry(limits: Limits) -> Geometry:
    """Return the dimensions of the shared tables.

    Raises:
        InvalidConfiguration: A field, which the error names, is too large.
    """
    bounds = limits.bounds
    return Geometry(
        slots=bounds.sequences_max,
        blocks=bounds.blocks_max,
        blocks_per_sequence=bounds.blocks_per_sequence_max,
        block_size=limits.cache.block_size,
        pools=bounds.pools_max,
        states_per_sequence=bounds.state_blocks_max,
    )


def _of_core(cls: type[S], section: S) -> S:
    """Return the part of a section that belongs to the core."""
    return cls(**{name: getattr(section, name) for name in cls.__struct_fields__})


def _quota(tenant: str, values: dict[str, int | float]) -> Quota:
    """Convert [quotas.TENANT]: floor and ceiling in blocks of each pool, and weight."""
    try:
        return convert(values, Quota)
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"quotas.{tenant}.{error.field}", error.message.partition(": ")[2]) from None


def load_config(path: Path | None, warn: Warn = log_warning) -> CoordinatorConfig:
    """Read a TOML file, or return the defaults for None.

    Args:
        path: The file.
        warn: Called with a text for each deprecated key.

    Raises:
        InvalidConfiguration: The file cannot be read, or a field is invalid.
    """
    return load(path, CoordinatorConfig, warn) if path is not None else CoordinatorConfig()
