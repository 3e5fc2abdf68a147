"""Why sequences were removed without a client's command, for those that still name them."""

from __future__ import annotations

from collections import OrderedDict


class Removals:
    """The latest removals, oldest first.

    Args:
        entries_max: How many are remembered.

    Attributes:
        entries: The tenant's name and the reason, by sequence id.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_max = entries_max
        self.entries: OrderedDict[int, tuple[str, str]] = OrderedDict()

    def note(self, sequence_id: int, tenant: str, why: str) -> None:
        """Remember a removal."""
        self.entries[sequence_id] = tenant, why
        while len(self.entries) > self._entries_max:
            self.entries.popitem(last=False)

    def reason(self, sequence_id: int, tenant: str = "") -> str:
        """Return why a sequence of the tenant ("": any) was removed; "" if that is not known."""
        owner, why = self.entries.get(sequence_id, ("", ""))
        return why if tenant in ("", owner) else ""
