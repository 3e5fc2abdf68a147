"""Every limit of the core: the sections of the coordinator's configuration, as far as the core knows them.

A limit is declared once, here: its name in the file, with its unit; its default; its range; and what it means.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec

from kvforge.protocol.errors import InvalidConfiguration

from . import sizes

POLICIES = ("lru", "none")
STOP_TOKENS_MOST = 1024  # there is a place for each, in every row
DURATION_S_MAX = 1_000_000_000


def microseconds(seconds: float) -> int:
    """What the core counts."""
    return round(seconds * 1e6)


class Range(NamedTuple):
    """What a value may be, both ends included."""

    least: float
    most: float = math.inf


Count = Annotated[int, Range(1)]
Seconds = Annotated[float, Range(1e-6, DURATION_S_MAX)]  # a microsecond is the least that the core can count


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the configuration. A field whose type has a Range is held to it."""

    def check(self, name: str) -> None:
        """Raises InvalidConfiguration naming the field, in the section `name` of the file."""
        for field, bound in _ranges(type(self)):
            value = getattr(self, field)
            if not bound.least <= value <= bound.most:
                to = f"at least {bound.least}" if bound.most == math.inf else f"{bound.least} to {bound.most}"
                raise InvalidConfiguration(f"{name}.{field}", f"must be {to}, not {value}")


_RANGES: dict[type[Section], list[tuple[str, Range]]] = {}


def _ranges(section: type[Section]) -> list[tuple[str, Range]]:
    """The fields of a section that are held to a range: found once, types are read from their text."""
    if section not in _RANGES:
        fields = msgspec.structs.fields(section)
        found = [(field.name, bound) for field in fields for bound in getattr(field.type, "__metadata__", ())]
        _RANGES[section] = found
    return _RANGES[section]


class Bounds(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[limits]: how much of everything there may be, and for how long.

    sequences_max: requests that run and sequences that clients keep, over all workers. blocks_per_sequence_max:
    times block_size, the longest sequence in tokens. tenants_max: tenants that are known at once. blocks_max:
    blocks of all workers. pools_max: workers. queue_max: requests that wait. finished_max: requests that have ended
    and may still be asked about; those that ended first are forgotten first. finished_ttl_s: for how long they may
    be. finished_bytes_max: how much their answers may take. samples_max: answers that one command asks for.
    bulk_max: sequences named in one command; list_max: requests in one list. stop_tokens_max: of one request.
    holders_per_block_max: names on one block.
    deadline_max_s: every request ends within it. lease_s: how long a client whose connection ended is waited for, with
    its requests and all else that is its own; of one that cannot come back only the requests. away_max: clients that
    are waited for at once.
    reattach_s: how long a coordinator that was started again waits for those who were connected. answers_kept_max: the
    answers that are kept for one client, which it may not have got by then.
    """

    sequences_max: Count = 256
    blocks_max: Count = 1 << 20
    blocks_per_sequence_max: Count = 512
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
    """[cache]: blocks, and what is kept in them.

    block_size: of one block.
    policy: `lru` evicts idle client sequences when cached blocks are not enough; `none` refuses instead.
    partial_tokens_min: a cached block that agrees with at least so many tokens is copied instead of recomputed.
    zero_on_tenant_change: a block that one tenant wrote is zeroed by its worker before another one gets it.
    """

    block_size: Count = 16
    policy: str = "lru"
    partial_tokens_min: Count = 4
    zero_on_tenant_change: bool = False


class ScheduleLimits(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[schedule]: what one step may take, and who goes first.

    step_tokens_max: in one forward pass, of prompts and decodes together. step_rows_max: sequences in it.
    steps_in_flight_max: steps that a worker has been sent and has not answered.
    ageing_s: so much longer waiting is worth one step of priority.
    passes_max: so many later requests may start before one that finds no room; then room is kept for it.
    step_timeout_s: a worker that works longer on one step is taken to be hung, and replaced.
    decode_gap_ms: chunks of prompts beside decodes are as long as a step of this time, or half of a step, has room for.
    crashes_max: a request fails when so many workers died in a row while running it, without a token in between.
    """

    step_tokens_max: Count = 512
    step_rows_max: Count = 64
    steps_in_flight_max: Count = 2
    ageing_s: Seconds = 10.0
    passes_max: Count = 16
    step_timeout_s: Seconds = 60.0
    decode_gap_ms: Annotated[float, Range(1e-3, DURATION_S_MAX)] = 200.0
    crashes_max: Count = 5


class Quota(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share.

    floor: blocks of each pool that no one else can take. ceiling: blocks of each pool that it never exceeds; 0: none.
    weight: its share of what is computed while others wait too, relative to theirs.
    """

    floor: Annotated[int, Range(0)] = 0
    ceiling: Annotated[int, Range(0)] = 0
    weight: Annotated[float, Range(0.001, 1000.0)] = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """All that bounds the core. Raises InvalidConfiguration naming the field, as it is called in the file."""

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

    @property
    def context_tokens_max(self) -> int:
        """The longest sequence, in tokens: block size x blocks a sequence may hold."""
        return self.cache.block_size * self.bounds.blocks_per_sequence_max
