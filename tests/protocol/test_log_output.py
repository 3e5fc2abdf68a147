"""The log never blocks: unread lines are buffered, then dropped and counted, and one peer cannot fill it."""

from __future__ import annotations

import logging
import os
import pty
import select
import socket as sockets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvforge.protocol.log_output import SAME_MAX, SAME_S, LogOutput, RateLimitFilter

LINE = "x" * 999
WAIT_S = 30.0


class Reader:
    """A descriptor for the log, and its reader."""

    def __init__(self, kind: str) -> None:
        if kind == "pipe":
            self.read_end, self.write_end = os.pipe()
        elif kind == "terminal":
            self.read_end, self.write_end = pty.openpty()
        else:
            ours, theirs = sockets.socketpair()
            self.read_end, self.write_end = ours.detach(), theirs.detach()

    def read(self, wait_s: float) -> bytes:
        """Return the data that is available or arrives within the time."""
        assert select.select([self.read_end], [], [], wait_s)[0], "nothing came"
        return os.read(self.read_end, 1 << 16).replace(b"\r", b"")

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture(params=["pipe", "socket", "terminal"])
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    made = Reader(request.param)
    yield made
    made.close()


def record(text: str, level: int = logging.WARNING, peer: int | None = None) -> logging.LogRecord:
    made = logging.LogRecord("t", level, "f", 1, text, (), None)
    if peer is not None:
        made.peer = peer
    return made


def test_what_nobody_reads_is_kept_in_order_then_lost_and_counted(reader: Reader) -> None:
    output = LogOutput(reader.write_end, buffer_bytes_max=50_000)
    total = 2000
    for i in range(total):
        output.emit(record(f"{i:05d} {LINE}"))  # would block forever if it blocked
    assert os.get_blocking(reader.write_end)  # unchanged for other users of the descriptor
    text = b""
    while output.kept_bytes:
        text += reader.read(WAIT_S)
        output.flush()
    output.emit(record("after"))
    while not text.endswith(b"after\n"):
        text += reader.read(WAIT_S)
    *lines, last = text.decode().splitlines()
    due = lost = 0
    for line in lines:
        if line.endswith("log lines dropped: standard error did not take them"):
            lost += int(line.split()[0])
            due += int(line.split()[0])
        else:
            assert int(line[:5]) == due
            due += 1
    assert (due, last) == (total, "after")
    assert 0 < lost < total
    output.close()


def test_a_reader_that_is_gone_is_no_fault() -> None:
    reader = Reader("pipe")
    os.close(reader.read_end)
    output = LogOutput(reader.write_end)
    output.emit(record("nobody"))
    output.close()
    os.close(reader.write_end)


def test_lines_about_one_thing_are_limited_and_those_about_others_are_not() -> None:
    now_s = [0.0]
    limited = RateLimitFilter(lambda: now_s[0])
    passed = [limited.filter(record(f"refused message {i}: bad tag", peer=1)) for i in range(100)]
    assert passed == [True] * SAME_MAX + [False] * (100 - SAME_MAX)
    assert limited.filter(record("refused message 7: bad tag", peer=2))
    assert limited.filter(record("something else", peer=1))
    assert all(limited.filter(record("request ended", logging.INFO)) for _ in range(100))
    now_s[0] = SAME_S
    later = record("refused message 100: bad tag", peer=1)
    assert limited.filter(later)
    assert later.getMessage() == "refused message 100: bad tag (90 more like it were left out)"


def test_kinds_are_bounded() -> None:
    limited = RateLimitFilter(lambda: 0.0)
    for peer in range(10_000):
        assert limited.filter(record("refused", peer=peer))
    assert len(limited._kinds) <= 256


CHATTY = """
import logging
from kvforge.protocol import logs
logs.configure("test", "info", "text")
for i in range(5000):
    logging.getLogger("x").info("line %d %s", i, "y" * 200)
print("done", flush=True)
"""


def test_a_process_whose_standard_error_is_not_read_goes_on() -> None:
    with subprocess.Popen([sys.executable, "-c", CHATTY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 60)[0], "the process blocks on its unread log"
            assert process.stdout.readline() == b"done\n"
        finally:
            process.kill()
