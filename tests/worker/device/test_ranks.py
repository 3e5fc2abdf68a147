"""The exit of a rank: it waits for no other rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvforge.worker.device.device import open_device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.step.loop import _signals_end_process
from tests.forked import Scripts

END_S = 60
MET = """
import atexit, logging, sys, time
import torch.distributed as dist
from pathlib import Path
from kvforge.worker.__main__ import leave
from kvforge.worker.device.device import open_device
from kvforge.worker.device.ranks import Ranks
ranks = Ranks(0, 1, open_device("cpu"))
ranks.meet(Path(sys.argv[1]))
ranks._backend = sys.argv[2]  # nccl: as on a GPU
ranks.close()
atexit.register(lambda: (print("farewell"), time.sleep(0)))
print("closed", flush=True)
leave(7)
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Scripts]:
    with Scripts("torch", "torch.distributed") as forking:
        yield forking


@pytest.mark.parametrize(("backend", "said"), [("nccl", ["closed"]), ("gloo", ["closed", "farewell"])])
def test_ranks_on_gpus_leave_without_farewell(backend: str, said: list[str], tmp_path: Path, scripts: Scripts) -> None:
    """Exit handlers may wait for the other ranks; the exit status is reported nevertheless."""
    place = tmp_path / "meeting"
    ended = scripts.run(MET, str(place), backend)
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout.split() == said
    assert not place.exists(), "rank 0 leaves nothing where they met"


LOST = """
import os, signal, sys
from pathlib import Path
import torch
from kvforge.protocol.errors import WorkerError
from kvforge.worker.device import ranks as ranks_module
from kvforge.worker.device.device import open_device
folder = Path(sys.argv[1])

def unavailable(*_):
    raise OSError("no memory here")

for how in ("one host", "several hosts", "no memory"):
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1]:
            continue
        if how == "several hosts":
            ranks_module.host = lambda: str(rank)
        elif how == "no memory" and rank:
            ranks_module.RankMemory = unavailable
        ranks = ranks_module.Ranks(rank, 2, open_device("cpu"), "gloo")
        ranks.meet(folder / how.replace(" ", "-"))
        for _ in range(3):
            assert ranks.gather(torch.full((2, 3), 7 + rank)).tolist() == [[[7] * 3] * 2, [[8] * 3] * 2]
        for shape in ((), (0,), (2, 0, 3)):
            assert ranks.gather(torch.full(shape, 7.5)).shape == (2, *shape)
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ranks.gather(torch.zeros(3))
        except WorkerError as error:
            print(how, ranks.describe(), error, sep="; ", flush=True)
        os._exit(0)
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert ended == [0, -signal.SIGKILL], ended
"""


def test_who_lost_another_rank_says_so_and_blames_no_model(tmp_path: Path, scripts: Scripts) -> None:
    """A trial of the model attributes other errors to the model, and then the worker would not be restarted.

    Ranks of one host gather through their memory. If one of them cannot, all use gloo.
    """
    ended = scripts.run(LOST, str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    lines = [line.split("; ") for line in ended.stdout.splitlines()]
    assert [(how, described) for how, described, _ in lines] == [
        ("one host", "2, which exchange through memory of their host"),
        ("several hosts", "2, which exchange by gloo: collectives = 'gloo'"),
        ("no memory", "2, which exchange by gloo: collectives = 'gloo'"),
    ]
    assert all("rank 0 of 2 lost another rank: " in error for _, _, error in lines)
    assert not [*tmp_path.iterdir()], "they leave nothing where they met"


def test_memory_is_handed_over_where_all_ranks_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd gives each service a private folder for temporary files (PrivateTmp)."""
    seen = []

    def exchange(*_: object) -> object:
        process = [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"]
        seen.append(subprocess.run(process, capture_output=True, text=True, check=True).stdout.strip())
        return None

    monkeypatch.setattr("kvforge.worker.device.ranks.Exchange", exchange)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    place = tmp_path / "shared"
    place.mkdir()
    ranks = Ranks(0, 2, open_device("cpu"))
    ranks._place = place / "meeting"
    ranks.exchange((1, 1, 1))
    assert seen == [str(place)] and os.environ["TMPDIR"] == str(tmp_path / "own")
    monkeypatch.delenv("TMPDIR")
    ranks.exchange((1, 1, 1))
    assert "TMPDIR" not in os.environ


BLOCKED = """
import ctypes, sys
import signal
from kvforge.worker.step.loop import _signals_end_process
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with _signals_end_process():
    print("waits", flush=True)
    while True:
        ctypes.CDLL(None).sleep(60)  # as a library does: Python's handlers would never end it
"""


def test_a_rank_that_waits_for_another_ends_when_it_is_told_to() -> None:
    """While it loads: it may wait for a stopped rank."""
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"waits\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == -signal.SIGTERM
        finally:
            process.kill()


def test_its_own_handlers_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with _signals_end_process():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
