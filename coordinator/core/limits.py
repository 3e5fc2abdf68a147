"""Every limit of the core, in one frozen structure, checked once."""

from __future__ import annotations

import msgspec

from kvforge.protocol.errors import InvalidConfiguration

from . import sizes

POLICIES = ("lru", "none")
MAY_BE_ZERO = ("lease_us",)
STOP_TOKENS_MOST = 1024
WEIGHT_MIN, WEIGHT_MAX = 0.001, 1000.0


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share of each pool, in blocks: `floor` no one else can take, `ceiling` it never exceeds (0 = none).

    weight: its share of what is computed while others wait too, relative to theirs.
    """

    floor: int = 0
    ceiling: int = 0
    weight: float = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the core. Raises InvalidConfiguration naming the field.

    policy: `lru` evicts idle client sequences when cached blocks are not enough; `none` refuses instead.
    bulk_max: sequences named in one command; list_max: requests in one list. holders_per_block_max: names on one block.
    partial_tokens_min: a cached block that agrees with at least this many tokens is copied instead of recomputed.
    finished_bytes_max: of the answers of requests that have ended; the oldest are forgotten first.
    ageing_us: so much longer waiting is worth one step of priority.
    passes_max: so many later requests may start before one that finds no room; then room is kept for it.
    deadline_max_us: every request ends within it. lease_us: how long a request outlives a connection that just ended.
    step_timeout_us: a worker that works longer on one step is taken to be hung, and replaced.
    decode_gap_us: prefill chunks beside decodes shrink where steps take longer than this.
    crashes_max: a request fails when so many workers died in a row while running it, without a token in between.
    """

    block_size: int = 16
    sequences_max: int = 256
    blocks_max: int = 1 << 20
    blocks_per_sequence_max: int = 512
    pools_max: int = 64
    tenants_max: int = 256
    queue_max: int = 1024
    finished_max: int = 4096
    finished_ttl_us: int = 600_000_000
    finished_bytes_max: int = 256 << 20
    step_tokens_max: int = 512
    step_rows_max: int = 64
    steps_in_flight_max: int = 2
    stop_tokens_max: int = 16
    holders_per_block_max: int = 64
    bulk_max: int = 4096
    list_max: int = 1000
    partial_tokens_min: int = 4
    samples_max: int = 256
    ageing_us: int = 10_000_000
    passes_max: int = 16
    deadline_max_us: int = 86_400_000_000
    lease_us: int = 10_000_000
    step_timeout_us: int = 60_000_000
    decode_gap_us: int = 200_000
    crashes_max: int = 5
    policy: str = "lru"
    quotas: dict[str, Quota] = {}

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in MAY_BE_ZERO else 1
            if isinstance(value, int) and value < least:
                raise InvalidConfiguration(field.name, f"must be at least {least}, not {value}")
        if self.policy not in POLICIES:
            raise InvalidConfiguration("policy", f"must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.stop_tokens_max > STOP_TOKENS_MOST:  # a place for each of every row
            problem = f"must be at most {STOP_TOKENS_MOST}, not {self.stop_tokens_max}"
            raise InvalidConfiguration("stop_tokens_max", problem)
        if self.context_tokens_max >= 1 << 31:
            raise InvalidConfiguration(
                "blocks_per_sequence_max", f"{self.context_tokens_max} tokens of context do not fit 32 bits"
            )
        sizes.check(self.context_tokens_max, self.step_tokens_max, self.tenants_max, self.pools_max)
        if len(self.quotas) > self.tenants_max:
            raise InvalidConfiguration("quotas", f"more than tenants_max = {self.tenants_max} tenants")
        for tenant, quota in self.quotas.items():
            if quota.floor < 0 or quota.ceiling < 0:
                raise InvalidConfiguration(f"quotas.{tenant}", "floor and ceiling are counts of blocks, 0 or more")
            if not WEIGHT_MIN <= quota.weight <= WEIGHT_MAX:
                problem = f"must be {WEIGHT_MIN:g} to {WEIGHT_MAX:g}, not {quota.weight:g}"
                raise InvalidConfiguration(f"quotas.{tenant}.weight", problem)
            if 0 < quota.ceiling < quota.floor:
                raise InvalidConfiguration(f"quotas.{tenant}", f"ceiling {quota.ceiling} is below floor {quota.floor}")

    @property
    def context_tokens_max(self) -> int:
        """The longest sequence, in tokens: block size x blocks a sequence may hold."""
        return self.block_size * self.blocks_per_sequence_max
