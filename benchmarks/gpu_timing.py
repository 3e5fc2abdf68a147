"""Timing for all GPU benchmarks: replay a graph of calls; each figure is the median over the replays.

The compared graphs are replayed alternately, so that a change of the clock affects all alike. Device events begin and
end a replay, so that the host's time does not count. On a CPU the same functions run, to try a benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvforge.worker.device.capture import Captured
from kvforge.worker.device.device import Device
from kvforge.worker.device.queue import DeviceEvent

WARM = 2  # warm-up replays
GRAPH_MS = 4.0  # duration of a graph: long beside the cost of an event

Call = Callable[[int], object]  # with the number of one of several sets of tensors


@dataclass(frozen=True)
class Replayed:
    """A graph, and how many calls it holds."""

    captured: Captured
    calls: int


def captured(device: Device, run: Callable[[], object], calls: int) -> Replayed:
    """Capture `run`, which queues `calls` calls. A first call of `run` compiles and allocates before the capture."""

    def queue() -> None:
        run()

    return Replayed(device.capture(queue, device.graph_memory()), calls)


def captured_in_turn(device: Device, call: Call, sets: int, rounds_min: int = 1) -> Replayed:
    """Calls on each of `sets` sets in turn, `rounds_min` times at least, and for about GRAPH_MS.

    If the sets together exceed the cache, no set is still cached when its turn comes again.
    """

    def one_round() -> None:
        for number in range(sets):
            call(number)

    one_round()
    begin = DeviceEvent(device, timed=True)
    one_round()
    end = DeviceEvent(device, timed=True)
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
            begin = DeviceEvent(device, timed=True)
            graph.captured.replay()
            end = DeviceEvent(device, timed=True)
            end.wait()
            if turn >= WARM:
                times[name].append(end.ms_since(begin) * 1e3 / graph.calls)
    return {name: statistics.median(each) for name, each in times.items()}


def measure_us(device: Device, run: Callable[[], object], calls: int, repeats: int = 9) -> float:
    """Median microseconds of one of the `calls` calls that `run` queues."""
    return medians_us(device, {"": captured(device, run, calls)}, repeats)[""]
