"""kvforge top: its lines and its exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge import Tables
from kvforge.commands import top
from kvforge.protocol import exits
from kvforge.protocol.layout import GAUGES, Geometry
from kvforge.protocol.tables import TablesWriter
from kvforge.protocol.transport import TABLES_FILE

GEOMETRY = Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4)
FIRST = dict.fromkeys(GAUGES, 0) | {
    "turns": 9,
    "uptime_us": 3_725_500_000,
    "sequences": 3,
    "requests_pending": 2,
    "requests_running": 1,
    "blocks_total": 64,
    "blocks_free": 50,
    "blocks_cached": 4,
    "blocks_referenced": 7,
    "blocks_quarantined": 3,
    "sequence_tokens": 99,
    "generated_tokens_total": 1000,
    "steps_total": 300,
}
TITLES = ["running", "pending", "sequences", "free", "cached", "referenced", "quarantined", "blocks"]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TablesWriter]:
    tables = TablesWriter(tmp_path / TABLES_FILE, GEOMETRY, "boot-1")
    publish(tables)
    yield tables
    tables.close()


def publish(writer: TablesWriter, **changes: int) -> None:
    values = {**FIRST, **changes}
    writer.write_gauges([values[name] for name in GAUGES])


@pytest.fixture
def waits(writer: TablesWriter, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the wait before each line; instead of waiting, publish the next of `LATER`."""
    waited: list[float] = []

    def publishing(_self: Tables, wait_s: float = 0.0) -> bool:
        if waited:
            publish(writer, **LATER[min(len(waited), len(LATER)) - 1])
        waited.append(wait_s)
        return False

    monkeypatch.setattr(Tables, "ended", publishing)
    return waited


LATER = [
    {"uptime_us": 3_726_000_000, "generated_tokens_total": 1250, "steps_total": 350, "requests_running": 5},
    {"uptime_us": 3_726_000_000, "generated_tokens_total": 1250, "steps_total": 350},  # nothing was published
    {"uptime_us": 3_728_000_000, "generated_tokens_total": 1251, "steps_total": 20},  # a pool went away
]


def one_sentence(err: str) -> None:
    assert err.startswith("kvforge: ")
    assert err.count("\n") == 1


def test_lines_for_people(run: Any, writer: TablesWriter, waits: list[float]) -> None:
    status, out, err = run("--runtime-dir", str(writer.path.parent), "top", "--count", "4", "--every", "2.5")
    assert (status, err) == (0, "")
    assert waits == [0.0, 2.5, 2.5, 2.5]
    head, *lines = [line.split() for line in out.splitlines()]
    assert head == [*TITLES, "tokens/s", "steps/s", "up"]
    counts = ["1", "2", "3", "50", "4", "7", "3", "64"]
    assert lines == [
        [*counts, "-", "-", "1:02:05"],
        ["5", *counts[1:], "500.0", "100.0", "1:02:06"],
        [*counts, "0.0", "0.0", "1:02:06"],
        [*counts, "0.5", "0.0", "1:02:08"],
    ]
    assert len({len(line) for line in out.splitlines()}) == 1  # columns are aligned


def test_a_json_document_a_line(run: Any, writer: TablesWriter, waits: list[float]) -> None:
    status, out, err = run("--runtime-dir", str(writer.path.parent), "top", "--count", "3", "--json")
    assert (status, err) == (0, "")
    assert waits[1:] == [1.0, 1.0]
    documents = [json.loads(line) for line in out.splitlines()]
    assert documents[0] == {"boot": "boot-1", **FIRST, "tokens_per_s": None, "steps_per_s": None}
    assert documents[1] == {"boot": "boot-1", **FIRST, **LATER[0], "tokens_per_s": 500.0, "steps_per_s": 100.0}
    assert documents[2]["tokens_per_s"] == documents[2]["steps_per_s"] == 0.0


def test_the_header_comes_again(run: Any, writer: TablesWriter, waits: list[float]) -> None:
    _, out, _ = run("--runtime-dir", str(writer.path.parent), "top", "--count", str(2 * top.LINES_PER_HEADER + 1))
    heads = [number for number, line in enumerate(out.splitlines()) if "quarantined" in line]
    assert heads == [0, top.LINES_PER_HEADER + 1, 2 * top.LINES_PER_HEADER + 2]


def test_the_coordinator_a_client_would_ask_is_the_one_shown(
    run: Any, writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = writer.path.parent
    endpoint = f"ipc://{folder}/clients.sock"
    once = ("top", "--count", "1", "--json")
    assert run("--endpoint", endpoint, *once)[0] == 0
    assert run(*once, "--runtime-dir", str(folder))[0] == 0
    monkeypatch.setenv("KVFORGE_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("KVFORGE_ENDPOINT", raising=False)
    assert run(*once)[0] == 0
    monkeypatch.setenv("KVFORGE_RUNTIME_DIR", str(folder / "elsewhere"))
    assert run(*once)[0] == exits.UNAVAILABLE
    monkeypatch.setenv("KVFORGE_ENDPOINT", endpoint)
    assert run(*once)[0] == 0


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5", "ipc://@abstract", "nonsense"])
def test_an_endpoint_without_a_folder_is_refused_by_name(run: Any, endpoint: str) -> None:
    status, out, err = run("--endpoint", endpoint, "top")
    assert (status, out) == (exits.USAGE, "")
    one_sentence(err)
    assert "endpoint: is" in err
    assert "--runtime-dir" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [("--every", v) for v in ("0", "0.09", "-1", "nan", "86401", "x")] + [("--count", v) for v in ("0", "-1", "1.5")],
)
def test_bad_values_are_refused_by_name(run: Any, option: str, value: str) -> None:
    status, out, err = run("top", option, value)
    assert (status, out) == (exits.USAGE, "")
    assert f"argument {option}: invalid" in err
    assert value in err


# --------------------------------------------------------------------------------------------------------- its ends


def test_nobody_is_there(run: Any, tmp_path: Path) -> None:
    status, out, err = run("--runtime-dir", str(tmp_path), "top")
    assert (status, out) == (exits.UNAVAILABLE, "")
    one_sentence(err)
    assert "kvforge up" in err
    assert str(tmp_path) in err


WRITER = """
import sys
from pathlib import Path
from kvforge.protocol.layout import Geometry
from kvforge.protocol.tables import TablesWriter
tables = TablesWriter(Path(sys.argv[1]), Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4), "other")
print("ready", flush=True)
sys.stdin.read()
"""


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start the command and wait for its first line; the second would follow in an hour."""
    command = subprocess.Popen(
        [sys.executable, "-m", "kvforge", "--runtime-dir", str(folder), "top", "--every", "3600", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert command.stdout is not None
    assert "running" in command.stdout.readline()
    assert "0:00:00" in command.stdout.readline()
    return command


def test_the_end_of_the_coordinator_ends_it_at_once(run: Any, tmp_path: Path) -> None:
    path = tmp_path / TABLES_FILE
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdin=pipe, stdout=pipe) as coordinator:
        assert coordinator.stdout is not None
        assert coordinator.stdout.readline() == b"ready\n"
        command = start(tmp_path, "--reconnect", "0")
        coordinator.kill()
        out, err = command.communicate(timeout=20)
    assert (command.returncode, out) == (exits.UNAVAILABLE, "")
    one_sentence(err)
    assert f"is gone (process {coordinator.pid})" in err
    assert "kvforge up" in err
    assert run("--runtime-dir", str(tmp_path), "top") == (exits.UNAVAILABLE, "", err)  # its file is still there


def test_a_coordinator_that_comes_back_is_watched_on(
    run: Any, writer: TablesWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def ended(_self: Tables, wait_s: float = 0.0) -> bool:
        """Kill after the first line; the successor's file exists from the third check on."""
        looks.append(len(looks))
        return len(looks) in (2, 3, 4)

    monkeypatch.setattr(Tables, "ended", ended)
    monkeypatch.setattr(top, "LOOK_S", 0.0)
    status, out, err = run("--runtime-dir", str(writer.path.parent), "top", "--count", "2", "--every", "2.5")
    assert status == 0
    assert [line.split()[-3:] for line in out.splitlines()[1:]] == [["-", "-", "1:02:05"]] * 2
    assert err == f"kvforge: the coordinator in {writer.path.parent} is gone (process {os.getpid()}); reconnecting\n"
    assert len(looks) == 5


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once(writer: TablesWriter, number: signal.Signals, status: int) -> None:
    publish(writer, uptime_us=0)
    command = start(writer.path.parent)
    command.send_signal(number)
    out, err = command.communicate(timeout=20)
    assert (command.returncode, out, err) == (status, "", "")
