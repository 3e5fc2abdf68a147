"""A worker's share of the cores, and the wait policy of its threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvforge.worker import cores
from kvforge.worker.cores import Cores, CoreShare, choose, usable_cores, used_by_others


def test_workers_of_one_folder_share_its_cores(tmp_path: Path) -> None:
    first = CoreShare(tmp_path, "a")
    assert first.others() == 0
    second = CoreShare(tmp_path, "b")
    assert (first.others(), second.others()) == (1, 1)
    assert [Cores(8, others).threads for others in (0, 1, 2, 20)] == [8, 4, 2, 1]
    with closing(CoreShare(tmp_path / "elsewhere", "a")) as elsewhere:
        assert elsewhere.others() == 0
    second.close()
    assert first.others() == 0
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_killed_is_not_counted(tmp_path: Path) -> None:
    mine = CoreShare(tmp_path, "a")
    made = f"share = c.CoreShare(c.Path({str(tmp_path)!r}), 'b')"
    code = f"import os, kvforge.worker.cores as c; {made}; print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    assert mine.others() == 1
    other.kill()
    other.communicate(timeout=60)
    assert mine.others() == 0
    mine.close()


@pytest.mark.parametrize(
    ("quotas", "most"),
    [
        ({}, 1 << 20),
        ({"a/cpu.max": "max 100000"}, 1 << 20),
        ({"a/cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "1 2"}, 1),
    ],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, quotas: dict[str, str], most: int) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/a\n")
    (tmp_path / "root" / "a").mkdir(parents=True)
    for name, text in quotas.items():
        (tmp_path / "root" / name).write_text(text + "\n")
    assert usable_cores(groups, tmp_path / "root") == min(most, len(os.sched_getaffinity(0)))


def test_no_control_group_bounds_nothing(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == len(os.sched_getaffinity(0))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[CoreShare]:
    """Return the place of a worker without neighbours."""
    with closing(CoreShare(tmp_path, "a")) as found:
        yield found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process on 4 idle cores that has not loaded torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    monkeypatch.setattr(cores, "used_by_others", lambda: 0.1)
    return monkeypatch


def test_threads_spin_where_the_cores_are_their_own(place: CoreShare, fresh: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    chosen = choose(place, 0, environment)
    assert environment == {"GOMP_SPINCOUNT": str(cores.SPINS)}
    assert chosen.describe() == "4 threads, which spin while a step is under way: the cores are their own; 4 cores"


def test_threads_sleep_where_others_compute(place: CoreShare, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(cores, "used_by_others", lambda: 1.0)
    environment: dict[str, str] = {}
    chosen = choose(place, 0, environment)
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert chosen.describe() == "4 threads, which sleep while they wait: others use 1.0 of the cores; 4 cores"
    environment.clear()
    choose(place, 3, environment)
    assert "GOMP_SPINCOUNT" in environment, "one core is the other's, three are ours"


def test_one_thread_waits_for_nobody_and_what_the_user_says_stands(place: CoreShare, fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(cores, "used_by_others", lambda: pytest.fail("measured for nothing"))
    environment: dict[str, str] = {}
    assert choose(place, 1, environment).describe() == "1 thread; 4 cores"
    assert environment == {}
    environment = {"OMP_WAIT_POLICY": "ACTIVE"}
    chosen = choose(place, 0, environment)
    assert environment == {"OMP_WAIT_POLICY": "ACTIVE"}
    assert "as set by OMP_WAIT_POLICY=ACTIVE" in chosen.describe()


def test_what_others_use_is_measured() -> None:
    used = used_by_others(0.02)
    assert used is not None and 0.0 <= used <= len(os.sched_getaffinity(0)) + 1


@pytest.mark.parametrize(
    "stat",
    [
        None,
        "",
        "cpu  1 2 3 4 5 6 7 8 9 10\n",
        "".join(f"cpu{core} 1 2\n" for core in os.sched_getaffinity(0)),
        "".join(f"cpu{core} one 2 3 4 5 6 7 8\n" for core in os.sched_getaffinity(0)),
    ],
    ids=["not there", "empty", "no single cores", "cut", "no numbers"],
)
def test_where_it_cannot_be_measured_threads_sleep(
    place: CoreShare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stat: str | None
) -> None:
    """As under systemd's ProcSubset=pid, and in other sandboxes."""
    proc = tmp_path / "proc"
    proc.mkdir()
    if stat is not None:
        (proc / "stat").write_text(stat)
    monkeypatch.setattr(cores, "PROCESSES", proc)
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    environment: dict[str, str] = {}
    told = choose(place, 0, environment).describe()
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert told == "4 threads, which sleep while they wait: the load of other processes is unknown; 4 cores"


def test_without_any_proc_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cores, "PROCESSES", tmp_path / "nowhere")
    assert used_by_others(0.0) is None
