"""The sequence that an ended request left in its coordinator, for the next turn of the conversation."""

from __future__ import annotations

import msgspec

from kvforge.gateway.replicas.stream import MovingStream, Stream


class KeptSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A kept sequence. It may be gone: the next turn is then an ordinary prompt.

    Attributes:
        sequence_id: The coordinator's number.
        replica: The name of the replica that has it; "" with a single coordinator.
    """

    sequence_id: int
    replica: str = ""


def kept_of(stream: Stream) -> KeptSequence | None:
    """Return the sequence that an answer left; None if it left none."""
    if stream.ended is None or not stream.ended.sequence_id:
        return None
    replica = stream.replica if isinstance(stream, MovingStream) else ""
    return KeptSequence(sequence_id=stream.ended.sequence_id, replica=replica)
