"""How the GPU benchmarks time, all of them: calls in a graph, replayed; a number is the median over the replays.

What is compared is replayed alternately, so that a change of the clock meets all of it. Events of the device begin and
end a replay, so that the host's time does not count. On a CPU the same functions run, for a trial of a benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from worker.device.capture import Captured
from worker.device.device import Device
from worker.device.queue import Mark

WARM = 2  # replays that do not count
GRAPH_MS = 4.0  # a graph of as many calls takes about so long: long beside what an event costs

Call = Callable[[int], object]  # with the number of one of several sets of tensors


@dataclass(frozen=True)
class Replayed:
    """A graph, and how many calls it holds."""

    captured: Captured
    calls: int


def captured(device: Device, run: Callable[[], object], calls: int) -> Replayed:
    """run: queues `calls` calls. It is called twice: what it compiles and allocates is there when it is captured."""

    def queue() -> None:
        run()

    return Replayed(device.capture(queue, device.graph_memory()), calls)


def captured_in_turn(device: Device, call: Call, sets: int, rounds_min: int = 1) -> Replayed:
    """Calls on each of `sets` sets in turn, `rounds_min` times at least, and for about GRAPH_MS.

    So no set is still in a cache when its turn comes again, if all of them together are larger than it.
    """

    def one_round() -> None:
        for number in range(sets):
            call(number)

    one_round()
    begin = Mark(device, timed=True)
    one_round()
    end = Mark(device, timed=True)
    end.wait()
    rounds = max(rounds_min, round(GRAPH_MS / max(end.ms_since(begin), 1e-3)))

    def run() -> None:
        for _ in range(rounds):
            one_round()

    return captured(device, run, rounds * sets)


def medians_us(device: Device, graphs: Mapping[str, Replayed], repeats: int) -> dict[str, float]:
    """Median microseconds of one call of each, replayed alternately, `repeats` times each."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(WARM + repeats):
        for name, graph in graphs.items():
            begin = Mark(device, timed=True)
            graph.captured.replay()
            end = Mark(device, timed=True)
            end.wait()
            if turn >= WARM:
                times[name].append(end.ms_since(begin) * 1e3 / graph.calls)
    return {name: statistics.median(each) for name, each in times.items()}


def measure_us(device: Device, run: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Median microseconds of one of the `calls` calls that `run` queues."""
    return medians_us(device, {"": captured(device, run, calls)}, repeats)[""]
