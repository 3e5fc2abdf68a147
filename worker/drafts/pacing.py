"""When a draft model proposes, and how many tokens: its passes take time, which wrong or unused proposals waste.

The coordinator decides what is verified, and shows it by the drafts of later steps. After a few proposals that no step
takes there are none for 64 times as long as their passes took; the next time 128 times, up to 1,024. A worker that
gains nothing by drafts so loses less than 2 % of its time, and soon less than 0.1 %. A request gets about as many
tokens as were accepted of late, and a few more, but not many more than steps verify. Cheap passes are tried for longer:
the coordinator learns from the first proposals how often they are right, and three tell it little. So are new requests
where drafts were used, for the first proposals of each are only compared with its tokens. Unused proposals count as
many times as the fastest of them took, so that one slow pass, as the first is where kernels are compiled, causes no
long wait.
"""

from __future__ import annotations

from collections.abc import Iterable

TRIAL = 3  # proposals: the first is compared with the tokens, the second waited for, and the third verified
CHEAP_TRIAL = 6  # the same if a pass takes at most 1 / CHEAP of a step, or if the drafts before were used
CHEAP = 4
SLOWER = 16  # with each step, the shortest is taken to last 1 / SLOWER longer
SHARE_FIRST, SHARE_MAX = 64, 1024  # of the time of unused passes that follows without any
ACCEPTED_FIRST = 0.5  # accepted drafts of a step that are expected of a new request
DRAFTED_FIRST = 16.0  # verified drafts of a step that are expected of a new request
AVERAGED = 4  # the averaging window of accepted drafts, in steps
AVERAGED_OF_ALL = 16  # the same of those of all requests


class DraftPacing:
    """Decides for one worker; not thread-safe. Times are those of any monotonic clock, in nanoseconds."""

    def __init__(self) -> None:
        self._unused, self._fastest_ns = 0, 0  # proposals since the last one that a step verified, and passes of one
        self._used = 0  # verified proposals since the last wait
        self._share, self._from_ns = SHARE_FIRST, 0
        self._rows = 0  # rows of the last proposal
        self._step_ns = 0  # about the shortest of the model's last steps
        self._accepted: dict[int, float] = {}  # by slot: accepted drafts of a step, averaged
        self._of_all = ACCEPTED_FIRST  # the same of all slots
        self._drafted: dict[int, float] = {}  # by slot: verified drafts of a step, averaged
        self._pays = False  # whether drafts were used before the last wait

    def begin(self, slot: int) -> None:
        """Expect of a new request what others accepted. Where drafts were used of late, there is no wait for it."""
        self._accepted[slot] = self._of_all
        self._drafted.pop(slot, None)
        if self._pays:
            self._from_ns = 0

    def is_due(self, now_ns: int, rows: int) -> bool:
        """Return whether to propose now.

        Args:
            now_ns: The time.
            rows: Rows that could have proposals. With half of those of the last one or less, drafts may pay again.
        """
        return now_ns >= self._from_ns or 2 * rows <= self._rows

    def stepped(self, took_ns: int) -> None:
        """Note what a step of the model took."""
        longer_ns = self._step_ns + self._step_ns // SLOWER
        self._step_ns = min(took_ns, longer_ns) if self._step_ns else took_ns

    def proposed(self, now_ns: int, took_ns: int, rows: int, passes: int) -> None:
        """Note proposals of so many rows, and what their passes took in all."""
        self._fastest_ns = min(self._fastest_ns, took_ns) if self._unused else took_ns
        self._unused += 1
        self._rows = rows
        is_cheap = CHEAP * took_ns <= passes * self._step_ns
        self._pays = self._pays or self._used > 1
        if self._unused < (CHEAP_TRIAL if is_cheap or self._pays else TRIAL):
            return
        self._pays = self._used > 1
        if self._pays:
            self._share = SHARE_FIRST
        self._from_ns = now_ns + self._share * self._unused * self._fastest_ns
        self._share = min(2 * self._share, SHARE_MAX)
        self._unused = self._used = 0

    def verified(self, results: Iterable[tuple[int, int, int]]) -> None:
        """Learn from steps that verified proposals: (slot, drafted, accepted) each."""
        was_used = False
        for slot, drafted, accepted in results:
            was_used = True
            seen = accepted + (accepted == drafted)  # another one may have been right too
            most = self._drafted.get(slot, DRAFTED_FIRST)
            self._drafted[slot] = most + (drafted - most) / AVERAGED
            before = self._accepted.get(slot, ACCEPTED_FIRST)
            self._accepted[slot] = before + (seen - before) / AVERAGED
            self._of_all += (seen - self._of_all) / AVERAGED_OF_ALL
        if was_used:
            self._used += 1
            self._unused = self._from_ns = 0

    def count(self, slot: int) -> int:
        """Return how many tokens to propose for a slot."""
        likely = int(1.5 * self._accepted.get(slot, ACCEPTED_FIRST))
        return 2 + min(likely, int(self._drafted.get(slot, DRAFTED_FIRST)))

    def forget(self) -> None:
        """Forget all slots."""
        self._accepted.clear()
        self._drafted.clear()
