"""ServeGen's profiles: per client and time window, the rate and burstiness of arrivals and the lengths of requests.

Xiang et al., arXiv 2505.09999. Requests are drawn from these distributions. Of the fitted arrivals, the rate, the
coefficient of variation and the family (Gamma, Weibull) are used; the parameters of the fit are not documented.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from kvforge.protocol.errors import InvalidRequest

from . import draws
from .arrivals import CV_MAX, CV_MIN, REQUESTS_MAX, Arrivals
from .draws import FloatArray, IntArray
from .files import broken
from .lengths import LENGTH_MAX, Empirical
from .recorded import Recorded

RATES_HEADER = "chunk,timestamp_s,rate_rps,cv,dist"
WINDOW_S = 600.0
FAMILIES = {"Gamma": "gamma", "Weibull": "weibull"}


@dataclass(frozen=True, kw_only=True)
class Window:
    """One client in one window: arrivals from `start_s` on, for WINDOW_S seconds."""

    client: int
    start_s: float
    arrivals: Arrivals


def rates(file: str, lines: Iterable[tuple[int, str]]) -> list[Window]:
    """Return the windows with traffic, ordered by start.

    Raises:
        InvalidRequest: A row is malformed.
    """
    found = []
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers.append(number)
            yield line

    for row in csv.DictReader(texts()):
        try:
            rate, start_s = float(row["rate_rps"]), float(row["timestamp_s"])
            if rate == 0:
                continue
            family = FAMILIES.get(row["dist"])
            if family is None or not math.isfinite(start_s) or start_s < 0:
                raise ValueError(f"dist must be one of {', '.join(FAMILIES)} and timestamp_s 0 or more")
            arrivals = Arrivals(family, rate, cv=min(max(float(row["cv"]), CV_MIN), CV_MAX))
            found.append(Window(client=int(row["chunk"]), start_s=start_s, arrivals=arrivals))
        except (KeyError, TypeError, ValueError, InvalidRequest) as error:
            raise broken(file, numbers[-1], f"is not {RATES_HEADER}: {error}") from None
    if not found:
        raise InvalidRequest("trace", f"{file} contains no window with traffic")
    return sorted(found, key=lambda window: (window.start_s, window.client))


class _Counts(msgspec.Struct):
    input_tokens: str
    output_tokens: str


class _Client(msgspec.Struct):
    chunk: int
    windows: dict[str, _Counts]


class ClientLengths:
    """The lengths of each client's requests: distributions of input and output tokens for windows of several hours.

    Raises:
        InvalidRequest: A line is malformed.
    """

    def __init__(self, file: str, lines: Iterable[tuple[int, str]]) -> None:
        self._file = file
        self._found: dict[int, list[tuple[float, int, _Counts]]] = {}
        decoder = msgspec.json.Decoder(_Client)
        for number, line in lines:
            try:
                client = decoder.decode(line)
                windows = [(float(start), number, counts) for start, counts in client.windows.items()]
            except (msgspec.DecodeError, ValueError) as error:
                raise broken(file, number, str(error)) from None
            self._found[client.chunk] = sorted(windows, key=lambda window: window[0])
        self._parsed: dict[tuple[int, float], tuple[Empirical, Empirical]] = {}

    def of(self, client: int, at_s: float) -> tuple[Empirical, Empirical]:
        """Return the input and output lengths of a client at a time.

        Raises:
            InvalidRequest: There are no lengths for this time.
        """
        started = [window for window in self._found.get(client, []) if window[0] <= at_s]
        if not started:
            raise InvalidRequest("trace", f"{self._file} has no lengths of client {client} at {at_s:g} s")
        start_s, number, counts = started[-1]
        if (client, start_s) not in self._parsed:
            self._parsed[client, start_s] = (
                self._distribution(number, counts.input_tokens),
                self._distribution(number, counts.output_tokens),
            )
        return self._parsed[client, start_s]

    def _distribution(self, line: int, text: str) -> Empirical:
        """Parse `{length: probability, ...}`."""
        try:
            pairs = [pair.split(":") for pair in text.strip().removeprefix("{").removesuffix("}").split(",")]
            lengths, weights = [int(length) for length, _ in pairs], [float(weight) for _, weight in pairs]
            if not (sum(weights) > 0 and min(weights) >= 0 and 0 <= min(lengths) <= max(lengths) <= LENGTH_MAX):
                raise ValueError("lengths and probabilities must be 0 or more, and not all 0")
        except ValueError as error:
            raise broken(self._file, line, f"{text[:40]!r}... is not {{LENGTH: PROBABILITY, ...}}: {error}") from None
        return Empirical(lengths, weights)


def requests(
    windows: list[Window], lengths: ClientLengths | None, *, seed: int, end_s: float | None, count: int | None
) -> Recorded:
    """Draw requests from the windows, until `end_s` or `count`; one of them is required.

    A window has its rate times its length in requests, with the fraction rounded at random. Gaps are stretched to fill
    the window, so the rate holds for any burstiness. The classes are `client-N`.

    Raises:
        InvalidRequest: There are too many requests, or lengths are missing.
    """
    wanted = REQUESTS_MAX + 1 if count is None else count
    times: list[FloatArray] = []
    inputs: list[IntArray] = []
    outputs: list[IntArray] = []
    clients: list[IntArray] = []
    first_s, drawn, last_s = windows[0].start_s, 0, math.inf
    for window in windows:
        start_s = window.start_s - first_s
        # All clients of a window must be drawn before their requests can be ordered.
        if start_s > last_s or (end_s is not None and start_s >= end_s):
            break
        rng = np.random.default_rng((seed, draws.ARRIVALS, window.client, int(start_s)))
        made = start_s + _within(window.arrivals, rng)
        times.append(made)
        clients.append(np.full(len(made), window.client))
        if lengths is not None and len(made):
            of_input, of_output = lengths.of(window.client, window.start_s)
            inputs.append(of_input.draw(rng, len(made)))
            outputs.append(of_output.draw(rng, len(made)))
        drawn += len(made)
        if drawn >= wanted:
            last_s = start_s
    together = np.concatenate(times)
    order = np.argsort(together, kind="stable")[: int(np.searchsorted(np.sort(together), end_s or math.inf))][:wanted]
    if len(order) > REQUESTS_MAX:
        raise InvalidRequest("duration", f"exceeds {REQUESTS_MAX} requests: lower --rate-scale or give --requests")
    owners = np.concatenate(clients)[order]
    return Recorded(
        times=together[order],
        inputs=np.concatenate(inputs)[order] if inputs else None,
        outputs=np.concatenate(outputs)[order] if outputs else None,
        kinds=[f"client-{client}" for client in owners],
    )


def _within(arrivals: Arrivals, rng: np.random.Generator) -> FloatArray:
    """Draw arrivals within a window, [n] float64 seconds, ascending."""
    count = math.floor(arrivals.rate * WINDOW_S + rng.random())
    if count > 10 * REQUESTS_MAX:
        raise InvalidRequest("trace", f"the rate of one client is too high: {arrivals.rate:g} requests/s")
    ends = np.cumsum(np.maximum(arrivals.gaps(rng, count + 1), 1e-12))
    # The first gap began before the window, at a random point of the gap.
    return (ends[:count] - ends[0] * rng.random()) / ends[count] * WINDOW_S if count else np.zeros(0)
