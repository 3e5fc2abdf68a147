"""What a sampler is told of a row, in the argument `wanted`. For plain torch, Triton and Numba alike."""

from __future__ import annotations

ADVANCES = 1  # the row samples, and its slot advances
AHEAD = 2  # with the d drafts that the row is behind added: the row samples as if these were tokens of its slot
# 0: what the row samples is not read
