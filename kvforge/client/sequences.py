"""Handles of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from .values import INT64_MAX, whole


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """A handle of a sequence that the coordinator keeps. Equal handles are the same sequence."""

    id: int
    tenant: str = "default"


SequenceRef = CachedSequence | int


def sequence_id(sequence: object, field: str = "sequence") -> int:
    """Return the id of a handle.

    Raises:
        InvalidRequest: The value is not a handle or an id.
    """
    return whole(field, sequence.id if isinstance(sequence, CachedSequence) else sequence, 1, INT64_MAX)
