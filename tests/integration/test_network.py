"""Over a network: a coordinator, a worker and clients as processes that know each other by their keys."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from kvforge import Client, Sampling
from kvforge.protocol import keys
from kvforge.protocol.errors import (
    CoordinatorUnavailable,
    InvalidRequest,
    NotAllowed,
    RequestNotFound,
    SequenceNotFound,
)
from tools.cluster.cluster import END_S, READY_S, Cluster

LISTEN = 'listen = "tcp://127.0.0.1:0"\nlisten_workers = "tcp://127.0.0.1:0"\n'


def kvforge(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvforge", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=END_S, check=False, env={**os.environ, **environment}
    )


class Network(Cluster):
    """A cluster that listens on a network too, with keys that `kvforge keys` made."""

    def __init__(self) -> None:
        super().__init__()
        made = [kvforge("keys", whose, str(self.key(name))) for whose, name in (
            ("server", "server"), ("client", "alice"), ("client", "bob"), ("client", "mallory"), ("worker", "w0")
        )]  # fmt: skip
        assert [done.returncode for done in made] == [0] * 5, [done.stderr for done in made]
        self.server_key = keys.read(self.key("server")).public
        server, alice, bob, _, worker = (done.stdout for done in made)
        server = re.sub(r"listen = .*\n", LISTEN, server)
        self._coordinator_extra = server + alice + bob + worker

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def listening(self, who: str) -> str:
        """Where the coordinator says that it serves them on the network."""
        deadline = monotonic() + READY_S
        while (
            found := re.search(rf"serving {who} that \[access\] names at (tcp://\S+)", self.log("coordinator"))
        ) is None:
            assert monotonic() < deadline, self.log("coordinator")
            select.select([], [], [], 0.05)
        return found[1]

    def connect(self, name: str = "alice", server_key: str = "", connect_s: float = READY_S) -> Client:
        """A client over the network."""
        return self._stack.enter_context(
            Client(
                self.listening("clients"),
                timeout_s=READY_S,
                connect_timeout_s=connect_s,
                server_key=server_key or self.server_key,
                key_file=self.key(name),
            )
        )


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


def test_a_worker_and_a_client_with_keys_serve_and_are_served(network: Network) -> None:
    network.start_coordinator()
    endpoint = network.listening("workers")
    network.start_worker(
        "w0", f'endpoint = "{endpoint}"\nserver_key = "{network.server_key}"\nkey_file = "{network.key("w0")}"\n'
    )
    kv = network.connect()
    kv.wait_ready(READY_S)
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    over_network = kv.submit([5, 6, 7], max_tokens=20, sampling=sampling).result().tokens
    local = network.client().submit([5, 6, 7], max_tokens=20, sampling=sampling).result().tokens
    assert len(over_network) == 20
    assert list(over_network) == list(local)
    done = kvforge(
        "health",
        "--ready",
        KVFORGE_ENDPOINT=network.listening("clients"),
        KVFORGE_SERVER_KEY=network.server_key,
        KVFORGE_KEY_FILE=str(network.key("alice")),
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr


def peak_bytes(network: Network) -> int:
    """The most memory that the coordinator has had."""
    status = Path(f"/proc/{network.pid('coordinator')}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def test_a_request_that_is_too_large_is_refused_by_size_and_the_connection_goes_on(network: Network) -> None:
    network.start_coordinator()
    local, remote = network.client(), network.connect()
    before = peak_bytes(network)
    for kv, tokens, words in (
        (local, 12 << 20, "limits.message_bytes_max is 16777216"),
        (remote, 12 << 20, "an encrypted connection takes at most 8388608"),
        (remote, 3 << 20, "an encrypted connection takes at most 8388608"),
    ):
        with pytest.raises(InvalidRequest, match=words) as raised:
            kv.create_sequence(np.full(tokens, 3, np.int32))
        assert 4 * tokens < raised.value.fields["size"] < 4 * tokens + 200
        assert kv.health().live
    assert peak_bytes(network) - before < 24 << 20  # of the 48 MB of one
    assert "dropped" not in network.log("coordinator")


def test_a_key_that_is_not_in_the_list_is_refused_by_name(network: Network) -> None:
    network.start_coordinator()
    mallory = keys.read(network.key("mallory")).public
    with pytest.raises(NotAllowed, match=re.escape(f"does not know the key '{mallory}'")) as raised:
        network.connect("mallory").health()
    assert raised.value.right == "connect"
    assert network.connect().health().live
    assert f"its key '{mallory}' is not in the allow-list" in network.log("coordinator")


def test_each_key_sees_its_own_tenant(network: Network) -> None:
    network.start_coordinator()
    alice, bob, local = network.connect("alice"), network.connect("bob"), network.client()
    request, sequence = alice.submit([1, 2, 3], detached=True), alice.create_sequence([1, 2])
    assert alice.status(request.id).tenant == alice.info(sequence).tenant == "alice"
    for other in (bob.status, bob.cancel, bob.attach):
        with pytest.raises(RequestNotFound):
            other(request.id)
    with pytest.raises(SequenceNotFound):
        bob.tokens(sequence)
    assert bob.requests().total == 0
    for client in (alice, bob):
        with pytest.raises(NotAllowed, match="'admin'"):
            client.drain()
    assert [row.request_id for row in local.requests().requests] == [request.id]
    local.cancel(request.id)
    assert alice.status(request.id).state == "cancelled"


def test_who_takes_another_key_for_the_servers_is_told_to_look_at_it(network: Network) -> None:
    network.start_coordinator()
    stranger = keys.read(network.key("mallory")).public
    with pytest.raises(CoordinatorUnavailable, match="is the server key its own"):
        network.connect(server_key=stranger, connect_s=1.0).health()


def test_a_key_that_was_taken_from_the_list_is_refused_from_the_next_start_on(network: Network) -> None:
    network.start_coordinator()
    assert network.connect().health().live
    network.kill("coordinator")
    alice, mallory = (keys.read(network.key(name)).public for name in ("alice", "mallory"))
    network._coordinator_extra = network._coordinator_extra.replace(alice, mallory)
    (network.folder / "coordinator.log").unlink()
    network.start_coordinator()
    with pytest.raises(NotAllowed):
        network.connect().health()
    assert network.connect("mallory").health().live


def test_a_list_that_is_read_again_ends_the_connections_of_whom_it_no_longer_names(network: Network) -> None:
    network.start_coordinator()
    alice, bob = network.connect(), network.connect("bob")
    sequence = bob.create_sequence([1, 2, 3])
    assert alice.health().live
    listed = network.folder / "coordinator.toml"
    before = listed.read_text()

    def read_again(text: str, said: str) -> None:
        listed.write_text(text)
        network.signal("coordinator", signal.SIGHUP)
        deadline = monotonic() + END_S
        while said not in network.log("coordinator"):
            assert monotonic() < deadline, network.log("coordinator")
            select.select([], [], [], 0.02)

    read_again(before.replace("rights", "right"), "[access] stays as it was: the configuration cannot be read again")
    assert "there is no such setting" in network.log("coordinator")
    assert alice.health().live
    own, others = (keys.read(network.key(name)).public for name in ("alice", "mallory"))
    read_again(before.replace(own, others), "[access] was read again: 2 clients, 1 workers")
    with pytest.raises(NotAllowed, match="does not know the key"):
        alice.health()
    assert network.connect("mallory").health().live
    assert bob.tokens(sequence) == (1, 2, 3), "of whom the list says the same nobody noticed"
    assert "its key is not in [access] any more" in network.log("coordinator")


def test_a_worker_whose_key_is_not_in_the_list_ends_and_says_why(network: Network) -> None:
    network.start_coordinator()
    endpoint = network.listening("workers")
    for name in ("alice", "mallory"):  # the key of a client is none of a worker
        network.start_worker(
            name, f'endpoint = "{endpoint}"\nserver_key = "{network.server_key}"\nkey_file = "{network.key(name)}"\n'
        )
        assert network.end(name) == 3
        assert "does not know the key" in network.log(name)
    assert network.client().health().workers == ()


def test_a_key_file_that_others_can_read_stops_the_start(network: Network) -> None:
    network.key("server").chmod(0o644)
    network.start_coordinator()
    assert network.end("coordinator") == 2
    assert "tcp.key_file" in network.log("coordinator")
    assert "has mode 0644" in network.log("coordinator")
