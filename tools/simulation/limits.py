"""Limits of the core by their names alone, in whichever section they are; durations in microseconds, as `_us`."""

from __future__ import annotations

from typing import Any

import msgspec

from kvforge.coordinator.core.limits import Bounds, CacheLimits, Limits, Quota, ScheduleLimits, Section

SECTIONS: dict[str, type[Section]] = {"bounds": Bounds, "cache": CacheLimits, "schedule": ScheduleLimits}
UNITS_US = {"_s": 1e6, "_ms": 1e3}


def make_limits(quotas: dict[str, Quota] | None = None, **named: Any) -> Limits:
    """Raises TypeError for a name that no section has, InvalidConfiguration for what may not be."""
    parts: dict[str, Any] = {}
    for section, struct in SECTIONS.items():
        ours: dict[str, Any] = {}
        for field in struct.__struct_fields__:
            name, per_us = in_core(field)
            if name in named:
                ours[field] = named.pop(name) / per_us if per_us else named.pop(name)
        parts[section] = struct(**ours)
    if named:
        raise TypeError(f"there are no limits {sorted(named)}")
    return Limits(**parts, quotas=quotas or {})


ZERO = ("lease_s", "pinned_percent_max", "drafts_max", "host_writeback_blocks", "host_learn_blocks")  # may be 0


def counts() -> list[str]:
    """The names of all that must be at least 1, in the core's units."""
    found = [field for struct in SECTIONS.values() for field in msgspec.structs.fields(struct)]
    return [in_core(field.name)[0] for field in found if field.type not in (str, bool) and field.name not in ZERO]


def in_core(field: str) -> tuple[str, float]:
    """A field's name in the core, and microseconds in its unit; 0 where it is no duration."""
    unit = next((unit for unit in UNITS_US if field.endswith(unit)), "")
    return (field.removesuffix(unit) + "_us", UNITS_US[unit]) if unit else (field, 0)
