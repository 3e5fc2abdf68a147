"""The service level objective: `--slo ttft=500ms,itl=50ms,e2e=10s`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvforge.protocol.errors import InvalidRequest

from .outcome_columns import OutcomeColumns
from .span import BoolArray

UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
BOUNDS = {"ttft": "time to first token", "itl": "mean time between tokens", "e2e": "end to end"}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s|m)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Upper bounds in seconds; None for no bound. A request meets it if it finishes within all bounds.

    `itl_s` bounds the mean time between the tokens of a request; single late tokens show in the percentiles.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse NAME=TIME,...; NAME is ttft, itl or e2e.

        Raises:
            InvalidRequest: Names `slo`.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            bound, equals, time = (word.strip() for word in part.partition("="))
            if bound not in BOUNDS or not equals:
                raise InvalidRequest(
                    "slo", f"invalid bound {part!r} (expected NAME=TIME with a NAME of {', '.join(BOUNDS)})"
                )
            if bound in found:
                raise InvalidRequest("slo", f"has {bound} twice")
            match = _TIME.fullmatch(time)
            if match is None or not float(match[1]):
                raise InvalidRequest(
                    "slo",
                    f"invalid time in {part!r} (expected a number above 0 and a unit: us, ms, s, m)",
                )
            found[bound] = float(match[1]) * UNITS_S[match[2]]
        return cls(**{f"{bound}_s": seconds for bound, seconds in found.items()})

    def stated_ms(self) -> dict[str, float]:
        """Return the stated bounds by name, in milliseconds."""
        bounds = {"ttft": self.ttft_s, "itl": self.itl_s, "e2e": self.e2e_s}
        return {bound: round(seconds * 1e3, 6) for bound, seconds in bounds.items() if seconds is not None}

    def met(self, requests: OutcomeColumns) -> BoolArray:
        """Return which requests meet it, [requests] bool. A request of one token meets any `itl`."""
        met = requests.finished.copy()
        if self.ttft_s is not None:
            met &= requests.first_s <= self.ttft_s
        if self.itl_s is not None:
            met &= np.isnan(requests.gap_s) | (requests.gap_s <= self.itl_s)
        if self.e2e_s is not None:
            met &= requests.whole_s <= self.e2e_s
        return met
