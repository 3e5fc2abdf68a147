"""The runs of `tests/forked_run.py`: each test once, whatever happens to the processes."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest

from tests.amount import examples
from tests.forked_run import NONE, Shares

REPOSITORY = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-p", "tests.forked_run", "--processes", "3", "-rA", "-p", "no:cacheprovider"]
WITHOUT = ["-p", "no:langsmith_plugin", "-p", "no:schemathesis", "-p", "no:anyio", "-p", "no:hypothesispytest"]
WAIT_S = 60.0
# Each test notes that it ran.
CONFTEST = """
import os, signal
from pathlib import Path
import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)

@pytest.fixture(autouse=True)
def noted(request):
    with Path("ran").open("a") as file:
        file.write(f"{request.node.name} {os.environ['PYTEST_XDIST_WORKER']}\\n")

@pytest.fixture(scope="session", autouse=True)
def ended(tmp_path_factory):
    made = tmp_path_factory.mktemp("of")
    yield
    with Path("ended").open("a") as file:
        file.write(f"{made}\\n")
"""
ALL_KINDS = """
import os, signal, time, warnings
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(20))
def test_passes(number, tmp_path):
    print(f"printed by {number}")
    time.sleep(0.01)

def test_fails():
    print("before the failure")
    assert 1 == 2

def test_skips():
    pytest.skip("this reason")

@pytest.mark.xfail(strict=True)
def test_fails_as_expected():
    assert False

def test_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

def test_exits():
    os._exit(3)

def test_warns():
    warnings.warn("this warning", stacklevel=1)

@pytest.fixture
def broken():
    yield
    assert False, "after the test"

def test_has_a_broken_teardown(broken):
    pass
"""
WAITS = """
import select
import pytest

@pytest.mark.parametrize("number", range(6))
def test_waits(number):
    select.select([], [], [], 60)
"""


def begin(folder: Path, tests: str, *arguments: str) -> subprocess.Popen[str]:
    """Start pytest in a folder with these tests."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.Popen(
        [*PYTEST, *WITHOUT, "-c", os.devnull, "--rootdir", str(folder), *arguments, "test_it.py"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Return the exit status of such a run, its output, and the tests that ran."""
    with begin(folder, tests, *arguments) as process:
        output, _ = process.communicate(timeout=WAIT_S)
        ran = folder / "ran"
        return process.returncode, output, ran.read_text().splitlines() if ran.exists() else []


def test_each_test_runs_once_and_each_outcome_is_reported(tmp_path: Path) -> None:
    status, output, ran = run(tmp_path, ALL_KINDS)
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "3 failed, 22 passed, 1 skipped, 1 xfailed, 1 warning, 1 error in" in output
    names = [line.split()[0] for line in ran]
    assert len(names) == len(set(names)) == 27, ran
    assert {line.split()[1] for line in ran} <= {"gw0", "gw1", "gw2"}
    for test, status in (("test_is_killed", -9), ("test_exits", 3)):
        text = rf"process \d of the tests ended with status {status} while it ran test_it.py::{test}\n"
        assert re.search(text, output), test
    for text in ("before the failure", "assert 1 == 2", "this reason", "this warning", "after the test"):
        assert text in output, text
    printed = re.findall(r"_ test_passes\[(\d+)\] _+\n.*\n-+ Captured stdout call -+\n(.*)\n", output)
    assert sorted(printed) == sorted((str(number), f"printed by {number}") for number in range(20))
    ended = [Path(folder).parent.name for folder in (tmp_path / "ended").read_text().splitlines()]
    assert ended and len(ended) == len(set(ended)) and set(ended) <= {"popen-gw0", "popen-gw1", "popen-gw2"}


def test_a_check_that_fails_ends_the_run_and_is_shown(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'print(40 + 2); raise SystemExit(5)'"
    begun = monotonic()
    status, output, ran = run(tmp_path, WAITS.replace("60", "2"), "--beside", command)
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "this check failed: " in output and "\n42\n" in output
    assert len(ran) < 6 or monotonic() - begun < 2, output


def test_a_check_that_passes_is_waited_for(tmp_path: Path) -> None:
    script = "import time; time.sleep(0.2); print(42); open('checked', 'w').close()"
    status, output, ran = run(tmp_path, ALL_KINDS, "-k", "test_passes", "--beside", f'{sys.executable} -c "{script}"')
    assert status == pytest.ExitCode.OK, output
    assert len(ran) == 20 and (tmp_path / "checked").exists() and "42\n" not in output


@pytest.mark.parametrize("ended", ["interrupted", "killed"])
def test_fixtures_are_torn_down_in_a_run_that_is(ended: str, tmp_path: Path) -> None:
    with begin(tmp_path, WAITS) as process:
        noted = tmp_path / "ran"
        deadline = monotonic() + WAIT_S
        while not noted.exists() or len(noted.read_text().splitlines()) < 3:
            assert monotonic() < deadline
            select.select([], [], [], 0.02)
        process.send_signal(signal.SIGINT if ended == "interrupted" else signal.SIGKILL)
        output, _ = process.communicate(timeout=WAIT_S)  # to the end of all processes: they have its output
        assert process.returncode == (pytest.ExitCode.INTERRUPTED if ended == "interrupted" else -signal.SIGKILL)
    assert len((tmp_path / "ended").read_text().splitlines()) == 3, output
    assert len(noted.read_text().splitlines()) == 3


@pytest.mark.parametrize("seed", range(examples(40)))
def test_each_number_is_taken_once(seed: int) -> None:
    """In any order of the processes, of which some die and go on, each runs what it was promised."""
    chance = random.Random(seed)
    count, processes = chance.randrange(3, 60), chance.randrange(2, 4)
    shares = Shares([place * count // processes for place in range(processes + 1)])
    stopped_at = chance.choice((None, chance.randrange(count)))
    taken: list[int] = []
    promised = dict.fromkeys(range(processes), NONE)
    running = set(promised)
    while running:
        process = chance.choice([*running])
        current, following = shares.advance(process)
        assert promised[process] in (NONE, current) or stopped_at is not None
        promised[process] = following
        if current == NONE:
            running.remove(process)
            continue
        assert shares.current(process) == current
        taken.append(current)
        if len(taken) == stopped_at:
            shares.stop()
    assert len(taken) == len(set(taken))
    assert sorted(taken) == [*range(count)] if stopped_at in (None, 0) else len(taken) == stopped_at
    shares.close()
