"""Reading a file of records: everything, everything but a torn tail, or nothing if the middle is damaged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.coordinator.journal.records import HEADER, MAGIC, crc_of, read, record
from kvforge.protocol.errors import JournalCorrupt

PAYLOADS = [b"one", b"", b"three" * 100, MAGIC + b"looks like one", b"five"]


def written(payloads: list[bytes], first: int = 7) -> bytes:
    data, before = b"", 0
    for i, payload in enumerate(payloads):
        data += (made := record(first + i, [payload[:3], payload[3:]], before))
        before = crc_of(made)
    return data


def read_all(data: bytes, first: int = 7) -> list[bytes]:
    return [bytes(found.payload) for found in read(memoryview(data), first, "f")]


def test_what_was_written_is_read() -> None:
    data = written(PAYLOADS)
    assert read_all(data) == PAYLOADS
    assert [found.end for found in read(memoryview(data), 7, "f")][-1] == len(data)
    assert read_all(b"") == []


def test_wherever_the_file_is_cut_whole_records_are_read_and_the_rest_is_a_torn_tail() -> None:
    data = written(PAYLOADS)
    ends = [0, *(found.end for found in read(memoryview(data), 7, "f"))]
    for cut in range(len(data) + 1):
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        assert read_all(data[:cut]) == PAYLOADS[:whole]


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_byte_that_changed_is_refused_in_the_middle_and_torn_in_the_last_record(where: int, change: int) -> None:
    data = bytearray(written(PAYLOADS))
    last = len(data) - len(record(11, [PAYLOADS[-1]]))
    where %= len(data)
    data[where] ^= change
    if where < last:
        with pytest.raises(JournalCorrupt) as caught:
            read_all(bytes(data))
        assert caught.value.fields["file"] == "f" and caught.value.fields["offset"] <= where
    else:
        assert read_all(bytes(data)) == PAYLOADS[:-1]


@pytest.mark.parametrize("zeros", [1, HEADER.size, 5000])
def test_zeros_behind_the_end_are_a_torn_tail_and_a_hole_of_zeros_is_damage(zeros: int) -> None:
    assert read_all(written(PAYLOADS) + bytes(zeros)) == PAYLOADS
    holed = written(PAYLOADS[:2]) + bytes(zeros) + written(PAYLOADS[3:], 10)
    with pytest.raises(JournalCorrupt, match="record 9 is missing and 10 follows"):
        read_all(holed)


def test_a_record_that_is_not_the_next_one_is_not_read() -> None:
    with pytest.raises(JournalCorrupt, match="record 8 is missing and 9 follows"):
        read_all(record(7, [b"a"]) + record(9, [b"b"]))
    assert read_all(record(7, [b"a"]) + record(7, [b"a"])) == [b"a"], "a repeated old record is not a successor"


def test_a_record_that_follows_another_one_is_refused() -> None:
    """It is intact and has the right number, but belongs to another journal, or to another version of this one."""
    with pytest.raises(JournalCorrupt, match="record 8 does not belong after the record before it"):
        read_all(record(7, [b"a"]) + record(8, [b"b"], crc_of(record(7, [b"c"]))))
