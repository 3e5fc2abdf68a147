"""Finds the entries of an earlier life that can be used: their whole prefix is on the disk too."""

from __future__ import annotations

from .records import Entry, Record

Found = list[tuple[int, Entry]]


def usable(records: dict[int, Record]) -> tuple[Found, list[int]]:
    """Return entries in the order in which the coordinator takes them, and the slots of all others.

    An entry follows the one before it in its chain. Chains that were written last come first.

    Args:
        records: Whole records by slot.
    """
    latest: dict[int, int] = {}  # by value; of two slots with one content, the later write counts
    for slot, record in records.items():
        value = record.entry.value
        if value not in latest or records[latest[value]].number < record.number:
            latest[value] = slot
    found: Found = []
    taken: set[int] = set()
    lost: set[int] = set()
    for slot in sorted(latest.values(), key=lambda slot: -records[slot].number):
        path: dict[int, None] = {}
        at: int | None = slot
        while at is not None and at not in taken:
            if at in lost or at in path:  # no beginning, or a circle, which no honest writer makes
                at = None
                break
            path[at] = None
            entry = records[at].entry
            if entry.first:
                break
            at = latest.get(entry.parent)
        if at is None:
            lost.update(path)
            continue
        for number in reversed(path):
            taken.add(number)
            found.append((number, records[number].entry))
    return found, [slot for slot in records if slot not in taken]
