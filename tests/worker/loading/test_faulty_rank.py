"""The trial at load where one of two ranks computes other bits: both ranks find it, and neither waits for the other."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.worker.loading.random_models import NEEDS_CACHE
from tests.worker.loading.test_hybrid_ranks import save_model
from tools.cluster.fork_server import fork_server

pytestmark = NEEDS_CACHE
RANKS = 2
WAIT_S, END_S = 120.0, 20.0


def test_other_bits_of_one_rank_are_found_by_both(tmp_path: Path) -> None:
    """behaviours 15, 28: the ranks share a group of Mamba 2, so that they exchange mean squares within a mixer."""
    folder, meeting = save_model("granite with one group", tmp_path), tmp_path / "meeting"
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(RANKS)]
    ranks = [
        fork_server().start(
            [str(rank), str(RANKS), str(meeting), str(folder)],
            log,
            {**os.environ, "OMP_NUM_THREADS": "1"},
            "tests.worker.loading.faulty_rank",
        )
        for rank, log in enumerate(logs)
    ]
    try:
        statuses = [rank.wait(WAIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(END_S)
    assert statuses == [0] * RANKS, [log.read_text() for log in logs]
    first, second = (json.loads(Path(f"{meeting}-{rank}").read_text()) for rank in range(RANKS))
    assert "GraniteMoeHybridMambaLayer of 3 tokens has other bits" in first["determinism"]
    assert first == second and first["exchanges"] > 0
