"""Clients of each kind survive repeated coordinator crashes and cut connections; each command runs exactly once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from kvforge import AsyncClient, Client, SamplingParams
from tests.integration.cable import Cable
from tools.cluster.cluster import Cluster

DEADLINE_S = 60.0
TASKS, APPENDS, KILLS = 8, 120, 3
TOKENS = 400


def restart(cluster: Cluster) -> None:
    cluster.kill("coordinator")
    cluster.start_coordinator()


def test_what_many_tasks_ask_meanwhile_is_done_once() -> None:
    """Sequences show it, because they would contain a repeated or lost append."""
    done = 0

    async def append(kv: AsyncClient, number: int) -> None:
        nonlocal done
        sequence = await kv.create_sequence([number])
        for token in range(APPENDS):
            assert await kv.append(sequence, [token]) == (token + 2,)
            done += 1
        assert await kv.tokens(sequence) == (number, *range(APPENDS))

    async def submit(kv: AsyncClient) -> list[int]:
        ids = []
        for _ in range(APPENDS // 4):
            request = await kv.submit([1, 2, 3], max_tokens=2, sampling=SamplingParams(temperature=0))
            ids.append(request.id)
            assert len((await request.result()).tokens) == 2
        return ids

    async def main(cluster: Cluster) -> None:
        async with AsyncClient(cluster.endpoint, timeout_s=DEADLINE_S, reconnect_s=DEADLINE_S) as kv:
            async with asyncio.timeout(3 * DEADLINE_S), asyncio.TaskGroup() as group:
                for number in range(TASKS):
                    group.create_task(append(kv, number))
                submitting = group.create_task(submit(kv))
                for kill in range(KILLS):
                    while done < (kill + 1) * TASKS * APPENDS // (KILLS + 1):
                        await asyncio.sleep(0)
                    await asyncio.to_thread(restart, cluster)
            assert sorted(row.request_id for row in (await kv.requests(1000)).requests) == submitting.result()
            stats = await kv.stats()
            assert (stats.requests.accepted_total, stats.sequences) == (APPENDS // 4, TASKS)

    with Cluster() as cluster:
        cluster.start("w0")
        asyncio.run(main(cluster))


@pytest.mark.parametrize("seen_by_both", [True, False])
def test_a_client_whose_cable_is_cut_goes_on_with_all_that_is_its_own(seen_by_both: bool) -> None:
    with Cluster() as cluster:
        kv = cluster.start("w0")
        with (
            Cable(cluster.folder / "cable", cluster.endpoint.removeprefix("ipc://")) as cable,
            Client(cable.endpoint, timeout_s=DEADLINE_S, reconnect_s=DEADLINE_S) as far,
        ):
            sampling = SamplingParams(temperature=0, ignore_eos=True)
            sequence = far.create_sequence([1, 2, 3])
            came = []
            for token in far.submit([5, 6, 7], max_tokens=TOKENS, sampling=sampling):
                came.append(token.token_id)
                if len(came) in (20, 200):
                    cable.cut(seen_by_both=seen_by_both)
                    assert far.append(sequence, [len(came)]) == (4 if len(came) == 20 else 5,)
            assert cable.connections == 3
            assert came == whole(kv)
            assert far.tokens(sequence) == (1, 2, 3, 20, 200), "it was not removed with the connection that made it"
            assert kv.stats().requests.accepted_total == 2


def test_the_command_line_goes_on() -> None:
    with Cluster() as cluster:
        kv = cluster.start("w0")
        arguments = ["--prompt-tokens", "5,6,7", "--temperature", "0", "--ignore-eos", "--max-tokens", str(TOKENS)]
        where = [sys.executable, "-m", "kvforge", "--runtime-dir", str(cluster.runtime)]
        with (
            started([*where, "generate", *arguments, "--stream"]) as generate,
            started([*where, "top", "--json", "--count", "8", "--every", "0.5"]) as top,
        ):
            assert generate.stdout is not None
            assert top.stdout is not None
            head = generate.stdout.read(10)
            first = json.loads(top.stdout.readline())
            restart(cluster)
            answer, said = generate.communicate(timeout=DEADLINE_S)
            assert (generate.returncode, said) == (0, b"")
            assert list(map(int, (head + answer).split())) == whole(kv)
            lines, _ = top.communicate(timeout=DEADLINE_S)
            assert top.returncode == 0
            assert (json.loads(lines.splitlines()[-1])["boot"], len(lines.splitlines())) == (first["boot"], 7)


def started(command: list[str]) -> subprocess.Popen[bytes]:
    """Start without reading ahead, so that `communicate` gets the remaining output."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def whole(kv: Client) -> list[int]:
    """Return the same answer from an undisturbed coordinator."""
    sampling = SamplingParams(temperature=0, ignore_eos=True)
    return list(kv.submit([5, 6, 7], max_tokens=TOKENS, sampling=sampling).result().tokens)
