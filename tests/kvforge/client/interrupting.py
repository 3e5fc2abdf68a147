"""A signal handler that raises at a chosen Python step, and the guarantees that must still hold afterwards.

    python -m tests.kvforge.client.interrupting WHAT FOLDER STRIDE

One run raises at each STRIDE-th step of WHAT, counted in the files of the client and the protocol and in ZeroMQ's
Python code. Prints the number of steps. A client that hangs ends the program with a traceback.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import zmq.sugar

import kvforge.client
import kvforge.protocol
from kvforge import Client
from kvforge.client.link import CoordinatorLink
from kvforge.client.session import ClientSession
from tests.kvforge.fake_coordinator import Running

PLACES = tuple(str(Path(str(each.__file__)).parent) for each in (kvforge.client, kvforge.protocol, zmq.sugar))
HANG_S = 60
TOKENS = tuple(range(4, 13))  # the fake's answer to the prompt [4]


def interrupted(call: Callable[[], Any], at: int) -> tuple[bool, BaseException | None]:
    """Return whether the call finished first, and the raised exception. Finalisers are skipped, because they swallow
    it."""
    left = at

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PLACES) or frame.f_code.co_name == "__del__":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return trace

    # Python 3.12 traces opcodes only if a frame has asked for them before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return False, error
    finally:
        sys.settrace(None)
    return left >= 0, None


def of_a_link(what: str, folder: Path) -> Callable[[int], bool]:
    """Interrupt one step of a link, then connect again and close. The traceback keeps the created objects alive."""

    def run(at: int) -> bool:
        link = CoordinatorLink(ClientSession(f"ipc://{folder}/nobody.sock"), 5.0)
        if what != "opening":
            link.open()
        call = {"opening": link.open, "closing": link.close, "ending": link.goodbye}[what]
        over, _held = interrupted(call, at)
        if what != "ending":
            assert not link.is_open or link.monitor is not None, "half a connection"
            link.close()
            link.open()
        link.goodbye()
        return over

    return run


def of_a_call(what: str, kv: Client, fake: Running) -> Callable[[int], bool]:
    """Interrupt one call of a client; the next call must work."""

    def run(at: int) -> bool:
        fake.seen()  # read its output, or the fake would block
        request = kv.submit([4], max_tokens=len(TOKENS))
        call = {"submit": lambda: kv.submit([4], max_tokens=9), "result": request.result, "stats": kv.stats}[what]
        over, _held = interrupted(call, at)
        done = request.result()
        assert done.tokens == TOKENS and done.logprobs == (-0.5,) * len(TOKENS), done
        assert kv.stats().boot == "b"
        return over

    return run


def main(what: str, folder: Path, stride: int) -> None:
    at = 0
    with Running(folder) as fake, Client(fake.endpoint, timeout_s=20, stream_timeout_s=20, reconnect_s=600) as kv:
        calls = what in ("submit", "result", "stats")
        run = of_a_call(what, kv, fake) if calls else of_a_link(what, folder)
        while True:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            if run(at):
                break
            at += stride
    print(at)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
