"""The journal's part of a turn: two coordinators in one process, with a journal and without, turn by turn.

    python -m benchmarks.journal_turn [--sequences 16 256 1024 4096] [--steps 300] [--rounds 5] [--json FILE]

Both decode the same N sequences, as in `benchmarks.control_plane`, with durability "process". Each step is one turn of
one and one of the other, in changing order, and its difference is the journal's part: what slows the machine for longer
than a step slows both. Printed are the least and the middle of the rounds' medians of these differences, and of the
turns themselves. The write of the record to its segment, after the turn, is not in them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvforge.coordinator.core.limits import Limits
from kvforge.protocol import codec
from kvforge.protocol.messages import WORKER_REPLIES, Hello, Step, WorkerHello

from .control_plane import PROMPT_TOKENS, WARM_STEPS, Answerer, Shell, limits, ready, submissions
from .report import report


class Decoding:
    """A coordinator with N decoding requests."""

    def __init__(self, folder: Path, sequences: int, steps: int, bounds: Limits, durability: str) -> None:
        self.shell, self._sequences = Shell(folder, bounds, durability), sequences
        self._answerer, self._decoder = Answerer(), codec.Decoder(WORKER_REPLIES)
        self.shell.worker.send_multipart(codec.encode(WorkerHello(rid=1, name="w", pid=1)))
        self.shell.worker.send_multipart(codec.encode(ready(bounds)))
        self.shell.client.send_multipart(codec.encode(Hello(rid=1)))
        for message in submissions(sequences, steps, PROMPT_TOKENS):
            self.shell.client.send_multipart(codec.encode(message))
        while self.shell.machine.admission.running_total < sequences:
            self.shell.turn()

    def step(self) -> float:
        """Apply results until one is of all sequences; return the microseconds of its turn."""
        while True:
            step = self._decoder.decode(self.shell.receive_as_worker())
            if not isinstance(step, Step):
                continue
            while self.shell.client.poll(0):
                self.shell.client.recv_multipart()
            self.shell.worker.send_multipart(codec.encode(self._answerer.answer(step, 1)))
            spent = self.shell.turn_until_settled()
            if step.slots.size == self._sequences and step.counts.max() == 1:
                return spent


def pairs(sequences: int, steps: int) -> list[tuple[float, float]]:
    """Return the microseconds of each pair of turns: without a journal, and with one."""
    rounds = steps + WARM_STEPS
    bounds = limits(sequences, rounds, PROMPT_TOKENS)
    with ExitStack() as stack:
        both = []
        for durability in ("none", "process"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-bench-")))
            both.append(Decoding(folder, sequences, rounds, bounds, durability))
            stack.callback(both[-1].shell.close)
        plain, journaled = both
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            found = []
            for number in range(rounds):
                if number % 2:
                    with_it, without = journaled.step(), plain.step()
                else:
                    without, with_it = plain.step(), journaled.step()
                found.append((without, with_it))
        finally:
            gc.enable()
            gc.unfreeze()
    return found[WARM_STEPS:]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.journal_turn", description=__doc__)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    rows: list[list[object]] = []
    results: list[dict[str, Any]] = []
    for sequences in options.sequences:
        medians: dict[str, list[float]] = {"without_us": [], "with_us": [], "part_us": []}
        for _ in range(options.rounds):
            found = pairs(sequences, options.steps)
            medians["without_us"].append(statistics.median(without for without, _ in found))
            medians["with_us"].append(statistics.median(with_it for _, with_it in found))
            medians["part_us"].append(statistics.median(with_it - without for without, with_it in found))
        results.append({"sequences": sequences, "medians": medians})
        rows.append([sequences, *(f"{min(each):.1f} / {statistics.median(each):.1f}" for each in medians.values())])
    header = ["sequences", "turn without a journal, us", "turn with it, us", "the journal's part, us"]
    report("the journal's part of a turn: least / middle of the rounds' medians", header, rows, results, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
