"""Recovered entries of the disk tier: only those with their whole prefix, in the order of their chains."""

from __future__ import annotations

from kvforge.worker.disk.records import Entry, Record
from kvforge.worker.disk.recovery import usable


def record(number: int, value: int, parent: int = -1) -> Record:
    return Record(number, Entry(value, max(parent, 0), parent < 0, b""), 0)


def test_entries_follow_their_prefix_and_late_chains_come_first() -> None:
    records = {0: record(9, 30, 20), 1: record(1, 20, 10), 2: record(2, 10), 3: record(5, 40), 4: record(8, 50, 40)}
    found, others = usable(records)
    assert [slot for slot, _ in found] == [2, 1, 0, 3, 4] and others == []


def test_entries_without_their_prefix_are_left_out() -> None:
    records = {0: record(1, 10), 1: record(2, 30, 20), 2: record(3, 40, 30)}
    found, others = usable(records)
    assert [slot for slot, _ in found] == [0] and others == [1, 2]


def test_of_two_slots_with_one_content_the_later_write_counts() -> None:
    found, others = usable({0: record(2, 10), 1: record(1, 10), 2: record(3, 20, 10)})
    assert [slot for slot, _ in found] == [0, 2] and others == [1]


def test_a_circle_has_no_beginning() -> None:
    assert usable({0: record(1, 10, 20), 1: record(2, 20, 10)}) == ([], [0, 1])
