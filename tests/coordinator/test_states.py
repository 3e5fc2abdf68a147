"""Models with a recurrent state: its blocks, the chunks of prompts, and what a worker may announce."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvforge.coordinator.core.events import FromWorker, ToWorker
from kvforge.protocol.errors import Conflict, ProtocolError
from kvforge.protocol.messages import Refused, WorkerHello
from tests.coordinator.driver import Driver, FakeWorker, model_info


@pytest.mark.parametrize(
    ("announced", "code", "words"),
    [
        ({"state_blocks": -1}, ProtocolError.code, "state_blocks -1"),
        ({"state_blocks": 2, "prompt_chunk": 0}, ProtocolError.code, "prompt_chunk 0"),
        ({"state_blocks": 2, "wants_kinds": False}, ProtocolError.code, "wants_kinds"),
        ({"state_blocks": 5}, Conflict.code, "limits.state_blocks_max = 4"),
        ({"state_blocks": 2, "prompt_chunk": 33}, Conflict.code, "schedule.step_tokens_max = 32"),
    ],
)
def test_a_worker_whose_states_do_not_fit_is_refused(announced: dict[str, Any], code: str, words: str) -> None:
    driver = Driver(state_blocks_max=4)
    worker = FakeWorker(driver.machine, 7, "hybrid", 16, model_info())
    driver.apply(FromWorker(7, WorkerHello(rid=1, name="hybrid", pid=1)))
    ready = msgspec.structs.replace(driver.ready(worker), **{"wants_kinds": True, **announced})
    effects = driver.apply(FromWorker(7, ready))
    (refusal,) = [e.message for e in effects if isinstance(e, ToWorker) and isinstance(e.message, Refused)]
    assert refusal.error.code == code and words in refusal.error.message
    assert not driver.machine.cache.groups
