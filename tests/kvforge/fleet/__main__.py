"""Kill parts of a fleet on Ray under load, for the given time: `python -m tests.kvforge.fleet --minutes 10`.

The seed determines the killed parts, the fleet's recovery their times. The run ends at the first wrong token, the first
failed request, or a fleet that does not recover.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import monotonic

from kvforge.fleet.messages import Seen

from .load import Load
from .raylets import RayCluster
from .story import FLEET, Story, kill

LIMITS = "sequences_max = 1"  # so that requests wait for each other
CORES = 5  # per node: two replicas with two cores each, and a gateway


async def run(story: Story, seconds: float, seed: int, clients: int) -> Counter[str]:
    """Run the kills; return the number of each action."""
    rng, done = random.Random(seed), Counter[str]()
    story.cluster.ask("up", story.write(limits=LIMITS))
    await story.until(lambda status: status.serves)
    load = Load(story.urls, clients)
    until = monotonic() + seconds
    async with load:
        while monotonic() < until and not load.faults:
            await load.more(clients)
            what = rng.choice(("processes", "program", "actor", "controller", "node"))
            one: Seen = rng.choice((*story.status.replicas, *story.status.gateways))
            pids = dict(one.status.pids)
            ours = {"keeper": pids.pop("keeper"), "program": pids.pop("program")}
            if what == "processes":
                kill(*pids.values())
            elif what == "program":
                kill(ours["program"])
            elif what == "actor":
                kill(ours["keeper"])
            elif what == "controller":
                kill(story.status.pid)
            else:
                story.cluster.ask("kill_node", one.status.node)
                story.cluster.ask("add_node", CORES)
            done[what] += 1
            story.note(load, f"{what} of {one.name}")
            await load.more(clients)
            await story.until(lambda status: status.serves)
        # Any wait counts as too long, so the fleet scales up; without requests nothing waits, so it scales down.
        rule = "replicas_min = 1\nreplicas_max = 4\nqueue_up_s = 1e-4\nqueue_down_s = 0.0\nup_after_s = 1.0"
        scale = f"[autoscale]\n{rule}\ndown_after_s = 2.0\npause_s = 1.0"
        story.cluster.ask("up", story.write(scale=scale, limits=LIMITS))
        await story.until(lambda status: status.serves and status.count == 4)
        story.note(load, "a fourth replica, by how long requests wait")
    assert not load.faults, load.faults
    await story.until(lambda status: status.serves and status.count == 1)
    story.note(load, "one replica, without waiting requests")
    await story.command("down", "--name", FLEET)
    return done + load.counts


def main() -> int:
    """Return the exit status: 0 if nothing was lost or changed."""
    parser = argparse.ArgumentParser(prog="python -m tests.kvforge.fleet", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=6)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder,
        RayCluster(Path(folder), CORES, CORES) as ray,
    ):
        counts = asyncio.run(run(Story(Path(folder), ray), 60 * options.minutes, options.seed, options.clients))
    print(f"nothing was lost and nothing changed: {dict(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
