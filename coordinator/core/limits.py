"""Every limit of the core: the sections of the coordinator's configuration that the core knows.

Each limit is declared once, here: its name in the file with its unit, its default, its range and its meaning.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

from kvforge.protocol.errors import InvalidConfiguration

from . import sizes

POLICIES = ("lru", "none")
STOP_TOKENS_MOST = 1024  # every row has storage for as many as configured
DURATION_S_MAX = 1_000_000_000
DRAFTS_MOST = 64


def microseconds(seconds: float) -> int:
    """Convert seconds to the core's unit of time."""
    return round(seconds * 1e6)


class Range(NamedTuple):
    """The range of a value, both ends included."""

    least: float
    most: float = math.inf


Count = Annotated[int, Range(1)]
Seconds = Annotated[float, Range(1e-6, DURATION_S_MAX)]  # the core counts microseconds


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration. Fields with a Range in their type are checked against it."""

    def check(self, name: str) -> None:
        """Check the section, called `name` in the file.

        Raises:
            InvalidConfiguration: A field, which the error names, is out of range.
        """
        for field, bound in _ranges(type(self)):
            value = getattr(self, field)
            if not bound.least <= value <= bound.most:
                to = f"at least {bound.least}" if bound.most == math.inf else f"{bound.least} to {bound.most}"
                raise InvalidConfiguration(f"{name}.{field}", f"must be {to}, not {value}")


_RANGES: dict[type[Section], list[tuple[str, Range]]] = {}


def _ranges(section: type[Section]) -> list[tuple[str, Range]]:
    """Return the fields of a section that have a range. The result is cached, since types are parsed from text."""
    if section not in _RANGES:
        fields = msgspec.structs.fields(section)
        found = [(field.name, bound) for field in fields for bound in getattr(field.type, "__metadata__", ())]
        _RANGES[section] = found
    return _RANGES[section]


class Bounds(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[limits]: how many objects may exist, and for how long.

    Attributes:
        sequences_max: Running requests plus sequences kept by clients, over all workers.
        kept_per_tenant_max: Sequences that ended requests leave to the next turn, for each tenant. The least recently
            used one is dropped first, also when `sequences_max` is reached.
        pinned_percent_max: The percentage of a tenant's ceiling, or of a pool without one, that its requests may pin
            for later ones; also that of a pool and of `sequences_max` that all pins may take. 0: nothing is pinned.
        blocks_max: Blocks of all workers.
        blocks_per_sequence_max: Blocks of one sequence; times block_size, its longest context in tokens.
        state_blocks_max: Blocks of one sequence beside those with KV of all its tokens, for models with such layers:
            those of its recurrent state, and those that its table of windows names.
        pools_max: Workers.
        tenants_max: Tenants known at once.
        queue_max: Waiting requests.
        finished_max: Finished requests that can still be queried; the oldest are forgotten first.
        finished_ttl_s: How long a finished request can be queried.
        finished_bytes_max: Memory for the answers of finished requests.
        samples_max: Answers requested by one command.
        bulk_max: Sequences named in one command.
        list_max: Requests in one list.
        stop_tokens_max: Stop tokens of one request.
        holders_per_block_max: Named holders of one block.
        deadline_max_s: Maximum lifetime of a request.
        lease_s: How long the coordinator keeps the requests and other property of a disconnected client; for a client
            that cannot reconnect, only its requests.
        away_max: Disconnected clients with a lease.
        reattach_s: How long a restarted coordinator waits for its peers to reconnect.
        answers_kept_max: Replies kept for one client that may not have received them.
    """

    sequences_max: Count = 256
    kept_per_tenant_max: Count = 32
    pinned_percent_max: Annotated[int, Range(0, 100)] = 25
    blocks_max: Count = 1 << 20
    blocks_per_sequence_max: Count = 512
    state_blocks_max: Count = 1024
    pools_max: Count = 64
    tenants_max: Count = 256
    queue_max: Count = 1024
    finished_max: Count = 4096
    finished_ttl_s: Seconds = 600.0
    finished_bytes_max: Count = 256 << 20
    samples_max: Count = 256
    bulk_max: Count = 4096
    list_max: Count = 1000
    stop_tokens_max: Annotated[int, Range(1, STOP_TOKENS_MOST)] = 16
    holders_per_block_max: Count = 64
    deadline_max_s: Seconds = 86_400.0
    lease_s: Annotated[float, Range(0, DURATION_S_MAX)] = 10.0
    away_max: Count = 256
    reattach_s: Seconds = 10.0
    answers_kept_max: Count = 1024


class CacheLimits(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cache]: blocks and their contents.

    Attributes:
        block_size: Tokens of one block.
        policy: `lru` evicts idle client sequences when cached blocks do not suffice; `none` refuses the allocation.
        partial_tokens_min: A cached block that matches in at least this many tokens is copied instead of recomputed.
        zero_on_tenant_change: Workers zero a block that one tenant wrote before another tenant gets it.
        checkpoint_tokens: Tokens between two checkpoints of the state of a model with recurrent layers. A cached prefix
            is used up to a checkpoint.
        host_writeback_blocks: Blocks that sequences have filled and that one step copies to the host tier, while no
            other copy is under way, so that another worker goes on from there if this one dies; 0: none.
        host_learn_blocks: Evicted blocks over which the host tier averages which share of those used once is wanted
            again. Where it is small, they are not copied; 0: they always are.
    """

    block_size: Count = 16
    policy: str = "lru"
    partial_tokens_min: Count = 4
    zero_on_tenant_change: bool = False
    checkpoint_tokens: Count = 2048
    host_writeback_blocks: Annotated[int, Range(0, 4096)] = 0
    host_learn_blocks: Annotated[int, Range(0, 1 << 20)] = 1024


class ScheduleLimits(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[schedule]: the size of a step, and the order of requests.

    Attributes:
        step_tokens_max: Tokens in one forward pass, of prompts and decodes together.
        step_rows_max: Sequences in one forward pass.
        steps_in_flight_max: Steps sent to a worker and not yet answered.
        ageing_s: Waiting time that is worth one step of priority.
        passes_max: Later requests that may start before a request without room; then room is kept for it.
        step_timeout_s: A worker that takes longer for one step counts as hung and is replaced.
        decode_gap_ms: Target duration of a step with decodes: prefill chunks are sized to it, but get at least half of
            the step.
        disk_wait_s: Longest time that a request waits for blocks of its prompt from a worker's disk tier. Then they are
            computed.
        crashes_max: A request fails after this many workers in a row died while running it, with no token in between.
        drafts_max: The most tokens of one request that a worker may draft and verify in one step; 0: none.
        drafts_shared: Requests are drafted from recent ones of the same tenant and salt too. How fast an answer comes
            can tell what these read or wrote; false if the users of a tenant must not learn that from each other.
        draft_rows_max: Drafts are verified while they and all running requests of a worker are at most this many rows.
    """

    step_tokens_max: Count = 512
    step_rows_max: Count = 64
    steps_in_flight_max: Count = 2
    ageing_s: Seconds = 10.0
    passes_max: Count = 16
    step_timeout_s: Seconds = 60.0
    disk_wait_s: Seconds = 2.0
    decode_gap_ms: Annotated[float, Range(1e-3, DURATION_S_MAX)] = 200.0
    crashes_max: Count = 5
    drafts_max: Annotated[int, Range(0, DRAFTS_MOST)] = 16
    drafts_shared: bool = True
    draft_rows_max: Count = 64

    @property
    def window_ahead(self) -> int:
        """How many tokens steps in flight may take a sequence beyond its acknowledged ones."""
        return self.steps_in_flight_max * self.step_tokens_max


class Quota(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share.

    Attributes:
        floor: Blocks of each pool that are reserved for the tenant.
        ceiling: Blocks of each pool that the tenant may occupy; 0 for no limit.
        host_floor: Blocks of each worker's host file that are reserved for the tenant.
        host_ceiling: Blocks of each worker's host file that the tenant may occupy; 0 for no limit.
        disk_floor: Blocks of each worker's disk tier that are reserved for the tenant.
        disk_ceiling: Blocks of each worker's disk tier that the tenant may occupy; 0 for no limit.
        weight: Its share of computed tokens while other tenants wait too, relative to theirs.
    """

    floor: Annotated[int, Range(0)] = 0
    ceiling: Annotated[int, Range(0)] = 0
    host_floor: Annotated[int, Range(0)] = 0
    host_ceiling: Annotated[int, Range(0)] = 0
    disk_floor: Annotated[int, Range(0)] = 0
    disk_ceiling: Annotated[int, Range(0)] = 0
    weight: Annotated[float, Range(0.001, 1000.0)] = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """All limits of the core.

    Raises:
        InvalidConfiguration: A value is invalid; the error names the field as in the file.
    """

    bounds: Bounds = Bounds()
    cache: CacheLimits = CacheLimits()
    schedule: ScheduleLimits = ScheduleLimits()
    quotas: dict[str, Quota] = {}

    def __post_init__(self) -> None:
        self.bounds.check("limits")
        self.cache.check("cache")
        self.schedule.check("schedule")
        if self.cache.policy not in POLICIES:
            problem = f"must be one of {', '.join(POLICIES)}, not {self.cache.policy!r}"
            raise InvalidConfiguration("cache.policy", problem)
        if self.context_tokens_max >= 1 << 31:
            problem = f"{self.context_tokens_max} tokens of context do not fit 32 bits"
            raise InvalidConfiguration("limits.blocks_per_sequence_max", problem)
        bounds = self.bounds
        sizes.check(self.context_tokens_max, self.schedule.step_tokens_max, bounds.tenants_max, bounds.pools_max)
        if self.cache.zero_on_tenant_change:
            sizes.check_zeros(bounds.blocks_max)
        if len(self.quotas) > bounds.tenants_max:
            raise InvalidConfiguration("quotas", f"more than tenants_max = {bounds.tenants_max} tenants")
        for tenant, quota in self.quotas.items():
            quota.check(f"quotas.{tenant}")
            if 0 < quota.ceiling < quota.floor:
                raise InvalidConfiguration(f"quotas.{tenant}", f"ceiling {quota.ceiling} is below floor {quota.floor}")
            if 0 < quota.host_ceiling < quota.host_floor:
                problem = f"host_ceiling {quota.host_ceiling} is below host_floor {quota.host_floor}"
                raise InvalidConfiguration(f"quotas.{tenant}", problem)
            if 0 < quota.disk_ceiling < quota.disk_floor:
                problem = f"disk_ceiling {quota.disk_ceiling} is below disk_floor {quota.disk_floor}"
                raise InvalidConfiguration(f"quotas.{tenant}", problem)

    @property
    def draft_rows_max(self) -> int:
        """The most rows of a step with drafts, each draft counted as one."""
        schedule = self.schedule
        rows_max = min(schedule.draft_rows_max, schedule.step_rows_max, schedule.step_tokens_max)
        return min(rows_max, self.bounds.sequences_max)

    @property
    def context_tokens_max(self) -> int:
        """The longest sequence in tokens: block_size x blocks_per_sequence_max."""
        return self.cache.block_size * self.bounds.blocks_per_sequence_max
