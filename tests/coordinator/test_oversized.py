"""A client message that is too large is refused by its size, before it is stored, joined or written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvforge.coordinator.config import CoordinatorConfig, LimitsSection
from kvforge.coordinator.core.events import FromClient
from kvforge.coordinator.transport import zmtp
from kvforge.coordinator.transport.connection import ConnectionLimits
from kvforge.coordinator.transport.curve import SEALED_MESSAGE_BYTES_MAX, SealedReader
from kvforge.coordinator.transport.oversized import Oversized, Skipped, check_size
from kvforge.coordinator.transport.router_socket import PeerLimits
from kvforge.coordinator.transport.zmtp import Bounds, Reader, Violation
from kvforge.protocol import codec
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import CreateSequence, Done, GetStats, Refused
from tests.coordinator.curve_client import CurveClient, server_keys
from tests.coordinator.net import until
from tests.coordinator.test_curve import GREETING
from tests.coordinator.test_router_socket import Hostile, ends
from tests.coordinator.test_turn import Bench
from tests.coordinator.test_zmtp import HELLO, take
from tests.hostile.raw import part

MOST, SKIPPED = 1000, 200_000
BOUNDS = Bounds(message_bytes_max=MOST, skipped_bytes_max=SKIPPED)
SIZES = st.sampled_from([0, 1, 255, 256, 499, 500, 501, MOST, MOST + 1, 20_000, 70_000])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.tables.close()


@pytest.fixture
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    limits = ConnectionLimits(message_bytes_max=100_000, skipped_bytes_max=64 << 20)
    made = Hostile(str(tmp_path_factory.mktemp("s")), PeerLimits(partial_bytes_max=1 << 20, connection=limits))
    yield made
    made.close()


# --------------------------------------------------------------------------------------------------------------- wire


@given(
    st.lists(st.lists(SIZES, min_size=1, max_size=2), max_size=5),
    st.lists(st.sampled_from([64, 100, 4096, 65536]), min_size=1, max_size=3),
)
def test_messages_too_large_are_read_past_and_all_others_come_out(sizes: list[list[int]], cuts: list[int]) -> None:
    messages = [[bytes([i + 1]) * size for i, size in enumerate(parts)] for parts in sizes]
    data = HELLO + b"".join(bytes(piece) for parts in messages for piece in zmtp.message(parts))
    reader = Reader(BOUNDS)
    found: list[list[zmtp.Frame]] = []
    for at in range(0, len(data), min(cuts)):
        piece = data[at : at + min(cuts)]
        while piece:
            if (room := reader.room) is not None:
                now, piece = piece[: len(room)], piece[len(room) :]
                room[: len(now)] = now
                reader.filled(len(now))
            else:
                reader.feed(piece)
                piece = b""
            while (message := reader.next(True)) is not None:
                found.append(message)
            assert reader.held <= MOST
    assert [[getattr(frame, "size", len(frame)) for frame in message] for message in found] == sizes
    for message, sent in zip(found, messages, strict=True):
        whole = sum(map(len, sent))
        assert any(isinstance(frame, Skipped) for frame in message) == (whole > MOST)
        assert isinstance(message[-1], Skipped) == (whole > MOST)
        if whole <= MOST:
            assert [bytes(frame) for frame in message] == sent
            check_size(message, MOST)
        else:
            with pytest.raises(Oversized, match=f"message: has {whole} bytes, and limits.message_bytes_max is {MOST}"):
                check_size(message, MOST)
    assert not reader.begun


def test_a_message_that_is_read_past_has_begun_and_its_end_is_waited_for() -> None:
    reader = Reader(BOUNDS)
    assert take(reader, HELLO + b"\x02" + (50_000).to_bytes(8, "big") + bytes(49_999), [4096]) == []
    assert reader.begun
    assert (reader.held, reader.room) == (0, None)
    assert take(reader, bytes(1) + b"\x00\x01x", [4096]) == [[b""], [b"x"]]


@pytest.mark.parametrize("announced", [SKIPPED + 1, 1 << 40, (1 << 64) - 1])
def test_what_is_larger_than_any_message_ends_the_connection(announced: int) -> None:
    with pytest.raises(Violation, match=f"a message is at most {SKIPPED} bytes, this one has {announced}"):
        take(Reader(BOUNDS), HELLO + b"\x02" + announced.to_bytes(8, "big"), [1 << 20])


def test_parts_that_are_read_past_count_together() -> None:
    data = HELLO + part(bytes(150_000)) + b"\x02" + (60_000).to_bytes(8, "big")
    with pytest.raises(Violation, match=f"at most {SKIPPED} bytes, this one has 210000"):
        take(Reader(BOUNDS), data, [1 << 16])


def test_a_stranger_and_a_worker_are_disconnected() -> None:
    data = HELLO + b"\x02" + (70_000).to_bytes(8, "big")
    with pytest.raises(Violation, match="during the handshake is at most 65536 bytes"):
        take(Reader(BOUNDS), data, [1 << 20], admitted=False)
    workers = CoordinatorConfig().worker_limits().connection
    both = HELLO + part(bytes(1 << 20)) + b"\x02" + (64 << 20).to_bytes(8, "big")
    assert take(Reader(workers), both, [1 << 20]) == []
    with pytest.raises(Violation, match=f"at most {65 << 20} bytes"):
        take(Reader(workers), both[:-1] + b"\x01", [1 << 20])


@pytest.mark.parametrize("cut", [512, 1 << 20])
def test_an_encrypted_connection_goes_on_behind_what_it_read_past(cut: int) -> None:
    client, reader = CurveClient(), SealedReader(BOUNDS, server_keys())
    reader.feed(GREETING + client.hello())
    assert reader.next(False) is None
    client.take_welcome(reader.reply)
    data = client.initiate() + client.message(b"body", flags=1) + client.message(bytes(30_000)) + client.message(b"x")
    assert take(reader, data, [cut]) == [[b"body", b""], [b"x"]]
    assert not reader.begun


def test_the_bound_of_an_encrypted_connection_is_named() -> None:
    with pytest.raises(Oversized, match=f"an encrypted connection takes at most {SEALED_MESSAGE_BYTES_MAX}"):
        check_size([b"body", Skipped(9 << 20, SEALED_MESSAGE_BYTES_MAX)], 16 << 20)


# --------------------------------------------------------------------------------------------------------- connections


def test_a_connection_goes_on_and_holds_nothing_of_what_was_too_large(hostile: Hostile) -> None:
    peer, other = hostile.connect(), hostile.connect()
    peer.send(part(b"body") + part(bytes(20 << 20), more=False) + part(b"next", more=False))
    connection = next(c for c in hostile.peers._table.by_identity.values() if c.number == 1)
    held: list[int] = []
    frames: list[list[zmtp.Frame]] = []

    def both() -> bool:
        peer.send(b"")
        if (message := hostile.peers.receive()) is not None:
            frames.append(message[2])
        hostile.peers.note_ends()
        held.append(connection.reader.held + len(connection.reader._data))
        return len(frames) == 2

    until(both)
    assert [[bytes(frame) for frame in message] for message in frames] == [[b"body", b""], [b"next"]]
    assert max(held) < 200_000
    other.send(part(b"other", more=False))
    assert hostile.texts(1) == [b"other"]
    assert hostile.peers.pop_disconnected() == []


def test_one_that_announces_more_than_any_message_is_disconnected(hostile: Hostile) -> None:
    greedy = hostile.connect()
    greedy.send(b"\x02" + (1 << 40).to_bytes(8, "big"))
    assert ends(hostile, greedy) == [1]


# ---------------------------------------------------------------------------------------------------------------- turn


def test_the_refusal_names_the_command_and_the_limit_and_the_core_hears_nothing(bench: Bench) -> None:
    body, _ = codec.encode(CreateSequence(rid=7, tokens=np.zeros(10, np.int32)))
    bench.clients.inbox.append((b"1", 101, [bytes(body), Skipped(24 << 20, 16 << 20)]))
    bench.clients.inbox.append((b"1", 101, [bytes(body), bytes(17 << 20)]))  # from any transport
    bench.clients.arrive(1, GetStats(rid=8))
    bench.turn()
    bench.turn()  # the second one exhausts the turn's byte budget
    *refusals, last = bench.clients.take(1)
    assert len(refusals) == 2
    for refused, size in zip(refusals, ((24 << 20), (17 << 20)), strict=True):
        assert isinstance(refused, Refused)
        fields = {"field": "message", "size": size + len(body), "bytes_max": 16 << 20}
        assert (refused.rid, refused.error.code, refused.error.fields) == (7, "invalid_request", fields)
        assert f"has {size + len(body)} bytes, and limits.message_bytes_max is {16 << 20}" in refused.error.message
    assert isinstance(last, Done)
    assert [event.message.rid for event in bench.machine.events if isinstance(event, FromClient)] == [8]


def test_a_message_that_is_too_large_does_not_begin(bench: Bench) -> None:
    """The refusal comes before the message is recorded as begun."""
    begun: list[object] = []

    class Detector:
        begin = staticmethod(begun.append)
        message_applied = turn_written = staticmethod(lambda: None)

    class Writer:
        bytes, number, poison_detector = 0, 1, Detector()
        note = staticmethod(lambda *_: None)
        commit = staticmethod(lambda: None)

    bench.loop._journal = Writer()
    bench.clients.inbox.append((b"1", 101, [bytes(codec.encode(GetStats(rid=8))[0]), Skipped(24 << 20, 1)]))
    bench.turn()
    assert begun == []
    assert [type(message) for message in bench.clients.take(1)] == [Refused]


# ------------------------------------------------------------------------------------------------------- configuration


def test_the_limit_is_that_of_the_clients_connections() -> None:
    config = CoordinatorConfig(limits=LimitsSection(message_bytes_max=3 << 20))
    limits = config.client_limits().connection
    assert (limits.message_bytes_max, limits.skipped_bytes_max) == (3 << 20, zmtp.MESSAGE_BYTES_MAX)
    assert config.worker_limits().connection.message_bytes_max == zmtp.MESSAGE_BYTES_MAX == 65 << 20


@pytest.mark.parametrize("value", [0, (1 << 20) - 1, (65 << 20) + 1])
def test_a_limit_that_no_message_can_keep_is_refused(value: int) -> None:
    with pytest.raises(InvalidConfiguration, match=r"limits\.message_bytes_max: must be 1048576 to 68157440, not"):
        CoordinatorConfig(limits=LimitsSection(message_bytes_max=value))


def test_the_longest_prompt_must_fit() -> None:
    with pytest.raises(InvalidConfiguration, match=r"limits\.message_bytes_max: must be at least 9437184 for"):
        limits = LimitsSection(message_bytes_max=4 << 20, blocks_per_sequence_max=1 << 17)
        CoordinatorConfig(limits=limits)
