"""`context_management`: removes parts of a conversation before the model reads it."""

from __future__ import annotations

from kvforge.protocol.errors import InvalidRequest

from .request_body import Conversation, Edit

THINKING = ("thinking", "redacted_thinking")
CLEAR_THINKING = "clear_thinking_20251015"
TURNS_KEPT = 1  # Anthropic's own default


def thinking_kept(asked: Conversation) -> frozenset[int]:
    """Return the indices of the messages that keep their thinking.

    Raises:
        InvalidRequest: Names an unsupported edit.
    """
    edits = asked.context_management.edits if asked.context_management is not None else None
    turns = len(asked.messages)
    for at, edit in enumerate(edits or ()):
        field = f"context_management.edits[{at}]"
        if edit.type != CLEAR_THINKING:
            problem = f"is {edit.type[:80]!r}; only {CLEAR_THINKING} is supported: send a shorter conversation"
            raise InvalidRequest(f"{field}.type", problem)
        turns = min(turns, _turns(edit, f"{field}.keep", len(asked.messages)))
    thought = [at for at, message in enumerate(asked.messages) if _thinks(message.content)]
    return frozenset(thought[len(thought) - min(turns, len(thought)) :])


def _turns(edit: Edit, field: str, every: int) -> int:
    keep = edit.keep
    if keep is None:
        return TURNS_KEPT
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return every
    value = keep.get("value") if isinstance(keep, dict) and keep.get("type") == "thinking_turns" else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(field, 'must be "all", or {"type": "thinking_turns", "value": 1 or more}')
    return value


def _thinks(content: object) -> bool:
    return isinstance(content, list) and any(block.type in THINKING for block in content)
