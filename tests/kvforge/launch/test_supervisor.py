"""When `kvforge up` counts an installation as ready."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.launch.settings import Settings
from kvforge.launch.supervisor import Supervisor
from kvforge.protocol.messages import Health, WorkerHealth


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    made = Supervisor(Settings(tmp_path, runtime_dir=tmp_path), None, SimpleNamespace(print_line=print))  # type: ignore[arg-type]
    for at in range(2):
        child: Any = SimpleNamespace(name=f"worker-{at}", pid=10 + at, given_up=False)
        made.workers.append(child)
        made._worker_of[child.name] = child.name
    return made


def health(*pids: int, state: str = "ready", ready: bool = True) -> Health:
    workers = tuple(WorkerHealth(name=f"worker-{at}", pid=pid, state=state) for at, pid in enumerate(pids))
    return Health(rid=0, live=True, ready=ready, reason="", workers=workers)


def test_processes_of_a_former_start_do_not_count(supervisor: Supervisor) -> None:
    """A coordinator that has recovered waits for them, and reports them as ready until then."""
    assert not supervisor.is_ready(health(7, 8)) and not supervisor.serves(health(7, 8))
    assert not supervisor.is_ready(health(10, 8)) and supervisor.serves(health(10, 8))
    assert supervisor.is_ready(health(10, 11)) and supervisor.serves(health(10, 11))


def test_a_worker_that_was_given_up_is_not_waited_for(supervisor: Supervisor) -> None:
    supervisor.workers[0].given_up = True
    assert supervisor.is_ready(health(7, 11))


@pytest.mark.parametrize("found", [None, health(10, 11, ready=False), health(10, 11, state="loading")])
def test_nothing_is_ready(supervisor: Supervisor, found: Health | None) -> None:
    assert not supervisor.is_ready(found) and not supervisor.serves(found)
