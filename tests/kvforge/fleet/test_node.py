"""Foundations of the programs on a node: link, folder, port, and queue delay."""

from __future__ import annotations

import os
import socket
import stat
import time
import tomllib
from pathlib import Path

import pytest

from kvforge import SamplingParams
from kvforge.coordinator.config import CoordinatorConfig
from kvforge.fleet.messages import (
    READY,
    BeginOrder,
    DrainOrder,
    NodeStatus,
    Place,
    StopOrder,
    UseOrder,
    encode,
    node_status_of,
)
from kvforge.fleet.node.folder import LOCK, SWEPT_S, Folder, reserve
from kvforge.fleet.node.keeper_link import KeeperLink, pair
from kvforge.fleet.node.queue import WINDOW_S, QueueTime, begun_and_waited
from kvforge.fleet.node.replica import model_of, settings_of
from kvforge.fleet.settings import FleetFile, parse
from kvforge.protocol import keys
from kvforge.protocol.configuration import convert
from kvforge.protocol.errors import DeadlineExceeded, InternalError, InvalidConfiguration, Unavailable
from tools.cluster.cluster import Cluster

BEGIN = BeginOrder(name="a", address="127.0.0.1", text="", public="p")
LOCAL = "127.0.0.1"


def file_of(folder: Path, up: str = "") -> FleetFile:
    return parse(f'[replicas]\nfolder = "{folder}"\n[up]\nmodel = "m"\n{up}')


# --------------------------------------------------------------------------------------------------------------- link


def test_orders_that_come_with_the_first_are_not_lost() -> None:
    ours, theirs = pair()
    with ours:
        link = KeeperLink(theirs.detach())
        use = UseOrder(text="t", places={"b": Place(endpoint="tcp://x:1", server_key="k")})
        for order in (BEGIN, use, DrainOrder(deadline_s=1.0)):
            ours.send(encode(order))
        ours.send(b"what is this")
        ours.send(encode(StopOrder()))
        assert link.begin(1.0) == BEGIN
        assert link.orders() == [use, DrainOrder(deadline_s=1.0), StopOrder()] and link.orders() == []
        told = NodeStatus(phase=READY, place=use.places["b"], pids={"coordinator": 1})
        link.send_status(told)
        assert node_status_of(ours.recv(1 << 16)) == told
        for _ in range(100_000):
            link.send_status(told)  # there is no listener, and it does not wait
        link.close()


def test_a_keeper_that_says_nothing_is_not_waited_for() -> None:
    ours, theirs = pair()
    with ours:
        link = KeeperLink(theirs.detach())
        with pytest.raises(DeadlineExceeded):
            link.begin(0.01)
        ours.send(encode(StopOrder()))
        with pytest.raises(DeadlineExceeded):
            link.begin(0.01)
        link.close()
    with pytest.raises(InternalError, match="bytes"):
        encode(NodeStatus(phase=READY, reason="x" * (1 << 18)))


# ------------------------------------------------------------------------------------------------------------- folder


def test_a_folder_is_one_programs_and_keeps_its_key_and_port_until_it_is_removed(tmp_path: Path) -> None:
    file = file_of(tmp_path / "nodes")
    first = Folder(file, "a")
    first.claim()
    pair_, port = first.keys(), first.port
    assert port == 0
    first.keep_port(7)
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((first.path / "own.key").stat().st_mode) == 0o600
    second = Folder(file, "a")
    with pytest.raises(Unavailable, match="another program still uses"):
        second.claim()
    first.close()
    second.claim()
    assert second.keys() == pair_ and second.port == 7
    other = Folder(file, "b")
    other.claim()
    second.remove()
    assert not second.path.exists() and other.path.exists()
    other.put_keys("p" * 40, "s" * 40)
    other.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_lost_node_left_is_swept_and_what_is_used_is_not(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    used, left, fresh = (Folder(file, name) for name in ("used", "left", "fresh"))
    long_ago = time.time() - SWEPT_S - 1
    for folder in (used, left, fresh):
        folder.claim()
        if folder is not fresh:
            os.utime(folder.path / LOCK, (long_ago, long_ago))
    left.close()
    fresh.close()
    Folder(file, "new").claim()
    assert used.path.exists() and fresh.path.exists() and not left.path.exists()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfiguration, match=r"replicas\.folder"):
        Folder(file_of(tmp_path / "file"), "a").claim()


def test_a_port_is_kept_for_the_coordinator_and_given_to_nobody_else() -> None:
    held, port = reserve(LOCAL, 0)
    with held:
        with socket.create_server((LOCAL, port)) as coordinator:  # with SO_REUSEADDR, as the coordinator binds
            other, another = reserve(LOCAL, port)
            other.close()
            assert another != port, "the port is in use"
            with socket.create_connection(coordinator.getsockname()):
                pass
        with socket.create_server((LOCAL, port)):
            pass
    again, same = reserve(LOCAL, port)
    again.close()
    assert same == port


# -------------------------------------------------------------------------------------------------------- what it runs


def test_a_replica_is_reached_over_the_network_by_the_gateways_alone(tmp_path: Path) -> None:
    up = '[up.limits]\nqueue_max = 9\n[up.access.clients.ada]\nuser = "0"\ntenant = "a"\nrights = ["read"]\n'
    file = file_of(tmp_path, f"tensor_parallel = 2\n{up}[up.worker]\nload_format = 'dummy'\n")
    folder = Folder(file, "a")
    folder.claim()
    folder.keys()
    public = keys.make().public
    settings = settings_of(file, folder, Path("/m"), "tcp://127.0.0.1:7", public)
    config = convert(tomllib.loads(settings.coordinator_file()), CoordinatorConfig)
    assert config.tcp.listen == "tcp://127.0.0.1:7" and config.tcp.key_file == str(folder.path / "own.key")
    assert config.limits.queue_max == 9 and set(config.access.clients) == {"ada", "fleet-gateways"}
    ours = config.access.clients["fleet-gateways"]
    assert (ours.key, ours.tenant, ours.rights) == (public, "*", ("submit", "read"))
    worker = tomllib.loads(settings.worker_file(1))
    assert (worker["ranks"], worker["rank"], worker["load_format"]) == (2, 1, "dummy")
    shape = parse('[up]\nmodel_config = "llama-3.1-8b"\n')
    assert model_of(shape) == Path("llama-3.1-8b")
    assert settings_of(shape, folder, model_of(shape), "tcp://h:1", public).worker == {"load_format": "dummy"}
    folder.remove()


# -------------------------------------------------------------------------------------------------------- how they wait


def test_the_wait_is_that_of_those_that_began_within_the_window() -> None:
    queue = QueueTime()
    assert queue.look(0.0, 10, 50_000_000, 0) == 0.0, "earlier waits must not count"
    assert queue.look(1.0, 12, 56_000_000, 0) == 3.0
    assert queue.look(5.0, 16, 58_000_000, 0) == pytest.approx(8 / 6)
    assert queue.look(WINDOW_S + 1.0, 16, 58_000_000, 0) == 0.5, "the first ones are over"
    assert queue.look(WINDOW_S + 5.0, 16, 58_000_000, 0) == 0.0


def test_where_nobody_begins_the_wait_is_as_long_as_that_lasts() -> None:
    queue = QueueTime()
    assert queue.look(0.0, 0, 0, 3) == 0.0
    assert queue.look(4.0, 0, 0, 3) == 4.0
    assert queue.look(5.0, 1, 4_500_000, 2) == 4.5, "one has begun"
    assert queue.look(7.0, 1, 4_500_000, 2) == 4.5
    assert queue.look(30.0, 1, 4_500_000, 2) == 25.0
    assert queue.look(31.0, 1, 4_500_000, 0) == 0.0
    assert queue.look(32.0, 0, 0, 0) == 0.0, "a coordinator that counts anew"
    assert queue.look(33.0, 1, 2_000_000, 0) == 2.0


def test_a_real_coordinator_counts_what_is_looked_at() -> None:
    """One slot and three requests: all begin, and two have waited."""
    with Cluster(coordinator="[limits]\nsequences_max = 1\n") as cluster:
        kv = cluster.start("w0")
        assert begun_and_waited(kv.tables().metrics()) == (0, 0)
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        requests = [kv.submit([1, 2, 3 + at], max_tokens=60, sampling=greedy) for at in range(3)]
        next(iter(requests[0]))
        assert begun_and_waited(kv.tables().metrics())[0] < 3 and kv.stats().requests.pending
        results = [request.result(60.0) for request in requests]
        begun, waited_us = begun_and_waited(kv.tables().metrics())
        assert begun == 3
        assert waited_us >= sum(result.timings.queue_us for result in results[1:]) > 0
