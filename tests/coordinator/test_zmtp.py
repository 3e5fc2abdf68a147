"""ZeroMQ's wire protocol: any fragmentation gives the same messages, and no hostile input exceeds a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.coordinator.transport import zmtp
from kvforge.coordinator.transport.zmtp import GREETING, Bounds, Reader, Violation

READY = zmtp.ready().replace(b"ROUTER", b"DEALER")
HELLO = GREETING + READY
SIZES = st.sampled_from([0, 1, 7, 254, 255, 256, 300, zmtp.LARGE_BYTES, zmtp.LARGE_BYTES + 1, 70_000])


def take(reader: Reader, data: bytes, cuts: list[int], admitted: bool = True) -> list[list[bytes]]:
    """Return the messages if the bytes arrive in chunks of these sizes, repeated."""
    found: list[list[bytes]] = []
    at = turn = 0
    while at < len(data):
        size = cuts[turn % len(cuts)]
        turn += 1
        if (room := reader.room) is not None:
            piece = data[at : at + min(size, len(room))]
            room[: len(piece)] = piece
            reader.filled(len(piece))
        else:
            piece = data[at : at + size]
            reader.feed(piece)
        at += len(piece)
        while (message := reader.next(admitted)) is not None:
            found.append([bytes(frame) for frame in message])
    return found


@given(
    st.lists(st.lists(SIZES, min_size=1, max_size=2), max_size=4),
    st.lists(st.sampled_from([1, 2, 5, 9, 64, 100, 4096, 65536]), min_size=1, max_size=3),
)
def test_messages_come_out_as_they_went_in_wherever_they_are_cut(sizes: list[list[int]], cuts: list[int]) -> None:
    if min(cuts) < 64 and sum(map(sum, sizes)) > 100_000:
        cuts = [max(cut, 64) for cut in cuts]
    messages = [[bytes([i + 1]) * size for i, size in enumerate(parts)] for parts in sizes]
    data = HELLO + b"".join(bytes(piece) for parts in messages for piece in zmtp.message(parts))
    reader = Reader(Bounds())
    assert take(reader, data, cuts) == messages
    assert reader.ready
    assert not reader.begun
    assert reader.held == 0


@given(st.binary(max_size=300), st.sampled_from([b"", GREETING, HELLO]), st.booleans())
def test_whatever_comes_is_a_message_or_a_violation_and_holds_no_more_than_its_bound(
    noise: bytes, before: bytes, admitted: bool
) -> None:
    bounds = Bounds(message_bytes_max=4096, handshake_bytes_max=128)
    reader = Reader(bounds)
    try:
        for message in take(reader, before + noise, [7], admitted):
            assert 1 <= len(message) <= bounds.parts_max
    except Violation:
        return
    assert reader.held <= (bounds.message_bytes_max if admitted else bounds.handshake_bytes_max)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "not a ZMTP peer"),
        (b"\xff" + bytes(8) + b"\x00", "not a ZMTP peer"),
        (GREETING.replace(b"\x7f\x03", b"\x7f\x02"), "ZMTP 2 with"),
        (GREETING.replace(b"NULL", b"CURV"), "CURV"),
        (GREETING + b"\x00\x01x", "first frame is not READY"),
        (GREETING + b"\x04\x05\x04PING", "first frame is not READY"),
        (GREETING + READY.replace(b"DEALER", b"SUBSCR"), "cannot talk to a ROUTER"),
        (GREETING + b"\x04\x08\x05READY\xff\x00", "truncated READY"),
        (HELLO + b"\x08\x00", "flags 0x08"),
        (HELLO + b"\x06" + (1 << 40).to_bytes(8, "big"), "a command is at most"),
        (HELLO + b"\x02" + (1 << 63).to_bytes(8, "big"), "a message is at most"),
        (HELLO + b"\x01\x01a\x01\x01b", "at most 2 parts"),
        (HELLO + b"\x04\x06\x04PING\x00", "PING of a wrong size"),
        (HELLO + b"\x04\x07\x05ERROR\x00", "ERROR"),
        (HELLO + b"\x04\x07\x04PING\x00\x00" * 65, "more than 64 commands"),
    ],
)
def test_what_breaks_the_protocol_is_named(data: bytes, words: str) -> None:
    with pytest.raises(Violation, match=words):
        take(Reader(Bounds()), data, [1 << 20])


def test_a_stranger_may_say_less(monkeypatch: pytest.MonkeyPatch) -> None:
    data = HELLO + b"\x02" + (1 << 20).to_bytes(8, "big")
    with pytest.raises(Violation, match="during the handshake is at most 65536 bytes"):
        take(Reader(Bounds()), data, [1 << 20], admitted=False)
    assert take(Reader(Bounds()), data, [1 << 20]) == []


def test_parts_count_together() -> None:
    data = HELLO + b"\x01\x64" + bytes(100) + b"\x00\x64"
    with pytest.raises(Violation, match="is at most 150 bytes, this one has 200"):
        take(Reader(Bounds(message_bytes_max=150)), data, [1 << 20])


def test_a_ping_is_to_be_answered_with_its_context() -> None:
    reader = Reader(Bounds())
    assert take(reader, HELLO + b"\x04\x0a\x04PING\x00\x64abc", [1 << 20]) == []
    assert reader.reply == zmtp.pong(b"abc") == b"\x04\x08\x04PONGabc"
    assert zmtp.ping(10_000) == b"\x04\x07\x04PING\x00\x64"
