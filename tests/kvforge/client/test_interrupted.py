"""Ctrl-C at every step of making and ending a connection: the next one can be made, and the client can be closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

END_S = 120
# Counted are the steps of Python in the files of the link and of ZeroMQ's own Python; at each of them one run raises.
SCRIPT = """
import faulthandler, sys
from pathlib import Path
import zmq.sugar
from kvforge.client import link as module
from kvforge.client.link import Link
from kvforge.client.session import Session

PLACES = tuple(str(Path(each).parent) for each in (module.__file__, zmq.sugar.__file__))
faulthandler.dump_traceback_later(60, exit=True)


def interrupted(call, at):
    left = at

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.settrace(None)
    return None if left >= 0 else "by a finaliser"  # which swallows what its code raises


def with_link(at):
    link = Link(Session(sys.argv[2]), 5.0)
    if sys.argv[1] == "opening":
        caught = interrupted(link.open, at)
    else:
        link.open()
        caught = interrupted({"closing": link.close, "ending": link.goodbye}[sys.argv[1]], at)
    if sys.argv[1] != "ending":
        assert not link.is_open or link.monitor is not None, "half a connection"
        link.close()
        link.open()
    link.goodbye()  # while the exception holds by its traceback what was made
    return caught


at = 0
while with_link(at) is not None:
    at += 1
print(at)
"""


@pytest.mark.parametrize(("what", "steps_min"), [("opening", 300), ("closing", 100), ("ending", 100)])
def test_ctrl_c_at_any_step_of(what: str, steps_min: int, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, what, f"ipc://{tmp_path}/nobody.sock"],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > steps_min
