"""The comparison of answers with and without drafts, `benchmarks.draft_bits`, in small; and that it finds a fault."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.draft_bits import DRAFTS_MAX, Answer, Asked, Served, differences, draw, serve, write_answers
from tools.cluster.cluster import Cluster
from tools.cluster.drafting_cluster import NO_DRAFTS
from tools.cluster.fork_server import WORKER, fork_server

TOKENS, ROWS, CHANCE = 600, 6, "0.7"
VOCABULARY = 256  # of the cluster's tiny model
COORDINATOR = f"[schedule]\ndrafts_max = {DRAFTS_MAX}\ncrashes_max = 100\n"


class BitsCluster(Cluster):
    """A cluster with workers that propose recorded tokens; see `benchmarks.draft_bits_worker`."""

    def __init__(self, answers: Path, *planted: str, **options: Any) -> None:
        super().__init__(coordinator=COORDINATOR, **options)
        self._arguments = [str(answers), CHANCE, str(DRAFTS_MAX), *planted]

    def _start(self, name: str, module: str, config: Path) -> None:
        if module != "worker":
            super()._start(name, module, config)
            return
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments, log = [*self._arguments, "--config", str(config)], self.folder / f"{name}.log"
        whole = "benchmarks.draft_bits_worker"
        self._processes[name] = fork_server(WORKER).start(arguments, log, environment, whole)


def served(cluster: Cluster, asked: list[Asked], order: str, kills: int = 0) -> Served:
    def check() -> None:
        for name in ("coordinator", "w0"):
            assert cluster.status(name) is None, f"{name} ended by itself"

    def kill() -> None:
        cluster.kill("w0")
        cluster.start_worker("w0")

    cluster.start("w0")
    return asyncio.run(serve(cluster.endpoint, asked, ROWS, order, check=check, kill=kill, kills=kills))


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return draw(TOKENS, VOCABULARY, 24, 60)


@pytest.fixture(scope="module")
def want(asked: list[Asked]) -> dict[int, Answer]:
    with Cluster(coordinator=NO_DRAFTS) as cluster:
        found = served(cluster, asked, "without")
    assert (found.drafted, found.tokens >= TOKENS) == (0, True)
    return found.answers


@pytest.fixture(scope="module")
def recorded(want: dict[int, Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "answers.npy"
    write_answers(want, path)
    return path


def test_no_bit_differs_though_the_worker_is_killed(
    asked: list[Asked], want: dict[int, Answer], recorded: Path
) -> None:
    with BitsCluster(recorded, worker='draft_model = "mtp"\n', blocks=24) as cluster:
        found = served(cluster, asked, "mtp", kills=1)
    assert differences(found.answers, want) == []
    assert found.kills == 1
    assert found.recomputed > 0, "no request was in the middle of its answer"
    assert TOKENS // 10 < found.accepted < found.drafted - TOKENS // 10


def test_an_accepted_wrong_draft_is_found(asked: list[Asked], want: dict[int, Answer], recorded: Path) -> None:
    with BitsCluster(recorded, "--plant") as cluster:
        found = served(cluster, asked, "planted")
    assert differences(found.answers, want)


def test_one_bit_of_a_logprob_or_an_alternative_is_a_difference() -> None:
    answer = Answer([5, 6], [-0.5, -1.25], [[(5, -0.5)], [(7, -1.0)]], "length")
    assert differences({0: answer}, {0: answer}) == []
    assert differences({0: Answer(*json.loads(json.dumps(answer)))}, {0: answer}) == [], "a file of answers keeps bits"
    less = math.nextafter(-1.25, -2.0)
    for changed, at in (
        (answer._replace(tokens=[5, 8]), 1),
        (answer._replace(logprobs=[-0.5, less]), 1),
        (answer._replace(top_logprobs=[[(5, -0.5)], [(7, math.nextafter(-1.0, 0.0))]]), 1),
        (answer._replace(reason="stop"), 2),
        (answer._replace(tokens=[5], logprobs=[-0.5], top_logprobs=[[(5, -0.5)]]), 1),
    ):
        assert differences({0: changed}, {0: answer}) == [f"request 0 differs at token {at} of 2"]
