"""The connection of a client: no coordinator, one that crashes, restarts or sends garbage, closing, fork."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from kvforge import (
    Client,
    Conflict,
    CoordinatorUnavailable,
    DeadlineExceeded,
    InvalidConfiguration,
    InvalidRequest,
    ProtocolError,
    VersionMismatch,
)
from kvforge.client.blocking.waiting import drive
from tests.kvforge.fake_coordinator import Running


def test_nobody_is_there(folder: Path) -> None:
    started = time.monotonic()
    with Client(f"ipc://{folder}/nobody.sock", timeout_s=0.3) as kv:
        with pytest.raises(CoordinatorUnavailable, match=r"nobody.sock does not answer.*kvforge up"):
            kv.stats()
        with pytest.raises(CoordinatorUnavailable):
            kv.wait_ready(timeout_s=0.2)
    assert time.monotonic() - started < 9  # the limit without a setting is 10 s


def test_a_coordinator_that_takes_the_connection_and_says_nothing(fake: Running, folder: Path) -> None:
    os.kill(fake.process.pid, 19)  # SIGSTOP: the kernel still accepts connections
    with Client(fake.endpoint, timeout_s=0.3) as kv, pytest.raises(CoordinatorUnavailable, match="does not answer"):
        kv.stats()


def test_closing_that_was_broken_off_can_be_done_again(fake: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = Client(fake.endpoint)
    request = kv.submit([4], max_tokens=9, tenant="hang")
    goodbye = kv._calls.link.goodbye

    def broken() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(kv._calls.link, "goodbye", broken)
    with pytest.raises(KeyboardInterrupt):
        kv.close()
    with pytest.raises(Conflict, match="closed"):
        kv.stats()
    kv.close()
    assert kv._calls.link.goodbye == goodbye and not kv._calls.link.is_open
    fake.expect("Goodbye")
    with pytest.raises(Conflict, match="was closed"):
        request.result()


DROPPED = """
import faulthandler, gc, os, sys
from kvforge import Client
faulthandler.dump_traceback_later(60, exit=True)
if not (child := os.fork()):  # NumPy's OpenBLAS ends its threads at the first fork
    os._exit(0)
os.waitpid(child, 0)
before = len(os.listdir("/proc/self/task"))
for _ in range(5):
    kv = Client(sys.argv[1], timeout_s=20)
    assert kv.stats().boot == "b"
    child = os.fork()
    del kv
    gc.collect()
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_clients_that_are_dropped_without_closing_are_collected(fake: Running) -> None:
    """Also in a fork of their process. No ZeroMQ thread remains."""
    command = [sys.executable, "-W", "ignore", "-c", DROPPED, fake.endpoint]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr


def test_a_message_that_cannot_be_written_costs_no_connection(fake: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(fake.endpoint, timeout_s=20, reconnect_s=0) as kv:
        request = kv.submit([4], max_tokens=9, tenant="hang")

        def broken(*_: object) -> None:
            monkeypatch.undo()
            raise ValueError("too large")

        monkeypatch.setattr("kvforge.client.link.encode", broken)
        with pytest.raises(ValueError, match="too large"):
            kv.stats()
        assert kv.stats().boot == "b"
        with pytest.raises(DeadlineExceeded):  # it still runs
            request.result(timeout_s=0.1)
    assert fake.seen().count("Hello") == 1


def test_a_coordinator_that_never_gets_ready(folder: Path) -> None:
    with Running(folder, ready=False) as fake, Client(fake.endpoint) as kv:
        with pytest.raises(
            DeadlineExceeded, match=r"not ready to serve after 0.3 s: no worker is ready: w0 is loading"
        ):
            kv.wait_ready(timeout_s=0.3)
        assert kv.stats().boot == "b"


def test_the_coordinator_dies_while_a_stream_is_read(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=60, stream_timeout_s=60, reconnect_s=0) as kv:
        other = kv.submit([4], max_tokens=9, tenant="hang")
        request = kv.submit([4], max_tokens=9, tenant="hang")
        assert [token.token_id for _, token in zip(range(2), request, strict=False)] == [4, 5]
        fake.kill()
        started = time.monotonic()
        with pytest.raises(CoordinatorUnavailable, match="is gone"):
            list(request)
        assert time.monotonic() - started < 40  # noticed, not timed out
        assert request.tokens == (4, 5)
        with pytest.raises(CoordinatorUnavailable):
            other.result(timeout_s=60)
        fake.start()
        assert kv.submit([8], max_tokens=2).result(timeout_s=60).tokens == (8, 9)
        fake.expect("Hello")  # with the boot of the crashed coordinator: refused
        fake.expect("Hello")


def test_the_coordinator_is_killed_while_a_command_waits(fake: Running) -> None:
    with Client(fake.endpoint, timeout_s=60, reconnect_s=0) as kv:
        kv.health()
        fake.expect("GetHealth")
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {fake.process.pid}"])
        started = time.monotonic()
        with pytest.raises(CoordinatorUnavailable, match="is gone"):
            kv.submit([1], tenant="silent")
        assert time.monotonic() - started < 40  # noticed, not timed out
        assert killer.wait(10) == 0


def test_a_coordinator_restarted_while_nobody_looked(fake: Running, kv: Client) -> None:
    assert kv.stats().boot == "b"
    fake.kill()
    fake.start()
    assert kv.submit([1], max_tokens=1).result().tokens == (1,)


def test_bytes_that_are_no_message_end_the_connection(kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="garbage")
    with pytest.raises(ProtocolError, match=r"invalid message from .*MessagePack"):
        request.result()
    assert request.tokens == (1, 2)
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_gap_in_a_stream_is_an_error_of_that_request(fake: Running, kv: Client) -> None:
    request = kv.submit([1], max_tokens=9, tenant="gap")
    with pytest.raises(ProtocolError, match="gap: token 2 was due and token 3 came"):
        request.result()
    fake.expect("Cancel")
    assert kv.submit([3], max_tokens=1).result().tokens == (3,)


def test_a_link_that_gets_writable_just_before_the_wait_is_noticed(fake: Running) -> None:
    with Client(fake.endpoint) as kv:
        link = kv._calls.link
        link.open()
        assert link.socket is not None
        assert link.socket.poll(10_000, zmq.POLLOUT)
        answers = iter((False, True))  # false when polled, true when the wait begins
        started = time.monotonic()
        assert drive(kv._calls._until(lambda: next(answers), (), started + 60, for_room=True))
        assert time.monotonic() - started < 30


def test_another_protocol_version_is_named(folder: Path) -> None:
    refused = pytest.raises(VersionMismatch, match="7 to 8; you speak 1")
    with Running(folder, version_min=7) as newer, Client(newer.endpoint) as kv, refused:
        kv.stats()


def test_an_endpoint_that_is_none() -> None:
    with Client("nonsense") as kv, pytest.raises(InvalidConfiguration, match="nonsense") as raised:
        kv.stats()
    assert raised.value.field == "endpoint"


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_every_wait_has_an_end(timeout_s: float) -> None:
    with pytest.raises(InvalidRequest):
        Client("ipc:///nowhere", timeout_s=timeout_s)


def test_closing_twice_and_using_after(fake: Running) -> None:
    kv = Client(fake.endpoint)
    request = kv.submit([1], max_tokens=9, tenant="hang")
    kv.close()
    kv.close()
    for use in (kv.stats, request.result):
        with pytest.raises(Conflict, match="closed"):
            use()


def test_a_client_does_not_survive_a_fork(fake: Running) -> None:
    script = f"""
import os
from kvforge import Client, Conflict
kv = Client({fake.endpoint!r}, timeout_s=60)
kv.stats()
child = os.fork()
if not child:
    try:
        kv.stats()
    except Conflict as error:
        kv.close()
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert kv.stats().boot == "b"
kv.close()
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script], capture_output=True, text=True, timeout=20
    )
    assert (ran.returncode, ran.stderr) == (0, "")
