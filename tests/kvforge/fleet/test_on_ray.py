"""A fleet in a Ray cluster on this machine, whose every part is killed under load: nothing is lost, nothing changes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from kvforge.fleet.told import READY, Seen, Status
from tests.chaos import tokenizer
from tests.integration.running import tiny_model

from .load import TOKENS, Load
from .raylets import RayCluster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'kvforge[ray]'")
DEADLINE_S = 50.0
LONG = 1200
FLEET = "tested"


class Story:
    """A fleet, a cluster of two nodes with 5 cores each, and who asks the fleet."""

    def __init__(self, folder: Path, cluster: RayCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.model = tiny_model(folder)
        tokenizer.write(self.model)
        self.file = folder / "fleet.toml"
        self.status = Status(fleet=FLEET)

    def write(self, *, count: int = 3, replicas: str = "", worker: str = "", limits: str = "") -> str:
        """The file; returns its name."""
        self.file.write_text(
            f'name = "{FLEET}"\n[replicas]\ncount = {count}\nfolder = "{self.folder}/nodes"\n{replicas}\n'
            f'[gateways]\ncount = 2\nport = 0\n[gateway]\nnames = ["tiny"]\nfailover_s = 1.0\n'
            f'[up]\nmodel = "{self.model}"\nthreads = 1\nstop_s = 5.0\n[up.limits]\n{limits}\n'
            f'[up.worker]\nload_format = "dummy"\ndevice = "cpu"\ndtype = "float32"\nblocks = 512\n{worker}\n'
        )
        return str(self.file)

    def urls(self) -> list[str]:
        """Of gateways that serve, as far as is known."""
        return [one.told.url for one in self.status.gateways if one.told.url] or self._last

    async def until(self, wanted: Callable[[Status], bool]) -> Status:
        """Looks until it is so."""
        deadline = monotonic() + DEADLINE_S
        while True:
            self.status = await asyncio.to_thread(self.cluster.status, FLEET)
            self._last = [one.told.url for one in self.status.gateways if one.told.url] or getattr(self, "_last", [])
            if wanted(self.status):
                return self.status
            assert monotonic() < deadline, self.status
            await asyncio.sleep(0.1)

    def ready(self) -> list[Seen]:
        """Replicas that serve."""
        return [one for one in self.status.replicas if one.told.phase == READY]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        yield Path(path)


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_every_part_of_a_fleet_is_killed_under_load_and_nothing_is_lost(folder: Path) -> None:
    with RayCluster(folder, 5, 5) as cluster:
        story = Story(folder, cluster)
        asyncio.run(told(story))
        assert not (folder / "nodes").exists(), "nothing is left of it"
        left = {pid: line for pid, line in cluster.processes().items() if "kvforge" in line and "raylets" not in line}
        assert not left


async def told(story: Story) -> None:
    cluster = story.cluster
    began = monotonic()

    def note(what: str) -> None:
        print(f"{monotonic() - began:6.1f} s  {what}; {dict(load.counts)}")

    cluster.ask("up", story.write())
    await story.until(lambda status: status.serves)
    load = Load(story.urls, clients=8)
    async with load:
        await load.more(8)
        note("all serve")

        victim = story.ready()[0]
        kill(victim.told.pids["coordinator"], victim.told.pids["worker-0"])
        await load.more(8)
        note("the processes of a replica were killed")

        before = story.status.pid
        kill(before)
        await load.more(8)
        await story.until(lambda status: status.pid != before and status.serves)
        note("the controller was killed, and both are back")

        gateway = story.status.gateways[0]
        kill(gateway.told.pids["gateway"])
        await load.more(8)
        note("the process of a gateway was killed")

        victim = story.ready()[0]
        kill(victim.told.pids["keeper"])
        await load.more(8)
        await story.until(
            lambda status: status.serves and victim.told.life not in [s.told.life for s in status.replicas]
        )
        note("the actor of a replica was killed, and it is back")
        again = load.counts["again"]

        gateway = story.status.gateways[0]
        kill(gateway.told.pids["keeper"])
        await load.more(8)
        await story.until(
            lambda status: status.serves and gateway.told.life not in [s.told.life for s in status.gateways]
        )
        note("the actor of a gateway was killed, and it is back")

        nodes = {one.told.node for one in story.status.replicas}
        assert len(nodes) == 2, "5 cores hold two replicas of two cores"
        lost = story.status.replicas[0].told.node
        cluster.ask("kill_node", lost)
        await load.more(8)
        await story.until(lambda status: any("no node has 2 CPUs free" in words for words in status.sentences))
        cluster.ask("add_node", 5)
        await story.until(lambda status: status.serves)
        assert lost not in {one.told.node for one in (*story.status.replicas, *story.status.gateways)}
        note("the raylet of a node was killed, and all serve elsewhere")

    assert not load.faults, load.faults
    print(f"{dict(load.counts)}; asked again before a gateway's actor was killed: {again}")
    assert load.counts["tokens"] == TOKENS * load.counts["done"]
    cluster.ask("down", FLEET)
    await story.until(lambda status: status.ended and not status.replicas and not status.gateways)
    cluster.ask("close", FLEET)
