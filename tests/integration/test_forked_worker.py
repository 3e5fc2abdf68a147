"""A worker of the fork server registers and answers as one of a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvforge import Client, SamplingParams
from kvforge.process.leash import leashed
from tools.cluster.cluster import Cluster

WAIT_S = 120.0
FRESH = "w1"


class MixedCluster(Cluster):
    """A cluster that starts the worker `FRESH` in an interpreter of its own, as users do, and forks all others."""

    def _start(self, name: str, module: str, config: Path) -> None:
        if name != FRESH:
            super()._start(name, module, config)
            return
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                leashed([sys.executable, "-m", self.worker_module, "--config", str(config)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


def registered(kv: Client) -> tuple[Any, ...]:
    """Return the model's description, its fingerprint among others, and what the only worker reported."""
    health = kv.health()
    (worker,) = health.workers
    return health.model, worker.kernels, worker.device_bytes, worker.drafts, worker.rank, worker.ranks


def answers(kv: Client) -> list[Any]:
    """Return tokens and bits of log-probabilities: greedy and drawn, of a short prompt and of one of many blocks."""
    prompts = [7, 8, 9], [(5 * place) % 250 + 3 for place in range(150)]
    handles = [
        kv.submit(prompt, max_tokens=24, sampling=SamplingParams(temperature=temperature, seed=3, logprobs=1))
        for prompt in prompts
        for temperature in (0.0, 0.9)
    ]
    found = [handle.result(WAIT_S) for handle in handles]
    return [(each.tokens, each.logprobs) for each in found]


def test_a_forked_worker_is_like_one_of_a_fresh_interpreter() -> None:
    with MixedCluster() as cluster:
        kv = cluster.start("w0")
        want = registered(kv), answers(kv)
        cluster.kill("w0")
        cluster.wait_workers(kv, 0)  # else the killed one may be taken for the next
        cluster.start_worker(FRESH)
        cluster.wait_workers(kv, 1)
        assert (registered(kv), answers(kv)) == want
