"""Messages that a client or worker receives from a coordinator killed while sending."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

MESSAGES = 500
READER = """
import sys, zmq
from kvforge.protocol.transport import dealer
socket = dealer(zmq.Context(), immediate=False)
socket.connect(sys.argv[1])
socket.send(b"hello")
print("up", flush=True)
sys.stdin.readline()
count = 0
while socket.poll(1000):
    assert len(socket.recv_multipart()) == 2
    count += 1
print(count, flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as made:
        yield Path(made)


def test_what_was_said_before_it_died_is_read_to_its_end(folder: Path) -> None:
    """libzmq discarded these messages, and aborted the reader between two parts of a message."""
    endpoint = f"ipc://{folder}/s"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(endpoint)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert reader.stdout is not None and reader.stdin is not None
        assert reader.stdout.readline() == "up\n"
        identity, _ = router.recv_multipart()
        for _ in range(MESSAGES):
            router.send_multipart([identity, b"body", b"arrays"])
        router.send_multipart([identity, b"the", b"last"])
        router.close(linger=2000)
        context.term()
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == f"{MESSAGES + 1}\n"
        assert reader.wait(30) == 0
    finally:
        reader.kill()
        reader.communicate()
