"""Waiting for descriptors above 1,023, as a server with many connections has them."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.protocol.readiness import readable

REPOSITORY = Path(__file__).parents[2]
SHIPPED = ("coordinator", "gateway", "loadtest", "protocol", "worker", "kvforge")
HIGH = 1500


@pytest.fixture
def high() -> Iterator[tuple[int, socket.socket]]:
    """Return a descriptor above 1,023, and the socket at its other end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= HIGH:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HIGH + 100, hard))
    ours, theirs = socket.socketpair()
    descriptor = fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, HIGH)
    with ours, theirs:
        try:
            yield descriptor, theirs
        finally:
            os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_high_descriptor_is_waited_for(high: tuple[int, socket.socket]) -> None:
    descriptor, theirs = high
    assert descriptor >= HIGH
    assert readable([descriptor], 0) == []
    theirs.sendall(b"x")
    assert readable([descriptor], 10) == [descriptor]


def test_the_end_of_the_other_side_is_noticed(high: tuple[int, socket.socket]) -> None:
    descriptor, theirs = high
    theirs.close()
    assert readable([descriptor], 10) == [descriptor]


def test_it_needs_no_descriptor_of_its_own() -> None:
    """A server that has used up its descriptors goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        spare = os.dup(ours.fileno())  # all below it are taken
        os.close(spare)
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.dup(ours.fileno())
            assert readable([ours], 10) == [ours]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_objects_are_returned_as_they_were_given() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        assert readable([ours, theirs], 10) == [ours]
        assert readable([], 0) == []


def test_nothing_that_is_shipped_calls_select() -> None:
    """A kind of fault, not a case: each such call fails only once a server is busy."""
    sources = [path for folder in SHIPPED for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(sources) > 500
    assert [str(path) for path in sources if "select.select(" in path.read_text(encoding="utf-8")] == []
