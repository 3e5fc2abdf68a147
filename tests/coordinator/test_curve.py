"""CURVE: clients with a key of the allow-list are served, libzmq's too; all others are refused, whatever they send."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvforge.coordinator.transport import curve, zmtp
from kvforge.coordinator.transport.connection import ConnectionLimits
from kvforge.coordinator.transport.curve import SealedReader
from kvforge.coordinator.transport.listener import Endpoint
from kvforge.coordinator.transport.outbox import Sent
from kvforge.coordinator.transport.router_socket import PeerLimits, RouterSocket
from kvforge.coordinator.transport.zmtp import Bounds, Violation
from kvforge.protocol import keys, network, transport
from tests.coordinator.curve_client import CLIENT, SERVER, CurveClient, command, server_keys
from tests.coordinator.net import DEADLINE_S, until
from tests.coordinator.test_zmtp import take

GREETING = zmtp.greeting(b"CURVE", as_server=False)
STRANGER = keys.make()


def greeted(client: CurveClient | None = None) -> tuple[SealedReader, CurveClient]:
    """A reader that has answered HELLO, and its client."""
    client = client or CurveClient()
    reader = SealedReader(Bounds(), server_keys())
    reader.feed(GREETING + client.hello())
    assert reader.next(False) is None
    client.take_welcome(reader.reply)
    reader.reply = b""
    return reader, client


def shaken() -> tuple[SealedReader, CurveClient]:
    """A reader and its client after the handshake."""
    reader, client = greeted()
    reader.feed(client.initiate())
    assert reader.next(False) is None
    assert reader.ready
    return reader, client


def refused(reader: SealedReader, data: bytes, words: str) -> Violation:
    with pytest.raises(Violation, match=words) as raised:
        take(reader, data, [1 << 20])
    return raised.value


# ----------------------------------------------------------------------------------------------------------- handshake


def test_a_key_of_the_list_is_let_in_and_named() -> None:
    reader, _ = shaken()
    assert reader.reply.startswith(b"\x04")
    assert b"\x05READY" in reader.reply
    assert keys.text_of(reader.key) == CLIENT.public


def test_a_key_that_is_not_in_the_list_is_told_so_and_who_only_names_one_learns_nothing() -> None:
    reader, client = greeted(CurveClient(pair=STRANGER))
    violation = refused(reader, client.initiate(), "is not in the allow-list")
    assert violation.last == curve.UNKNOWN_KEY
    assert f"'{STRANGER.public}'" in str(violation)
    reader, client = greeted(CurveClient(pair=keys.KeyPair(CLIENT.public, STRANGER.secret)))
    violation = refused(reader, client.initiate(), "cannot prove its key")
    assert (violation.last, reader.key) == (b"", b"")


def test_a_hello_for_another_server_is_refused() -> None:
    client = CurveClient(server=curve.crypto_box_keypair()[0])
    refused(SealedReader(Bounds(), server_keys()), GREETING + client.hello(), "not for this coordinator's key")


def test_a_handshake_that_was_listened_to_is_of_no_use_again() -> None:
    """HELLO and INITIATE cannot be replayed: the cookie and the key that seals INITIATE belong to one connection."""
    first, client = greeted()
    hello, initiate = CurveClient.hello(client), client.initiate()
    second = SealedReader(Bounds(), server_keys())
    second.feed(GREETING + hello)
    assert second.next(False) is None  # a replayed HELLO is as valid as the first and proves nothing yet
    refused(second, initiate, "wrong cookie")
    again = CurveClient(transient=client.transient)
    third = SealedReader(Bounds(), server_keys())
    third.feed(GREETING + hello)
    third.next(False)
    again.take_welcome(third.reply)
    spoiled = initiate[:18] + again.cookie + initiate[18 + curve.COOKIE_BYTES :]
    refused(third, spoiled, "not encrypted for this connection")
    first.feed(initiate)
    first.next(False)
    assert first.ready


def test_a_vouch_of_another_connection_is_refused() -> None:
    """A client that was tricked into connecting to an attacker, who forwards its vouch."""
    reader, client = greeted()
    other = CurveClient(transient=curve.crypto_box_keypair(), server_transient=client.server_transient)
    refused(reader, client.initiate(vouch=other.vouch()), "vouch is for another connection")


def test_after_a_handshake_there_is_no_second() -> None:
    reader, client = shaken()
    refused(reader, client.initiate(), "unencrypted frame")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (zmtp.GREETING, "with b'NULL' .expected 3 with CURVE"),
        (GREETING + b"\x00\x01x", "first frame is not HELLO"),
        (GREETING + b"\x02" + (100_000).to_bytes(8, "big"), "at most 65536 bytes"),
        (GREETING + b"\x02" + (60_000).to_bytes(8, "big"), "first frame is not HELLO"),
        (GREETING + zmtp.ready(), "first frame is not HELLO"),
        (GREETING + command(b"\x05HELLO\x01\x00" + bytes(100)), "first frame is not HELLO"),
        (GREETING + command(b"\x05HELLO\x02\x00" + bytes(192)), "first frame is not HELLO"),
        (GREETING + command(b"\x05HELLO\x01\x00" + bytes(192)), "invalid public key"),
    ],
)
def test_what_is_no_handshake_is_named(data: bytes, words: str) -> None:
    refused(SealedReader(Bounds(), server_keys()), data, words)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda client: client.hello(), "not INITIATE"),
        (lambda client: command(client.initiate()[9:100]), "not INITIATE"),
        (lambda client: client.initiate(cookie=bytes(96)), "wrong cookie"),
        (lambda client: client.initiate(metadata=b"\x0bSocket-Type\x00\x00\x00\x03SUB"), "cannot talk to a ROUTER"),
        (lambda client: client.initiate(metadata=b"\xff"), "truncated READY"),
        (lambda client: client.initiate(vouch=bytes(96)), "cannot prove its key"),
        (lambda client: client.message(b"x"), "not INITIATE"),
    ],
)
def test_what_is_no_end_of_a_handshake_is_named(spoil: Callable[[CurveClient], bytes], words: str) -> None:
    reader, client = greeted()
    refused(reader, spoil(client), words)
    assert not reader.ready
    assert reader.key == b""


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_a_handshake_can_be_changed(at: int, change: int) -> None:
    """Changed padding and changed nonces invalidate the boxes, so every change leads to the same refusal."""
    client = CurveClient()
    hello = bytearray(client.hello())
    sealed = range(2 + 80, len(hello))
    hello[sealed[at % len(sealed)]] ^= change
    words = "not for this coordinator's key|invalid public key"
    refused(SealedReader(Bounds(), server_keys()), GREETING + bytes(hello), words)
    reader, client = greeted()
    initiate = bytearray(client.initiate())
    place = 9 + at % (len(initiate) - 9)
    initiate[place] ^= change
    with pytest.raises(Violation):
        take(reader, bytes(initiate), [1 << 20])
    assert not reader.ready


@given(st.integers(0, 700), st.sampled_from([1, 7, 64, 1000]))
def test_a_handshake_that_is_cut_off_is_not_over(length: int, cut: int) -> None:
    reader, client = greeted()
    initiate = client.initiate()
    assert take(reader, initiate[: min(length, len(initiate) - 1)], [cut], admitted=False) == []
    assert not reader.ready
    assert reader.begun


# ------------------------------------------------------------------------------------------------------------ messages

SIZES = st.sampled_from([0, 1, 200, 255, 300, zmtp.LARGE_BYTES - 33, zmtp.LARGE_BYTES, 70_000])


@given(st.lists(st.lists(SIZES, min_size=1, max_size=2), max_size=4), st.sampled_from([64, 4096, 65536]))
def test_messages_come_out_as_they_went_in_wherever_they_are_cut(sizes: list[list[int]], cut: int) -> None:
    reader, client = shaken()
    messages = [[bytes([i + 1]) * size for i, size in enumerate(parts)] for parts in sizes]
    data = b"".join(client.message(part, int(i + 1 < len(parts))) for parts in messages for i, part in enumerate(parts))
    assert take(reader, data, [cut]) == messages
    assert (reader.held, reader.begun) == (0, False)


@given(st.lists(SIZES, min_size=1, max_size=2))
def test_what_is_sent_is_opened_by_the_client_alone(sizes: list[int]) -> None:
    reader, client = shaken()
    frames = [bytes([i + 65]) * size for i, size in enumerate(sizes)]
    data = b"".join(bytes(piece) for piece in reader.message(frames))
    assert all(frame not in data for frame in frames if len(frame) > 8)
    assert client.opened(data) == [(int(i + 1 < len(frames)), frame) for i, frame in enumerate(frames)]


def test_a_message_is_not_taken_twice_nor_an_older_one_after_it() -> None:
    reader, client = shaken()
    first, second = client.message(b"first"), client.message(b"second")
    assert take(reader, second, [1000]) == [[b"second"]]
    refused(reader, second, "replayed")
    refused(reader, first, "replayed")


@given(st.integers(0, 500), st.integers(1, 255))
def test_no_byte_of_a_message_can_be_changed(at: int, change: int) -> None:
    reader, client = shaken()
    sealed = bytearray(client.message(b"remove everything"))
    sealed[2 + at % (len(sealed) - 2)] ^= change
    refused(reader, bytes(sealed), "modified in transit|unencrypted|replayed")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda _: b"\x00\x05plain", "unencrypted frame"),
        (lambda client: b"\x01" + client.message(b"x")[1:], "unencrypted frame"),
        (lambda client: client.message(b"x", flags=4), "flags 0x04"),
        (lambda client: client.message(b"a", 1) + client.message(b"b", 1), "at most 2 parts"),
        (lambda client: client.message(bytes(5000), flags=2), "a command is at most"),
        (lambda client: client.message(b"\x05ERROR\x00", flags=2), "ERROR"),
        (lambda client: client.message(b"\x04PING\x00", flags=2), "PING of a wrong size"),
        (lambda _: b"\x02" + ((8 << 20) + 1).to_bytes(8, "big"), "a message is at most 8388608 bytes"),
    ],
)
def test_what_breaks_the_protocol_is_named(spoil: Callable[[CurveClient], bytes], words: str) -> None:
    reader, client = shaken()
    refused(reader, spoil(client), words)


def test_heartbeats_are_sealed_and_count_for_no_message() -> None:
    reader, client = shaken()
    half = client.message(b"half", 1)
    pings = b"".join(client.message(b"\x04PING\x00\x64abc", flags=2) for _ in range(3))
    assert take(reader, half + pings, [1000]) == []
    assert client.opened(reader.reply) == [(2, b"\x04PONGabc")]
    assert client.opened(reader.sealed(zmtp.ping(1000))) == [(2, b"\x04PING\x00\x0a")]
    assert reader.held == 4 + 33
    assert take(reader, client.message(b"whole"), [1000]) == [[b"half", b"whole"]]
    assert reader.held == 0


# ------------------------------------------------------------------------------------------------------ libzmq's client


class CurveNet:
    """A coordinator's TCP socket, and clients of libzmq."""

    def __init__(self) -> None:
        endpoint = Endpoint("tcp://127.0.0.1:0", partial(SealedReader, keys=server_keys()), "tcp.listen")
        numbers = itertools.count(1)
        limits = PeerLimits(pending_handshakes_max=3, connection=ConnectionLimits(queue_messages_max=1000))
        self.peers = RouterSocket((endpoint,), lambda: next(numbers), limits)
        (self.endpoint,) = self.peers.endpoints
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def dealer(self, pair: keys.KeyPair, server: str = SERVER.public) -> zmq.Socket[bytes]:
        dealer = transport.dealer(self._context, network.CurveCredentials(server, pair))
        dealer.setsockopt(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self.monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | network.REFUSED)
        self._sockets += (dealer, self.monitor)
        dealer.connect(self.endpoint)
        return dealer

    def read(self, dealer: zmq.Socket[bytes]) -> list[bytes]:
        until(lambda: (self.peers.note_ends(), bool(dealer.poll(0)))[1])  # type: ignore[func-returns-value]
        return dealer.recv_multipart()

    def receive(self) -> tuple[bytes, int, list[bytes]]:
        found: list[tuple[bytes, int, list[bytes]]] = []

        def came() -> bool:
            if (received := self.peers.receive()) is not None:
                found.append((received[0], received[1], [bytes(frame) for frame in received[2]]))
            self.peers.note_ends()
            return bool(found)

        until(came)
        return found[0]

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)
        self._context.term()
        self.peers.close()


@pytest.fixture
def net() -> Iterator[CurveNet]:
    made = CurveNet()
    yield made
    made.close()


def test_a_client_of_libzmq_is_served(net: CurveNet) -> None:
    dealer = net.dealer(CLIENT)
    until(lambda: (net.peers.note_ends(), bool(dealer.poll(0, zmq.POLLOUT)))[1])  # type: ignore[func-returns-value]
    large = bytes(range(256)) * 10_000
    dealer.send_multipart([b"hello", b"x"])
    identity, descriptor, frames = net.receive()
    assert frames == [b"hello", b"x"]
    number = net.peers.admit(identity, descriptor)
    assert number == 1
    dealer.send_multipart([b"body", large])
    assert net.receive()[2] == [b"body", large]
    for answer in ([b"a"], [b"b" * 300, large], [b"", b"c"]):
        assert net.peers.send(number, answer) is Sent.DONE
    assert [net.read(dealer) for _ in range(3)] == [[b"a"], [b"b" * 300, large], [b"", b"c"]]


def test_a_client_of_libzmq_is_told_that_its_key_is_unknown(net: CurveNet) -> None:
    net.dealer(STRANGER)
    until(lambda: (net.peers.note_ends(), bool(net.monitor.poll(0)))[1])  # type: ignore[func-returns-value]
    assert int.from_bytes(net.monitor.recv_multipart()[0][:2], "little") == network.REFUSED


def test_one_that_takes_another_key_for_the_servers_is_dropped(net: CurveNet, caplog: pytest.LogCaptureFixture) -> None:
    net.dealer(CLIENT, STRANGER.public)
    until(lambda: (net.peers.note_ends(), "not for this coordinator's key" in caplog.text)[1])  # type: ignore[func-returns-value]
    assert not net.monitor.poll(0)
