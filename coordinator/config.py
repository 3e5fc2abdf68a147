"""The coordinator's configuration: one frozen structure, validated once."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvforge.protocol import logs
from kvforge.protocol.configuration import convert, expand, load
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.layout import Geometry
from kvforge.protocol.transport import HEARTBEAT_TIMEOUT_MS, default_runtime_dir

from .connection import Room
from .core.limits import Limits, Quota
from .peers import PeerLimits
from .turn import TurnLimits

# Sections, names and least values of durations. A microsecond is the least that the core can count.
SECONDS = (
    ("limits", "deadline_max_s", 1e-6),
    ("limits", "lease_s", 0.0),
    ("limits", "silence_s", 2.0),  # an idle loop looks once a second
    ("limits", "client_ms_per_turn_max", 1e-3),
    ("schedule", "ageing_s", 1e-6),
    ("schedule", "step_timeout_s", 1e-6),
    ("schedule", "decode_gap_ms", 1e-3),
)
BUFFER_BYTES_MIN = 1 << 20
CORE = Limits()  # what the core has a limit for has its default there


class LimitsSection(TurnLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[limits]: counts unless the name says otherwise. Those of one turn are `TurnLimits`.

    What the core has a limit for is described there (core.limits.Limits).
    finished_bytes_max: what the answers of ended requests may take; then the oldest are forgotten.
    strangers_max: connections that have not said hello yet, of clients and of workers.
    client_buffer_messages, client_buffer_bytes: so much may wait for a client that does not read; then its streams
    pause, and what it asks for is not looked at until it has read half of that. partial_bytes_max: held for messages of
    clients, or of workers, that have begun and not ended.
    silence_s: a client or worker from which nothing comes for so long, heartbeats neither, is taken for gone; the
    process of a worker is killed then, for its successor.
    """

    sequences_max: int = CORE.sequences_max
    blocks_max: int = CORE.blocks_max
    blocks_per_sequence_max: int = CORE.blocks_per_sequence_max
    tenants_max: int = CORE.tenants_max
    queue_max: int = CORE.queue_max
    finished_max: int = CORE.finished_max
    finished_ttl_s: float = CORE.finished_ttl_us / 1e6
    finished_bytes_max: int = CORE.finished_bytes_max
    strangers_max: int = 64
    client_buffer_messages: int = 1024
    client_buffer_bytes: int = 16 << 20
    partial_bytes_max: int = 256 << 20
    samples_max: int = CORE.samples_max
    bulk_max: int = CORE.bulk_max
    list_max: int = CORE.list_max
    stop_tokens_max: int = CORE.stop_tokens_max
    holders_per_block_max: int = CORE.holders_per_block_max
    deadline_max_s: float = CORE.deadline_max_us / 1e6
    lease_s: float = CORE.lease_us / 1e6
    silence_s: float = HEARTBEAT_TIMEOUT_MS / 1000


class CacheSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cache]: block_size in tokens."""

    block_size: int = CORE.block_size
    policy: str = CORE.policy
    partial_tokens_min: int = CORE.partial_tokens_min


class ScheduleSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[schedule]: bounds of one step, and who goes first; core.limits.Limits says more.

    spin_us: after something arrived, look for more for so long before sleeping; -1: 200 with 4 cores or more, else 0.
    """

    step_tokens_max: int = CORE.step_tokens_max
    step_rows_max: int = CORE.step_rows_max
    steps_in_flight_max: int = CORE.steps_in_flight_max
    ageing_s: float = CORE.ageing_us / 1e6
    passes_max: int = CORE.passes_max
    step_timeout_s: float = CORE.step_timeout_us / 1e6
    decode_gap_ms: float = CORE.decode_gap_us / 1e3
    crashes_max: int = CORE.crashes_max
    spin_us: int = -1


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a coordinator can be told. An empty folder means the default of protocol.transport."""

    runtime_dir: str = ""
    log_level: str = "info"
    log_format: str = "text"
    drain_s: float = 30.0
    limits: LimitsSection = LimitsSection()
    cache: CacheSection = CacheSection()
    schedule: ScheduleSection = ScheduleSection()
    quotas: dict[str, dict[str, int | float]] = {}

    def __post_init__(self) -> None:
        logs.check(self.log_level, self.log_format)
        if not 0 <= self.drain_s <= 86_400:
            raise InvalidConfiguration("drain_s", "must be 0 to 86400 seconds")
        if not 0 < self.limits.finished_ttl_s <= 1e9:
            raise InvalidConfiguration("limits.finished_ttl_s", "must be more than 0 seconds")
        for section, name, lowest in SECONDS:
            if not lowest <= getattr(getattr(self, section), name) <= 1e9:
                raise InvalidConfiguration(f"{section}.{name}", f"must be at least {lowest:g}")
        if not -1 <= self.schedule.spin_us <= 1_000_000:
            raise InvalidConfiguration("schedule.spin_us", "must be -1 (chosen by the number of cores) to 1000000")
        counts = ("clients_max", "strangers_max", "messages_per_turn_max", "client_bytes_per_turn_max")
        for name in (*counts, "client_buffer_messages", "client_backlog_max"):
            if getattr(self.limits, name) < 1:
                raise InvalidConfiguration(f"limits.{name}", "must be at least 1")
        for name in ("client_buffer_bytes", "partial_bytes_max"):
            if getattr(self.limits, name) < BUFFER_BYTES_MIN:
                raise InvalidConfiguration(f"limits.{name}", f"must be at least {BUFFER_BYTES_MIN} bytes")

    @property
    def runtime_path(self) -> Path:
        """Folder of the sockets and the shared tables."""
        return expand(self.runtime_dir) if self.runtime_dir else default_runtime_dir().absolute()

    def client_limits(self) -> PeerLimits:
        """Bounds of the clients' socket."""
        limits = self.limits
        room = Room(queue_messages_max=limits.client_buffer_messages, queue_bytes_max=limits.client_buffer_bytes)
        turn_us = int(limits.client_ms_per_turn_max * 1000)  # the loop's own budget is the same: it counts answers, too
        return msgspec.structs.replace(self._peer_limits(limits.clients_max, room), turn_us=turn_us)

    def worker_limits(self) -> PeerLimits:
        """Bounds of the workers' socket."""
        return self._peer_limits(self.limits.pools_max, Room())

    @property
    def descriptors(self) -> int:
        """How many connections need: those of both sockets, and one for the process of each worker."""
        return self.client_limits().descriptors + self.worker_limits().descriptors + self.limits.pools_max

    def _peer_limits(self, admitted_max: int, room: Room) -> PeerLimits:
        limits = self.limits
        return PeerLimits(
            admitted_max=admitted_max,
            strangers_max=limits.strangers_max,
            partial_bytes_max=limits.partial_bytes_max,
            silence_ms=int(limits.silence_s * 1000),
            room=room,
        )

    def core_limits(self) -> Limits:
        """The core's bounds: what it knows of the sections, by name. Raises InvalidConfiguration naming the field."""
        sections = (self.limits, self.cache, self.schedule)
        given = {name: value for section in sections for name, value in msgspec.structs.asdict(section).items()}
        for unit, factor in (("_s", 1e6), ("_ms", 1e3)):  # the core counts microseconds
            timed = [name for name in given if name.endswith(unit)]
            given.update({f"{name.removesuffix(unit)}_us": int(given[name] * factor) for name in timed})
        quotas = {tenant: _quota(tenant, values) for tenant, values in self.quotas.items()}
        known = {name: given[name] for name in Limits.__struct_fields__ if name in given}
        return Limits(**known, quotas=quotas)

    def geometry(self) -> Geometry:
        """The shared tables' size. Raises InvalidConfiguration naming the field."""
        return Geometry(
            slots=self.limits.sequences_max,
            blocks=self.limits.blocks_max,
            blocks_per_sequence=self.limits.blocks_per_sequence_max,
            block_size=self.cache.block_size,
            pools=self.limits.pools_max,
        )


def _quota(tenant: str, values: dict[str, int | float]) -> Quota:
    """[quotas.TENANT]: floor and ceiling, in blocks of each pool; weight."""
    try:
        return convert(values, Quota)
    except InvalidConfiguration as error:
        raise InvalidConfiguration(f"quotas.{tenant}.{error.field}", error.message.partition(": ")[2]) from None


def load_config(path: Path | None) -> CoordinatorConfig:
    """Reads a TOML file, or gives the defaults. Raises InvalidConfiguration."""
    return load(path, CoordinatorConfig) if path is not None else CoordinatorConfig()
