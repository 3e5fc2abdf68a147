"""Processes on one port: limits of connections, keys read anew, children that are killed, wrong settings."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvforge.gateway.serve.main import main
from tests.gateway.served import Gateway
from tools.cluster.fork_server import SERVICES, fork_server

pytestmark = pytest.mark.model  # the tests need its tokenizer

WAIT_S = 30.0
BASE = 'tokenizer = "smollm2-135m"\nnames = ["m"]\n'
ASKED = {"prompt": [1, 2, 3], "max_tokens": 4}


@contextmanager
def making_tokens_up(pace: int) -> Iterator[Path]:
    """Yield the folder of a coordinator that invents tokens. pace: tokens a second of each request; 0: all at once."""
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        arguments = ["--endpoint", f"ipc://{folder}/clients.sock", "--pace", str(pace)]
        process, output = fork_server(SERVICES).start_piped(
            arguments, Path(os.devnull), {**os.environ}, "kvforge.loadtest.drive.null_server"
        )
        try:
            assert output.readline()
            yield Path(folder)
        finally:
            process.terminate()
            process.wait(WAIT_S)
            output.close()


@pytest.fixture(scope="module")
def runtime(smollm2_path: Path) -> Iterator[Path]:
    with making_tokens_up(100) as folder:
        yield folder


def until(what: Callable[[], bool]) -> bool:
    """Return whether the condition became true within the time limit."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def children(pid: int) -> set[int]:
    """Return the child processes of a process."""
    return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_limits_of_a_connection(runtime: Path, tmp_path: Path) -> None:
    settings = f"{BASE}head_bytes_max = 4096\nbody_bytes_max = 4096\nhead_s = 0.5\nbody_s = 0.5\n"
    with Gateway(runtime, tmp_path, settings) as gateway:
        large = httpx.get(f"{gateway.url}/v1/models", headers={"x": "a" * 5000})
        assert large.status_code == 431
        with socket.create_connection(("127.0.0.1", gateway.port)) as growing:
            growing.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 5000)
            assert growing.recv(100).startswith(b"HTTP/1.1 431")
        body = httpx.post(f"{gateway.url}/v1/completions", content=b"x" * 5000)
        assert (body.status_code, body.json()["error"]["param"]) == (413, "body")
        parts = httpx.post(f"{gateway.url}/v1/completions", content=(b"x" * 100 for _ in range(60)))
        assert parts.status_code == 413
        with socket.create_connection(("127.0.0.1", gateway.port)) as slow:
            slow.settimeout(WAIT_S)
            slow.sendall(b"GET / HTTP/1.1\r\n")
            assert hung_up(slow)
        with socket.create_connection(("127.0.0.1", gateway.port)) as slow:
            slow.settimeout(WAIT_S)
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n[")
            assert slow.recv(100).startswith(b"HTTP/1.1 408")
        assert httpx.post(f"{gateway.url}/v1/completions", json=ASKED).status_code == 200


def test_who_does_not_read_is_given_up(smollm2_path: Path, tmp_path: Path) -> None:
    with making_tokens_up(0) as runtime, Gateway(runtime, tmp_path, f"{BASE}write_s = 1.0\n") as gateway:
        content = b'{"prompt":[1],"max_tokens":200000,"logprobs":0,"stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(content)
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect(("127.0.0.1", gateway.port))
            deaf.sendall(head + content)
            deaf.recv(100)
            assert until(lambda: not connected(gateway, deaf)), "it was not given up, though it reads nothing"
        assert httpx.post(f"{gateway.url}/v1/completions", json=ASKED).status_code == 200


def hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def connected(gateway: Gateway, connection: socket.socket) -> bool:
    """Return whether the kernel's table still lists this connection of the gateway."""
    mine = f":{connection.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].endswith(mine) and row[1].endswith(f":{gateway.port:04X}") and row[3] == "01" for row in rows)


def test_a_killed_child_is_replaced_and_the_port_stays_open(runtime: Path, tmp_path: Path) -> None:
    with Gateway(runtime, tmp_path, f"{BASE}processes = 2\n") as gateway:
        assert until(lambda: len(children(gateway.process.pid)) == 2)
        before = children(gateway.process.pid)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        # No process answers at this moment; requests wait.
        asked = httpx.post(f"{gateway.url}/v1/completions", json=ASKED, timeout=WAIT_S)
        assert asked.status_code in (200, 503)
        assert until(gateway.ready)
        assert len(children(gateway.process.pid)) == 2 and not before & children(gateway.process.pid)
        several = children(gateway.process.pid)
        os.kill(gateway.process.pid, signal.SIGKILL)
        assert until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in several)), "children outlived it"
        gateway.kill()
        gateway.start(0)


def test_systemd_hears_from_the_process_above_several(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd started and would stop this process; it does not watch the children."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(tmp_path / "notify"))
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        ear.settimeout(WAIT_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        with Gateway(runtime, tmp_path, f"{BASE}processes = 2\n") as gateway:
            heard: set[str] = set()
            deadline = time.monotonic() + WAIT_S
            while not heard >= {"READY=1", "WATCHDOG=1"}:
                assert time.monotonic() < deadline, f"heard {heard}"
                words, ancillary, _, _ = ear.recvmsg(256, socket.CMSG_SPACE(12))
                pid = struct.unpack("3i", ancillary[0][2])[0]
                if pid == gateway.process.pid:
                    heard.add(words.decode())


def test_keys_are_read_again(runtime: Path, tmp_path: Path) -> None:
    def key(secret: str) -> str:
        return f'{BASE}[keys.ada]\nhash = "sha256:{hashlib.sha256(secret.encode()).hexdigest()}"\n'

    with Gateway(runtime, tmp_path, key("old")) as gateway:

        def status(secret: str) -> int:
            headers = {"authorization": f"Bearer {secret}"}
            return httpx.post(f"{gateway.url}/v1/completions", json=ASKED, headers=headers).status_code

        assert (status("old"), status("new")) == (200, 401)
        (tmp_path / "gateway.toml").write_text(key("new"))
        gateway.process.send_signal(signal.SIGHUP)
        assert until(lambda: status("new") == 200)
        assert status("old") == 401
        (tmp_path / "gateway.toml").write_text("[keys.ada]\nhash = 1\n")
        gateway.process.send_signal(signal.SIGHUP)
        assert until(lambda: "the old keys and replicas stay in use" in (tmp_path / "gateway.log").read_text())
        assert status("new") == 200


def test_streams_may_end_when_it_is_told_to(runtime: Path, tmp_path: Path) -> None:
    with Gateway(runtime, tmp_path, BASE) as gateway:
        asked = {**ASKED, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/completions", json=asked, timeout=WAIT_S) as stream:
            lines = stream.iter_lines()
            next(lines)
            gateway.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert gateway.process.wait(WAIT_S) == 0
        gateway.start(0)


def refused(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvforge.gateway", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def test_what_settings_mean_is_said_without_serving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('runtime_dir = "/run/kvforge"\nhost = "::1"\nport = 8080\nprocesses = 2\n')
    assert main(["--config", str(file), "--check"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "runtime_dir": "/run/kvforge",
        "coordinator": "ipc:///run/kvforge/clients.sock",
        "address": "http://[::1]:8080",
        "processes": 2,
        "keys": 0,
    }


def test_what_the_settings_name_is_looked_at_before_anything_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.toml"
    template = tmp_path / "template.jinja"
    template.write_text("{% generation %}{% endgeneration %}\n{% for message in messages %}")
    for setting, problem in (
        ('chat_template = "/none"', "chat_template: cannot read /none"),
        (f'chat_template = "{template}"', f"chat_template: {template}, line 2: Unexpected end of template"),
        ('tool_format = "json"', "tool_format: is 'json'; it must be one of plain,"),
        ('endpoint = "http://elsewhere"', "endpoint: 'http://elsewhere' is not tcp://HOST:PORT"),
        ('endpoint = "tcp://elsewhere:5570"', "server_key: "),
    ):
        file.write_text(setting)
        assert main(["--config", str(file)]) == 2
        assert problem in capsys.readouterr().err


def test_what_cannot_work_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text("prot = 1\n")
    assert refused("--config", str(file)) == (2, "gateway: prot: there is no such setting; did you mean port?\n")
    assert refused("--config", str(tmp_path / "none"))[0] == 2
    status, said = refused("--host", "0.0.0.0")  # noqa: S104
    assert status == 2 and "kvforge keys api" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = refused("--port", str(taken.getsockname()[1]))
        assert status == 3 and "cannot listen at" in said
    assert refused("--host", "no.such.host.invalid")[0] == 2
