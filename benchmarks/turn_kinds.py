"""Cost of a decode turn by the kinds of layers of a model: full attention alone, and windows and states beside it.

    python -m benchmarks.turn_kinds [--sequences 256] [--steps 400] [--only NAME ...] [--calls] [--json FILE]

One coordinator for each kind, over real sockets, in one process and in turns, so that other load meets all of them
alike. The rows' lengths differ: in each turn a 16th of them gets blocks, and leaves window blocks behind. Times are
relative to full attention alone: a median, and a mean without the slowest hundredth, since some turns index or take
checkpoints. `--calls` prints the functions of the most frequent turn.

- windows: layers that see 128 tokens, five blocks for each block of tokens;
- states: 8 blocks of recurrent state a row, and checkpoints;
- three kinds: full attention, windows and states;
- full pool: no block is free, and each new one evicts what an earlier request left in the cache.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from kvforge.coordinator.core.cache.windows import ring_blocks
from kvforge.coordinator.core.limits import Limits
from kvforge.protocol import codec
from kvforge.protocol.messages import WORKER_REPLIES, Hello, Step, WorkerHello, WorkerReady

from . import control_plane, turn_calls
from .control_plane import BLOCK_SIZE
from .report import report

CACHED_TOKENS = 512  # of each earlier prompt
WARM_STEPS = 160  # more than a window, so that each row leaves window blocks behind
WINDOW, WINDOW_PAGES = 128, 5
STATE_BLOCKS, PROMPT_CHUNK = 8, 64
ROUND = 20  # turns of one coordinator before those of the next, so that most find their memory in the caches
STATES_EACH = 3  # of each row: its own, and two checkpoints


@dataclass(frozen=True)
class Kinds:
    """What a model has beside full attention; `full`: no block of the pool is free."""

    windows: bool = False
    states: bool = False
    full: bool = False


MODELS = {
    "one kind": Kinds(),
    "windows": Kinds(windows=True),
    "states": Kinds(states=True),
    "three kinds": Kinds(windows=True, states=True),
    "one kind, full pool": Kinds(full=True),
    "windows, full pool": Kinds(windows=True, full=True),
}


def bounds_of(kinds: Kinds, sequences: int, steps: int) -> Limits:
    """Return limits with room for all rows."""
    limits = control_plane.limits(sequences, steps + WARM_STEPS, control_plane.PROMPT_TOKENS)
    blocks = limits.bounds.blocks_max
    if kinds.windows:
        blocks *= 1 + WINDOW_PAGES
    if kinds.states:
        blocks += sequences * STATE_BLOCKS * STATES_EACH
    if kinds.full:
        blocks *= 2
    return structs.replace(limits, bounds=structs.replace(limits.bounds, blocks_max=blocks))


def ready(kinds: Kinds, limits: Limits) -> WorkerReady:
    """Return the announcement of a worker."""
    message = control_plane.ready(limits)
    if kinds.windows:
        width = limits.bounds.blocks_per_sequence_max
        ring = ring_blocks(WINDOW, limits.schedule.window_ahead, BLOCK_SIZE, width)
        message = structs.replace(message, window=WINDOW, window_pages=WINDOW_PAGES, window_blocks=ring)
    if kinds.states:
        message = structs.replace(message, state_blocks=STATE_BLOCKS, wants_kinds=True, prompt_chunk=PROMPT_CHUNK)
    return message


class Coordinator:
    """A coordinator whose worker answers at once, up to a turn of all rows' decodes."""

    def __init__(self, folder: Path, kinds: Kinds, sequences: int, steps: int) -> None:
        limits = bounds_of(kinds, sequences, steps)
        self._sequences, self._shell = sequences, control_plane.Shell(folder, limits)
        self._answerer, self._decoder = control_plane.Answerer(), codec.Decoder(WORKER_REPLIES)
        shell = self._shell
        shell.worker.send_multipart(codec.encode(WorkerHello(rid=1, name="w", pid=1)))
        shell.worker.send_multipart(codec.encode(ready(kinds, limits)))
        shell.client.send_multipart(codec.encode(Hello(rid=1)))
        if kinds.full:
            self._leave_cached()
        for message in control_plane.submissions(sequences, steps + WARM_STEPS, control_plane.PROMPT_TOKENS):
            shell.client.send_multipart(codec.encode(message))
        while shell.machine.admission.running_total < sequences:
            shell.turn()
        for _ in range(WARM_STEPS):
            self.turn_us()
        if kinds.full:
            pool = shell.machine.cache.groups[0].pool
            pool.allocate(1, pool.free)

    def _leave_cached(self) -> None:
        """Serve prompts that no later request shares; they end with their first token."""
        shell = self._shell
        for message in control_plane.submissions(self._sequences, 1, CACHED_TOKENS):
            shell.client.send_multipart(codec.encode(structs.replace(message, max_tokens=1)))
        while shell.machine.admission.running_total < self._sequences:
            shell.turn()
        while shell.machine.admission.running_total:
            self._answered()
            shell.turn_until_settled()

    def _answered(self) -> bool:
        """Answer the next step; return whether it was of all rows' decodes."""
        shell = self._shell
        while not isinstance(step := self._decoder.decode(shell.receive_as_worker()), Step):
            pass
        while shell.client.poll(0):
            shell.client.recv_multipart()
        shell.worker.send_multipart(codec.encode(self._answerer.answer(step, 1)))
        return step.slots.size == self._sequences and int(step.counts.max()) == 1

    def turn_us(self) -> float:
        """Return microseconds of the next turn that applies the result of a step of all rows' decodes."""
        while True:
            decodes, spent = self._answered(), self._shell.turn_until_settled()
            if decodes:
                return spent

    def calls(self) -> list[turn_calls.Call]:
        """Return the calls of the next such turn, in order."""
        shell = self._shell
        while True:
            decodes, before = self._answered(), shell.steps_settled
            while shell.steps_settled == before:
                shell.now_us += 1000
                while not shell.waiting(1):
                    pass
                calls = turn_calls.counted(shell)
            if decodes:
                return calls

    def close(self) -> None:
        """Close the sockets."""
        self._shell.close()


def measure(
    names: list[str], sequences: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, list[list[turn_calls.Call]]]]:
    """Return microseconds of each turn, and the calls of further turns, by kinds."""
    taken: dict[str, list[float]] = {name: [] for name in names}
    calls: dict[str, list[list[turn_calls.Call]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="kvf-bench-") as folder:
        coordinators: dict[str, Coordinator] = {}
        try:
            for number, name in enumerate(names):
                own = Path(folder, str(number))
                own.mkdir()
                coordinators[name] = Coordinator(own, MODELS[name], sequences, steps + turn_calls.TURNS)
            gc.collect()
            gc.disable()
            for _ in range(steps // ROUND):
                for name, coordinator in coordinators.items():
                    taken[name] += [coordinator.turn_us() for _ in range(ROUND)]
            for name, coordinator in coordinators.items():
                calls[name] = [coordinator.calls() for _ in range(turn_calls.TURNS)]
        finally:
            gc.enable()
            for coordinator in coordinators.values():
                coordinator.close()
    return taken, calls


def usual(turns: list[list[turn_calls.Call]]) -> list[turn_calls.Call]:
    """Return the calls of the most frequent turn."""
    count, _ = Counter(map(len, turns)).most_common(1)[0]
    return next(calls for calls in turns if len(calls) == count)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turn_kinds", description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--calls", action="store_true", help="print the functions of the most frequent turn")
    parser.add_argument("--json", help="write the results here too")
    options = parser.parse_args()
    taken, calls = measure(options.only, options.sequences, options.steps)
    rows: list[list[object]] = []
    results: list[dict[str, object]] = []
    first = None
    for name, times in taken.items():
        low = np.sort(times)[: max(1, int(len(times) * 0.99))]
        found = {"p50_us": float(np.median(times)), "mean_us": float(low.mean())}
        first = first or found
        relative = {f"{key}_ratio": found[key] / first[key] for key in found}
        mean_calls = float(np.mean([len(each) for each in calls[name]]))
        results.append({"kinds": name, "calls": len(usual(calls[name])), "calls_mean": mean_calls} | found | relative)
        shown = [f"{found[key]:.0f} us, x {found[key] / first[key]:.2f}" for key in found]
        rows.append([name, *shown, len(usual(calls[name])), f"{mean_calls:.0f}"])
        if options.calls:
            for (file, function), count in Counter(usual(calls[name])).items():
                print(f"{count:5} x {file} {function}")
    title = f"a decode turn of {options.sequences} rows by kinds of layers"
    report(title, ["kinds", "p50", "mean", "calls", "calls, mean"], rows, results, options.json)


if __name__ == "__main__":
    main()
