"""The tenants of sessions: `a`, or `a:0.7,b:0.3`."""

from __future__ import annotations

import math

import numpy as np

from kvforge.protocol.errors import InvalidRequest

from . import draws


class Tenants:
    """Assigns each session to a tenant, drawn by their shares.

    Raises:
        InvalidRequest: The shares are malformed.
    """

    def __init__(self, text: str, seed: int) -> None:
        self._names: list[str] = []
        shares: list[float] = []
        for part in text.split(","):
            name, colon, share = part.strip().rpartition(":")
            try:
                self._names.append(name if colon else share)
                shares.append(float(share) if colon else 1.0)
            except ValueError:
                shares.append(0.0)
            if not (self._names[-1] and math.isfinite(shares[-1]) and shares[-1] > 0):
                raise InvalidRequest(
                    "tenant", f"invalid tenant {part!r} (expected NAME, or NAME:SHARE with a share above 0)"
                )
        if len(set(self._names)) < len(self._names):
            raise InvalidRequest("tenant", f"{text!r} names a tenant twice")
        self._bounds = np.cumsum(shares) / sum(shares)
        self._key = draws.key(seed, draws.TENANTS)

    def of(self, index: int) -> str:
        """Return the tenant of session `index`."""
        if len(self._names) == 1:
            return self._names[0]
        drawn = int(draws.noise(self._key, np.array([index]))[0]) / 2.0**64
        return self._names[min(int(np.searchsorted(self._bounds, drawn, "right")), len(self._names) - 1)]
