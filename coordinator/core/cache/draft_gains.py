"""The gains of a draft model, measured: tokens and times of steps that verify its drafts, and of steps without any.

An estimated gain has errors where the costs of other numbers of rows are carried over. Therefore, for each number of
rows, up to a factor of two, the time from result to result is kept, of steps without drafts that overlap, and of
steps that verify drafts and ask for others, with what their own passes took. Some steps take many times as long as
others, as where a graph is captured: without drafts the shortest of the first three counts, and with drafts no more
than twice the shortest.
"""

from __future__ import annotations

SIZES = 17  # bit lengths of numbers of rows; the last one is of all greater numbers
UNKNOWN = -1
PLAIN_FIRST = 3  # steps without drafts before drafts are compared with them
PLAIN_OF = 6  # their averaging window
CYCLES = 6  # steps with drafts before they are compared
CYCLES_OF = 32  # their window: then all count half
GAIN_OF = 64  # drafts lose if they gain less than 1 / GAIN_OF
TOKEN = 1 << 10  # units of a token


def size_of(rows: int) -> int:
    """Return the place of a number of rows in the lists of measurements."""
    return min(rows.bit_length(), SIZES - 1)


class DraftGains:
    """The measurements of a group, by the bit length of the rows of a step.

    Attributes:
        plain_us: The time of a step without drafts; UNKNOWN before the first.
        plain_seen: How many were measured, up to PLAIN_FIRST.
        cycles: Steps with drafts.
        tokens: Their tokens of a row, in 1 / TOKEN.
        took_us: Their times.
        least_us: The shortest of these; 0 before the first.
        until: The step up to which there are no drafts, because they lost.
        waits: How often in a row they lost.
    """

    def __init__(self) -> None:
        self.plain_us, self.plain_seen = [UNKNOWN] * SIZES, [0] * SIZES
        self.cycles, self.tokens, self.took_us = [0] * SIZES, [0] * SIZES, [0] * SIZES
        self.least_us, self.until, self.waits = [0] * SIZES, [0] * SIZES, [0] * SIZES

    def add_plain(self, rows: int, elapsed_us: int) -> None:
        """Add a step without drafts that overlapped another one."""
        size, elapsed_us = size_of(rows), max(1, elapsed_us)
        before = self.plain_us[size]
        if self.plain_seen[size] < PLAIN_FIRST:
            self.plain_seen[size] += 1
            self.plain_us[size] = elapsed_us if before == UNKNOWN else min(before, elapsed_us)
        else:
            self.plain_us[size] += (min(elapsed_us, 2 * before) - before) // PLAIN_OF

    def add_drafted(self, rows: int, tokens: int, elapsed_us: int) -> None:
        """Add a step that verified drafts and asked for others. elapsed_us: also of the passes behind it."""
        size, elapsed_us = size_of(rows), max(1, elapsed_us)
        self.least_us[size] = least_us = min(self.least_us[size] or elapsed_us, elapsed_us)
        self.cycles[size] += 1
        self.tokens[size] += TOKEN * tokens // rows
        self.took_us[size] += min(elapsed_us, 2 * least_us)
        if self.cycles[size] >= CYCLES_OF:
            for sums in (self.cycles, self.tokens, self.took_us):
                sums[size] //= 2
        if self.cycles[size] >= CYCLES and not self.loses(rows):
            self.waits[size] = 0

    def knows(self, rows: int) -> bool:
        """Return whether steps of so many rows without drafts were measured."""
        return self.plain_seen[size_of(rows)] == PLAIN_FIRST

    def loses(self, rows: int) -> bool:
        """Return whether steps of so many rows with drafts gain too little."""
        size = size_of(rows)
        without_us = self.tokens[size] * self.plain_us[size] // TOKEN  # for as many tokens
        return self.cycles[size] >= CYCLES and GAIN_OF * without_us < (GAIN_OF + 1) * self.took_us[size]

    def put_off(self, rows: int, step: int, trials: int, most: int) -> None:
        """Have no drafts for a while, so that what was lost is little of the time until they are tried again.

        Args:
            rows: The rows, which lost.
            step: The next step.
            trials: The loss is at most 1 / trials of that time.
            most: The longest wait, in steps.
        """
        size = size_of(rows)
        plain_us = self.plain_us[size]
        lost_us = max(0, self.took_us[size] - self.tokens[size] * plain_us // TOKEN)
        wait = (trials * lost_us // plain_us + trials) << self.waits[size]
        self.until[size] = step + min(wait, most)
        self.waits[size] = min(self.waits[size] + 1, 4)
        self.cycles[size] = self.tokens[size] = self.took_us[size] = self.least_us[size] = 0
