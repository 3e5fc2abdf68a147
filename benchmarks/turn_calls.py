"""Calls and files of one steady decode turn in the coordinator: a result in, the next step out.

    python -m benchmarks.turn_calls [--sequences 256] [--journal]

Counted are entries of Python functions of kvforge, comprehensions and generators included (a comprehension is no call
since Python 3.12). Functions of the interpreter, of other packages and of this benchmark do not count. The turn is the
most frequent one of 32: in the others, rows also get blocks or full blocks are indexed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

from kvforge.protocol import codec
from kvforge.protocol.messages import WORKER_REPLIES, Hello, Step, WorkerHello

from . import control_plane

ROOT = Path(__file__).parents[1]
PARTS = ("coordinator", "protocol", "worker", "gateway", "loadtest", "kvforge")
TURNS = 32
WARM_TURNS = 8
Call = tuple[str, str]  # file, qualified name of the function


def counted(shell: control_plane.Shell) -> list[Call]:
    """Run one turn and return its calls in order."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and (file := _file_of(frame.f_code.co_filename)):
            calls.append((file, frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        shell.loop.turn(shell.now_us)
    finally:
        sys.setprofile(None)
    return calls


def _file_of(path: str) -> str:
    """Return the file of kvforge, relative to the repository; "" for any other file."""
    if not path.startswith(f"{ROOT}/"):
        return ""
    file = path[len(str(ROOT)) + 1 :]
    part, _, rest = file.partition("/")
    if part == "kvforge" and rest.partition("/")[0] in PARTS:  # the package's links to the folders at the top
        return rest
    return file if part in PARTS else ""


def steady_turn(sequences: int = 256, durability: str = "none") -> list[Call]:
    """Return the calls of the most frequent decode turn, in order.

    Args:
        sequences: Rows of each step.
        durability: "process" writes a journal, "none" does not.
    """
    steps = TURNS + WARM_TURNS
    bounds, answerer = control_plane.limits(sequences, steps, control_plane.PROMPT_TOKENS), control_plane.Answerer()
    decoder = codec.Decoder(WORKER_REPLIES)
    turns: list[list[Call]] = []
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        shell = control_plane.Shell(Path(folder), bounds, durability)
        try:
            shell.worker.send_multipart(codec.encode(WorkerHello(rid=1, name="w", pid=1)))
            shell.worker.send_multipart(codec.encode(control_plane.ready(bounds)))
            shell.client.send_multipart(codec.encode(Hello(rid=1)))
            for message in control_plane.submissions(sequences, steps, control_plane.PROMPT_TOKENS):
                shell.client.send_multipart(codec.encode(message))
            while shell.machine.admission.running_total < sequences:
                shell.turn()
            while len(turns) < steps:
                step = decoder.decode(shell.receive_as_worker())
                if not isinstance(step, Step):
                    continue
                decodes = step.slots.size == sequences and step.counts.max() == 1
                shell.worker.send_multipart(codec.encode(answerer.answer(step, 1)))
                before = shell.steps_settled
                while shell.steps_settled == before:
                    shell.now_us += 1000
                    while not shell.waiting(1):
                        pass
                    calls = counted(shell)
                if decodes:
                    turns.append(calls)
        finally:
            shell.close()
    usual, _ = Counter(map(len, turns[WARM_TURNS:])).most_common(1)[0]
    return next(calls for calls in turns[WARM_TURNS:] if len(calls) == usual)


def files_of(calls: list[Call]) -> list[str]:
    """Return the files of the calls, in the order of their first call."""
    return list(dict.fromkeys(file for file, _ in calls))


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turn_calls", description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--journal", action="store_true", help="write a journal for the process")
    options = parser.parse_args()
    calls = steady_turn(options.sequences, "process" if options.journal else "none")
    for file in files_of(calls):
        functions = Counter(name for called, name in calls if called == file)
        print(f"{sum(functions.values()):4}  {file}")
        for name, count in functions.items():
            print(f"          {count} x {name}")
    print(f"{len(calls):4}  calls in {len(files_of(calls))} files")


if __name__ == "__main__":
    main()
