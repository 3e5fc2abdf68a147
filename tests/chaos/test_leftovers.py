"""Leftovers of a chaos run are found: blocks, grown processes, orphans, files, complaints, wrong tokens."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvforge.client.results import Token
from kvforge.protocol.messages import DiskStats, PoolStats, RequestStats, Stats
from tools.chaos import leftovers, sizes
from tools.chaos.cases import Answer
from tools.chaos.notes import ClientNotes, Notes
from tools.chaos.processes import Processes, ProcessRun
from tools.chaos.python_client import RandomClient
from tools.chaos.sizes import Sample, Span

MB = 1 << 20
HELD = "import sys; print(flush=True); sys.stdin.read()"


# ------------------------------------------------------------------------------------------------------------ blocks


def stats(
    *,
    free: int = 6,
    cached: int = 2,
    referenced: int = 0,
    quarantined: int = 0,
    running: int = 0,
    disk: DiskStats | None = None,
) -> Stats:
    """Return the statistics of a pool of 8 blocks."""
    zeros = dict.fromkeys(PoolStats.__struct_fields__, 0)
    texts = {"worker": "w0", "state": "ready", "kv_dtype": "float32", "disk": disk}
    counts = {"blocks": 8, "free": free, "cached": cached, "referenced": referenced, "quarantined": quarantined}
    requests = RequestStats(**{**dict.fromkeys(RequestStats.__struct_fields__, 0), "running": running})
    pools = (PoolStats(**{**zeros, **texts, **counts}),)
    return Stats(rid=0, boot="", uptime_us=0, clients=1, sequences=0, requests=requests, pools=pools, tenants=())


def test_pools_that_are_empty_are_in_order() -> None:
    assert list(leftovers.not_given_back(stats())) == []


def test_copies_that_no_disk_ends_are_found() -> None:
    zeros = dict.fromkeys(DiskStats.__struct_fields__, 0)
    whole = DiskStats(**zeros | {"blocks": 4, "free": 1, "cached": 2, "quarantined": 1, "off": False})
    assert list(leftovers.not_given_back(stats(disk=whole))) == []
    in_flight = msgspec.structs.replace(whole, free=0)
    assert "blocks of the disk tier leaked" in next(leftovers.not_given_back(stats(disk=in_flight)))
    assert list(leftovers.not_given_back(stats(disk=msgspec.structs.replace(in_flight, off=True)))) == []


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"free": 5, "referenced": 1}, "blocks leaked"),
        ({"free": 5, "quarantined": 1}, "blocks leaked"),
        ({"free": 5}, "blocks leaked"),
        ({"free": 7}, "blocks leaked"),
        ({"running": 1}, "left: 0 pending, 1 running"),
    ],
)
def test_what_was_not_given_back_is_found(counts: dict[str, int], found: str) -> None:
    faults = list(leftovers.not_given_back(stats(**counts)))
    assert len(faults) == 1 and faults[0].startswith(found)


# ------------------------------------------------------------------------------------------------------------- sizes


def test_a_process_that_stays_as_it_is_has_not_grown() -> None:
    span = Span(Sample(300 * MB, 17), Sample(310 * MB, 20))
    assert sizes.too_large("w0", [span, span], 32 * MB) == []
    assert sizes.too_large("w0", [], 32 * MB) == []


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([Span(Sample(300 * MB, 17), Sample(340 * MB, 17))], "w0 has grown by 41943040 bytes"),
        ([Span(Sample(300 * MB, 17), Sample(300 * MB, 82))], "w0 has grown by 65 descriptors"),
        # Killed while large; the next, smaller process must not hide that.
        (
            [Span(Sample(300 * MB, 17), Sample(340 * MB, 17)), Span(Sample(300 * MB, 17), Sample(301 * MB, 17))],
            "w0 has grown by 41943040 bytes",
        ),
        # Each is flat, but starts larger than its predecessor.
        (
            [Span(Sample(size * MB, 17), Sample(size * MB, 17)) for size in (300, 320, 340)],
            "w0 has grown by 41943040 bytes",
        ),
    ],
)
def test_growth_is_found(spans: list[Span], found: str) -> None:
    faults = sizes.too_large("w0", spans, 32 * MB)
    assert len(faults) == 1 and faults[0].startswith(found)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that grows by 64 MB and 80 descriptors on its first input line and ends on the next."""
    code = (
        "import os, sys\nprint(flush=True)\nsys.stdin.readline()\nkept = bytearray(b'x' * (64 << 20))\n"
        "files = [os.open(os.devnull, os.O_RDONLY) for _ in range(80)]\nprint(flush=True)\nsys.stdin.readline()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    yield process
    process.kill()
    process.communicate()


def test_a_real_process_that_grows_is_found(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    first = sizes.sample(child.pid)
    child.stdin.write(b"\n")
    child.stdout.readline()
    second = sizes.sample(child.pid)
    assert first is not None and second is not None
    faults = sizes.too_large("c", [Span(first, second)], 32 * MB)
    assert len(faults) == 2 and "bytes" in faults[0] and "80 descriptors" in faults[1]
    child.kill()
    child.wait()
    assert sizes.sample(child.pid) is None


def test_only_processes_that_were_warm_are_compared() -> None:
    small, large = Sample(30 * MB, 20), Sample(31 * MB, 20)
    lives = [
        ProcessRun(1, None, last=small),
        ProcessRun(2, 0.0, warm=small, last=large),
        ProcessRun(3, 0.0, last=small),
    ]
    processes = SimpleNamespace(lives={"w0": lives})
    assert Processes.spans(processes, "w0") == [Span(small, large)]  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- processes and files


@pytest.mark.parametrize("how", ["command line", "open file"])
def test_an_orphan_is_found_and_ended(how: str, tmp_path: Path) -> None:
    assert list(leftovers.orphans(tmp_path)) == []
    arguments = [str(tmp_path)] if how == "command line" else []
    with (tmp_path / "log").open("wb") as log:
        error = log if how == "open file" else subprocess.DEVNULL
        orphan = subprocess.Popen(
            [sys.executable, "-c", HELD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=error
        )
    assert orphan.stdout is not None
    orphan.stdout.readline()
    found = list(leftovers.orphans(tmp_path, wait_s=0.0))
    assert len(found) == 1 and found[0].startswith(f"process {orphan.pid} is still running: ")
    orphan.communicate()
    assert orphan.returncode == -9


def test_a_process_that_just_ends_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = subprocess.Popen(
        [sys.executable, "-c", HELD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert ending.stdout is not None
    ending.stdout.readline()
    monkeypatch.setattr(leftovers.time, "sleep", lambda _s: ending.communicate())
    assert list(leftovers.orphans(tmp_path)) == []
    assert ending.returncode == 0


def test_files_and_complaints_are_found(tmp_path: Path) -> None:
    assert list(leftovers.files(tmp_path)) == []
    (tmp_path / "coordinator.lock").touch()
    assert list(leftovers.files(tmp_path)) == []
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / "state" / "pipe")
    assert list(leftovers.files(tmp_path)) == ["leftover files: ['state', 'state/pipe']"]
    log = "INFO fine\nTraceback (most recent call last):\n  File\n    go()\nOSError: no\nWARNING 1 no handshake\n"
    assert list(leftovers.complaints("w0", log)) == [
        "w0 wrote: Traceback (most recent call last): | File | go() | OSError: no",
        "w0 wrote: WARNING 1 no handshake",
    ]


# ----------------------------------------------------------------------------------- what a client sees of a stream


@dataclass
class Read:
    """A request with a given stream of (offset, token) and a given end."""

    streamed: list[tuple[int, int]]
    tokens: tuple[int, ...]
    reason: str = "length"
    id: int = 1
    start: int = 0
    done: bool = field(default=True)

    async def __aiter__(self) -> Any:
        for offset, token_id in self.streamed:
            yield Token(offset, token_id, 0.0)

    async def result(self) -> Any:
        return SimpleNamespace(tokens=self.tokens, reason=self.reason)


ANSWER = Answer((5, 6, 7), "length")
STREAM = [(0, 5), (1, 6), (2, 7)]


def seen(request: Read, folder: Path) -> ClientNotes:
    """Return the notes of a client that reads the request."""
    notes = Notes(folder / "notes")
    client = RandomClient(SimpleNamespace(), notes, [], "p0-0")  # type: ignore[arg-type]
    asyncio.run(client.read(request, ANSWER))  # type: ignore[arg-type]
    notes.close()
    return ClientNotes.of("p0.1", folder / "notes")


def test_a_stream_as_it_is_due_is_no_fault(tmp_path: Path) -> None:
    story = seen(Read(STREAM, (5, 6, 7)), tmp_path)
    assert story.faults == [] and story.ended[1]["tokens"] == 3


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (Read([(0, 5), (1, 9), (2, 7)], (5, 9, 7)), "got 9 at 1, expected 6 at 1"),
        (Read([(0, 5), (0, 5), (1, 6), (2, 7)], (5, 6, 7)), "got 5 at 0, expected 6 at 1"),
        (Read([(0, 5), (2, 7)], (5, 6, 7)), "got 7 at 2, expected 6 at 1"),
        (Read([*STREAM, (3, 8)], (5, 6, 7, 8)), "got 8 at 3, expected None at 3"),
        (Read(STREAM, (5, 6)), "ended with (5, 6), not (5, 6, 7)"),
        (Read(STREAM, (5, 6, 7), reason="stop"), "ended by stop, expected length"),
    ],
    ids=["changed", "duplicated", "missing", "too many", "short end", "other end"],
)
def test_a_wrong_stream_is_written_down(request_: Read, found: str, tmp_path: Path) -> None:
    story = seen(request_, tmp_path)
    assert found in story.faults[0]
