"""The recorded requests of each client get the responses with which the client worked."""

from __future__ import annotations

import pytest

from tests.gateway.clients.recording import FOLDER, Replay, load
from tests.gateway.clients.stage import Stage

NAMES = sorted(path.stem for path in FOLDER.glob("*.jsonl"))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_requests_get_the_recorded_responses(name: str, stage: Stage) -> None:
    stage.play({})
    replay = Replay(stage)
    exchanges = load(name)
    assert exchanges
    for at, recorded in enumerate(exchanges, 1):
        exchange, found = replay.send(recorded)
        assert (exchange.status, found) == (recorded.status, recorded.response), f"request {at}: {exchange}"
