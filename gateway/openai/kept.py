"""The sequence that an ended request left in its coordinator, for the next turn of the conversation."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from kvforge.gateway.generate.service import Service
from kvforge.gateway.replicas.stream import MovingStream, Stream
from kvforge.protocol.errors import KvforgeError


class KeptSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A kept sequence. It may be gone: the next turn is then an ordinary prompt.

    Attributes:
        sequence_id: The coordinator's number.
        replica: The name of the replica that has it; "" with a single coordinator.
        tokens: Its length: the prompt and the answer.
        response_id: The response that left it.
        item: The last item of that response.
    """

    sequence_id: int
    replica: str = ""
    tokens: int = 0
    response_id: str = ""
    item: str = ""


decoded_kept = msgspec.json.Decoder(KeptSequence).decode


def kept_of(stream: Stream) -> KeptSequence | None:
    """Return the sequence that an answer left; None if it left none."""
    if stream.ended is None or not stream.ended.sequence_id:
        return None
    replica = stream.replica if isinstance(stream, MovingStream) else ""
    tokens = stream.ended.prompt_tokens + stream.ended.generated_tokens
    return KeptSequence(sequence_id=stream.ended.sequence_id, replica=replica, tokens=tokens)


async def forget(service: Service, kept: KeptSequence) -> None:
    """Let the coordinator remove a kept sequence. One that cannot be reached removes it in its time."""
    with suppress(KvforgeError):
        await service.client_of(kept.replica).remove(kept.sequence_id)
