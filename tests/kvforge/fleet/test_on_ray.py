"""A fleet in a Ray cluster on this machine: every part is killed under load, and no token is lost or changed."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvforge.fleet.messages import READY, Status

from .load import TOKENS, Load, body, streamed
from .raylets import RayCluster
from .story import DEADLINE_S, FLEET, Story, kill

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray, the extra `ray`")
LONG = 500
HERE = str(Path(__file__).parents[3])


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as path:
        yield Path(path)


def test_every_part_of_a_fleet_is_killed_under_load_and_nothing_is_lost(folder: Path) -> None:
    with RayCluster(folder, 5, 5) as cluster:
        story = Story(folder, cluster)
        asyncio.run(told(story))
        assert not (folder / "nodes").exists(), "leftover files of the fleet"
        # The checkout with its environment may be in a folder named kvforge.
        lines = {pid: line.replace(sys.prefix, "").replace(HERE, "") for pid, line in cluster.processes().items()}
        left = {pid: line for pid, line in lines.items() if "kvforge" in line and "raylets" not in line}
        assert not left


async def told(story: Story) -> None:
    """Run the whole sequence: each part is killed, then the fleet shrinks, changes, fails to change, and ends."""
    with pytest.raises(AssertionError, match="the cluster has no node with 1 GPU and 2 CPUs for a replica"):
        story.cluster.ask("up", story.write(replicas="rank_gpus = 1"))
    story.cluster.ask("up", story.write())
    await story.until(lambda status: status.serves)
    load = Load(story.urls, clients=4)
    async with load:
        story.note(load, "all serve")
        await what_dies_is_replaced(story, load)
        await a_node_dies(story, load)
        again = load.counts["again"]
        await it_shrinks(story)
        story.note(load, "two replicas have left")
        await it_changes(story, load)
        assert load.counts["again"] == again, "no request has failed since"
        await its_gateways_change(story, load)
        await the_heads_raylet_dies(story, load)
    assert not load.faults, load.faults
    assert load.counts["tokens"] == TOKENS * load.counts["done"]
    nothing_secret_is_logged(story)
    await story.command("down", "--name", FLEET)


async def what_dies_is_replaced(story: Story, load: Load) -> None:
    """Kill parts of four replicas and gateways, and the controller, some while others are still down."""
    await load.more(4)
    victim = story.ready()[0]
    kill(victim.status.pids["coordinator"], victim.status.pids["worker-0"])
    await load.more(4)
    story.note(load, "the processes of a replica were killed")

    before = story.status.pid
    kill(before)
    await load.more(4)
    await story.until(lambda status: status.pid != before and status.serves)
    story.note(load, "the controller was killed, and both are back")
    assert not load.counts["again"], "no client has noticed"

    gateway = story.status.gateways[0]
    kill(gateway.status.pids["gateway"])
    await load.more(4)
    story.note(load, "the process of a gateway was killed")

    killed = story.ready()[1], gateway
    kill(*(one.status.pids["keeper"] for one in killed))
    await load.more(4)
    lives = {one.status.life for one in killed}
    await story.until(lambda status: status.serves and not lives & lives_of(status))
    assert {one.name for one in killed} <= {one.name for one in (*story.status.replicas, *story.status.gateways)}
    story.note(load, "the actors of a replica and of a gateway were killed, and are back")


async def a_node_dies(story: Story, load: Load) -> None:
    """Kill a node; its members are placed elsewhere, as far as there is room."""
    nodes = {one.status.node for one in story.status.replicas}
    assert len(nodes) == 2, "5 cores hold two replicas of two cores"
    lost = story.status.replicas[0].status.node
    story.cluster.ask("kill_node", lost)
    await load.more(4)
    await story.until(lambda status: any("no node has 2 CPUs free" in words for words in status.sentences))
    story.cluster.ask("add_node", 5)
    await story.until(lambda status: status.serves)
    assert lost not in {one.status.node for one in (*story.status.replicas, *story.status.gateways)}
    story.note(load, "the raylet of a node was killed, and all serve elsewhere")


async def it_shrinks(story: Story) -> None:
    """Shrink the fleet with long requests on every replica: leaving replicas finish them first."""
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        url, begun = story.urls()[0], asyncio.Event()

        async def long(case: int) -> list[int]:
            tokens: list[int] = []
            async for more in streamed(http, url, body(case, LONG)):
                tokens += more
                begun.set()
            return tokens

        undisturbed = await asyncio.gather(long(0), long(1))
        begun.clear()
        running = [asyncio.create_task(long(at % 2)) for at in range(6)]
        await begun.wait()
        story.cluster.ask("scale", FLEET, 1)
        await story.until(lambda status: status.serves and status.count == 1)
        assert await asyncio.gather(*running) == [*undisturbed] * 3


async def it_changes(story: Story, load: Load) -> None:
    """A replica of another revision replaces the current one, unless it cannot start."""
    (before,) = story.status.replicas
    await story.command("up", story.write(count=3, limits="queue_max = 999"))
    await story.until(lambda status: status.serves)
    assert len(story.status.replicas) == 1, "the configured number must stay"
    assert before.revision != story.status.replicas[0].revision == story.status.revision
    await load.more(4)
    story.note(load, "another revision has taken its place")

    good = story.status.replicas
    story.cluster.ask("up", story.write(limits="queue_max = 999", worker='kernels = "nonsense"'))
    stands = "the update is stopped, and the old replicas go on"
    await story.until(lambda status: stands in status.sentences)
    assert [(one.name, one.status.phase) for one in story.status.replicas if one.name == good[0].name] == [
        (good[0].name, READY)
    ]
    assert any(
        "cannot start: worker-0 cannot serve (exit status 2): kernels" in said for said in story.status.sentences
    )
    await load.more(4)
    story.cluster.ask("up", story.write(limits="queue_max = 999"))
    await story.until(lambda status: status.serves)
    assert [one.name for one in story.status.replicas] == [good[0].name]
    story.note(load, "a revision that cannot start has changed nothing")


async def its_gateways_change(story: Story, load: Load) -> None:
    """Gateways take new settings in place, at their ports."""
    urls = story.urls()
    story.cluster.ask("up", story.write(limits="queue_max = 999", names='["tiny", "small"]'))
    async with asyncio.timeout(DEADLINE_S):
        for url in urls:
            while "small" not in await names_at(url):
                await asyncio.sleep(0.1)
    await load.more(4)
    await story.until(lambda status: status.serves)
    assert story.urls() == urls
    story.note(load, "the gateways have other settings")


async def names_at(url: str) -> list[str]:
    """Query by a new connection, because a kept one ends with its process; none while it is replaced."""
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http:
        try:
            return [model["id"] for model in (await http.get(f"{url}/v1/models")).json()["data"]]
        except httpx.TransportError:
            return []


async def the_heads_raylet_dies(story: Story, load: Load) -> None:
    """Kill the head's raylet: the node has no replica or gateway, perhaps the controller, which must still answer."""
    again = load.counts["again"]
    kill(story.cluster.ask("raylet_of_head"))
    await load.more(8)
    await story.until(lambda status: status.serves)
    assert "1 of 1 replicas" in await story.command("status", "--name", FLEET)
    await load.more(4)
    assert load.counts["again"] == again
    story.note(load, "the raylet of the head was killed")


def nothing_secret_is_logged(story: Story) -> None:
    """Also not in Ray's logs, which collect all output."""
    keys = list(story.folder.glob("nodes/*/*/own.key"))
    secrets = {str(tomllib.loads(key.read_text())["secret"]) for key in keys}
    assert len(keys) == 3 and len(secrets) == 2, "a replica's own, and one for both gateways"
    logs = [path for path in story.cluster.ray.glob("session_*/logs/**/*") if path.is_file()]
    assert any("serving clients listed in [access]" in path.read_text(errors="replace") for path in logs)
    assert not [path for path in logs if any(secret in path.read_text(errors="replace") for secret in secrets)]


def lives_of(status: Status) -> set[str]:
    return {one.status.life for one in (*status.replicas, *status.gateways)}
