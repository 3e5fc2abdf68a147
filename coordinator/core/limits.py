"""Every limit of the core, in one frozen structure, checked once."""

from __future__ import annotations

import msgspec

from protocol.errors import InvalidConfiguration

POLICIES = ("lru", "none")


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's share of each pool, in blocks: `floor` no one else can take, `ceiling` it never exceeds (0 = none)."""

    floor: int = 0
    ceiling: int = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the core. Raises InvalidConfiguration naming the field.

    policy: `lru` evicts idle client sequences when cached blocks are not enough; `none` refuses instead.
    partial_tokens_min: a cached block that agrees with at least this many tokens is copied instead of recomputed.
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
    step_tokens_max: int = 512
    step_rows_max: int = 64
    steps_in_flight_max: int = 2
    stop_tokens_max: int = 16
    holders_per_block_max: int = 64
    bulk_max: int = 4096
    list_max: int = 1000
    partial_tokens_min: int = 4
    policy: str = "lru"
    quotas: dict[str, Quota] = {}

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise InvalidConfiguration(field.name, f"must be at least 1, not {value}")
        if self.policy not in POLICIES:
            raise InvalidConfiguration("policy", f"must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.context_tokens_max >= 1 << 31:
            raise InvalidConfiguration(
                "blocks_per_sequence_max", f"{self.context_tokens_max} tokens of context do not fit 32 bits"
            )
        if len(self.quotas) > self.tenants_max:
            raise InvalidConfiguration("quotas", f"more than tenants_max = {self.tenants_max} tenants")
        for tenant, quota in self.quotas.items():
            if quota.floor < 0 or quota.ceiling < 0:
                raise InvalidConfiguration(f"quotas.{tenant}", "floor and ceiling are counts of blocks, 0 or more")
            if 0 < quota.ceiling < quota.floor:
                raise InvalidConfiguration(f"quotas.{tenant}", f"ceiling {quota.ceiling} is below floor {quota.floor}")

    @property
    def context_tokens_max(self) -> int:
        """The longest sequence, in tokens: block size x blocks a sequence may hold."""
        return self.block_size * self.blocks_per_sequence_max
