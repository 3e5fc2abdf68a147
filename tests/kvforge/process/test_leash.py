"""A process on a leash ends with the process that holds the leash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools.cluster.running import wait_gone

# A child that ignores signals, as during a model load or a wait for a device; it prints its id at the start.
DEAF = """
import os, signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""
HOLDER = f"""
import subprocess, sys
from kvforge.process.leash import leashed
subprocess.run(leashed([sys.executable, "-c", {DEAF!r}]), process_group=0)
"""


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_one_that_hears_nothing_ends_with_its_starter(end: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        pid = int(holder.stdout.readline())
        getattr(holder, end)()
        assert holder.wait(30) < 0
        wait_gone(pid)  # or it fails


def test_a_command_whose_starter_is_gone_is_not_begun() -> None:
    from kvforge.process.leash import leashed

    command = leashed([sys.executable, "-c", "print('begun')"])
    command[command.index(str(os.getpid()))] = "1"  # it has another parent now
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
