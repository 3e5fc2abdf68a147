"""Folders of sockets and tables: only our own, and only in the given place; sockets that connect once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.transport import dealer, prepare_runtime_dir


def test_a_runtime_folder_is_made_private(tmp_path: Path) -> None:
    prepare_runtime_dir(tmp_path / "a" / "run")
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    prepare_runtime_dir(tmp_path / "a" / "run")


@pytest.mark.parametrize("there", [True, False], ids=["to a folder", "to nothing"])
def test_a_symbolic_link_is_refused_by_name(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if there:
        target.mkdir(mode=0o700)
    link.symlink_to(target)
    with pytest.raises(InvalidConfiguration, match=f"{link} is a symbolic link, to {target}: name the folder itself"):
        prepare_runtime_dir(link)
    assert target.exists() == there


def test_a_folder_open_to_everyone_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path} is writable by everyone"):
        prepare_runtime_dir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path} belongs to another user \\(uid 12345\\)"):
        prepare_runtime_dir(tmp_path)


def test_a_file_in_its_place_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InvalidConfiguration, match="run cannot be used: File exists"):
        prepare_runtime_dir(tmp_path / "run")


SENDER = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.sndhwm, router.rcvtimeo = 0, 30_000
router.bind(sys.argv[1])
print("bound", flush=True)
name = router.recv_multipart()[0]
for _ in range(12_000):
    router.send_multipart([name, b"a", b"b"])
print("sent", flush=True)
sys.stdin.read()
"""
READER = """
import subprocess, sys, time, zmq
from kvforge.protocol import transport
transport.HEARTBEAT_INTERVAL_MS = 100
with subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
    socket = transport.dealer(zmq.Context(), immediate=False)
    sender.stdout.readline()
    socket.connect(sys.argv[2])
    socket.send(b"hello")
    sender.stdout.readline()
    while not socket.poll(0):
        pass
    time.sleep(0.3)  # ZeroMQ takes in what it does
    sender.kill()
time.sleep(0.3)  # and its heartbeats go on
while socket.poll(100):
    socket.recv_multipart()
print("alive")
"""


def test_a_peer_that_dies_does_not_take_one_with_it_that_does_not_read() -> None:
    """libzmq aborts the process when a heartbeat is due on a closed connection with a full queue."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        command = [sys.executable, "-c", READER, SENDER, f"ipc://{folder}/s"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_socket_makes_one_connection_and_no_other_by_itself() -> None:
    """A reconnecting socket would occupy a pending handshake at its peer again and again, without a message."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory(dir="/tmp") as folder:
        listener.bind(f"{folder}/s")
        listener.listen()
        listener.settimeout(60)
        with dealer(context) as ours:
            ours.connect(f"ipc://{folder}/s")
            listener.accept()[0].close()
            listener.settimeout(0.5)
            with pytest.raises(TimeoutError):
                listener.accept()
    context.term()
