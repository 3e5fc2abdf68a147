"""Guided decoding: the tokens that a row may sample under its grammar, from a matcher of llguidance per row.

A matcher follows the answer's tokens: the initial ones of the row, then each sampled token that the host learns. Its
state can therefore always be rebuilt from the tokens and is not stored. A grammar is compiled once and copied for each
row. Before that, another process tries it within limits of time and memory while steps go on. A row that would sample
before the verdict is postponed (`GrammarUntried`). llguidance computes masks on its own threads, without Python.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvforge.protocol.errors import InvalidRequest, KvforgeError, WorkerError
from kvforge.protocol.messages import Grammar, Int32Array
from kvforge.text.grammar import FIELDS, compiled_text, explained, limits, overlooked

from .grammar_tokens import GrammarTokens
from .sampler import WORD_BITS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

UNKNOWN, ACCEPTED, REFUSED = range(3)
AGAIN_MS_MIN, AGAIN_MS_MAX = 20, 500
COMPILED_MAX = 32  # compiled grammars in the cache
THREADS_MAX = 8
CONTRADICTS = "doesn't satisfy the grammar"  # in the matcher's error for a rejected token


class GrammarUntried(WorkerError):
    """The row's grammar is still being tried; compute the row again in `again_ms`."""

    def __init__(self, waited_s: float) -> None:
        super().__init__("the grammar is being tried")
        self.again_ms = round(min(max(AGAIN_MS_MIN, 500 * waited_s), AGAIN_MS_MAX))


@dataclass(eq=False)
class GrammarRow:
    """A row with a grammar.

    Attributes:
        grammar: The grammar.
        generated: [n] int32, the answer's tokens when the row began.
        awaited: Sampled tokens that the host does not know yet.
        matcher: None until the grammar is compiled.
        problem: The error that stops the row.
        trial: Why another process rejects the grammar; "" if it does not; None without a verdict.
    """

    grammar: Grammar
    generated: Int32Array
    awaited: int = 0
    matcher: LLMatcher | None = None
    problem: KvforgeError | None = None
    trial: str | None = None

    def accept(self, token: int) -> None:
        """Advance the matcher by a sampled token. A token of a step in flight after the answer's end is ignored."""
        if self.matcher is None or self.problem is not None or self.matcher.is_stopped():
            return
        if not self.matcher.consume_token(token):
            self.problem = self.stuck(f"token {token} was sampled, but the grammar does not allow it")

    def behind(self, token: int) -> GrammarRow | None:
        """Return a row of its own behind a drafted token; None if the grammar does not allow it."""
        if self.matcher is None or self.problem is not None:
            return None
        row = GrammarRow(self.grammar, self.generated, matcher=self.matcher.deep_copy())
        row.accept(token)
        return row if row.problem is None else None

    def stuck(self, contradiction: str) -> KvforgeError:
        """Return the error of a stopped matcher: the contradiction, or the limit that the grammar reached."""
        assert self.matcher is not None
        message = self.matcher.get_error()
        if CONTRADICTS in message or not message:
            return WorkerError(contradiction)
        return InvalidRequest(FIELDS[self.grammar.kind], f"cannot continue: {explained(message)}")


class Grammars:
    """The rows with grammars, by slot. Not thread-safe."""

    def __init__(
        self,
        slots_max: int,
        vocab_size: int,
        tokens: Callable[[], GrammarTokens],
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        """Store the settings; compile nothing.

        Args:
            slots_max: Slots are [0, slots_max).
            vocab_size: Size of the model's vocabulary.
            tokens: Makes the vocabulary when the first grammar needs it.
            agree: With several ranks, replaces each rank's numbers by rank 0's. All ranks call it for the same rows.
        """
        self.words = -(-vocab_size // WORD_BITS)
        self._tokens, self._agree = tokens, agree
        self._of: dict[int, GrammarRow] = {}
        self._holds = np.zeros(slots_max, np.bool_)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._new: dict[int, GrammarRow] = {}
        self._executor: LLExecutor | None = None

    def __bool__(self) -> bool:
        """Whether any slot has a grammar."""
        return bool(self._of)

    def holds(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of the slots that have a grammar."""
        return self._holds[slots]

    def row(self, slot: int) -> GrammarRow:
        """Return the row in a slot that has a grammar."""
        return self._of[slot]

    def prepare(self) -> str:
        """Make the vocabulary and start the trial process. Return why grammars cannot be served, or ""."""
        made = self._tokens()
        if made.trials is not None:
            made.trials.start()
        return made.problem

    def begin(self, slot: int, grammar: Grammar | None, generated: Int32Array) -> None:
        """Assign a slot to a new request. `compile` does the slow work."""
        self._holds[slot] = grammar is not None
        self._of.pop(slot, None)
        self._new.pop(slot, None)
        if grammar is not None:
            self._of[slot] = self._new[slot] = GrammarRow(grammar, generated.copy())

    def forget(self) -> None:
        """Forget the grammars of all slots."""
        self._holds[:] = False
        self._of, self._new = {}, {}

    def submit(self, slots: Collection[int]) -> None:
        """Start the trials of new rows' grammars; `compile` reads the verdicts."""
        for slot in self._new.keys() & slots:
            self._try(self._new[slot])

    def wait(self, seconds: float) -> None:
        """Wait for the trials, for at most `seconds`."""
        trials = self._tokens().trials
        if trials is not None:
            trials.wait(seconds)

    def untried(self, slots: Collection[int]) -> bool:
        """Return whether any of the rows has a grammar without a verdict."""
        return any(self._try(self._new[slot]) == UNKNOWN for slot in self._new.keys() & slots)

    def compile(
        self, slots: Collection[int] | None = None, choosing: Collection[int] | None = None
    ) -> dict[int, KvforgeError]:
        """Make the matchers of the rows that have begun.

        Args:
            slots: The rows to compile; None: all rows.
            choosing: The rows that are to sample a token now; None: all rows.

        Returns:
            The errors of rows' grammars by slot; GrammarUntried if a row would sample before the verdict.
        """
        problems: dict[int, KvforgeError] = {}
        rows = sorted(slot for slot in self._new if slots is None or slot in slots)
        if not rows:
            return problems
        verdicts = [self._try(self._new[slot]) for slot in rows]
        if self._agree is not None:
            verdicts = self._agree(verdicts)
        for slot, verdict in zip(rows, verdicts, strict=True):
            row = self._new[slot]
            if verdict == UNKNOWN and choosing is not None and slot not in choosing:
                continue
            del self._new[slot]
            try:
                row.matcher = self._matcher(row, verdict)
                known = row.generated.tolist()
                if row.matcher.try_consume_tokens(known) < len(known):
                    raise row.stuck("the answer so far violates the grammar")
            except KvforgeError as error:
                row.problem = problems[slot] = error
        return problems

    def fill(self, rows: Sequence[GrammarRow], masks: Int32Array) -> dict[int, KvforgeError]:
        """Compute the token masks of rows.

        Args:
            rows: The rows.
            masks: [n, words] int32 to fill: bit t % 32 of word t // 32 allows token t.

        Returns:
            Errors of the rows that cannot continue, by index; their masks are undefined.
        """
        sound = [
            (row.matcher, place) for place, row in enumerate(rows) if row.problem is None and row.matcher is not None
        ]
        if sound:
            self._threads().unsafe_compute_mask_ptr(sound, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, place in sound:
            if matcher.is_error():
                rows[place].problem = rows[place].stuck("a sampled token violates the grammar")
        return {place: row.problem for place, row in enumerate(rows) if row.problem is not None}

    def _try(self, row: GrammarRow) -> int:
        """Return the verdict on a row's grammar. It is also ACCEPTED if no trial is needed to find an error."""
        trials = None if row.grammar in self._compiled else self._tokens().trials
        if trials is None:
            return ACCEPTED
        if row.trial is None:
            try:
                row.trial = trials.problem(compiled_text(row.grammar))
            except InvalidRequest:
                row.trial = ""
        return UNKNOWN if row.trial is None else REFUSED if row.trial else ACCEPTED

    def _matcher(self, row: GrammarRow, verdict: int) -> LLMatcher:
        """Return a new matcher for a row.

        Raises:
            InvalidRequest: The grammar is invalid; names the reason.
            GrammarUntried: There is no verdict yet.
        """
        grammar = row.grammar
        if verdict == UNKNOWN:
            trials = self._tokens().trials
            raise GrammarUntried(0.0 if trials is None else trials.waited_s(compiled_text(grammar)))
        if verdict == REFUSED:
            raise InvalidRequest(FIELDS[grammar.kind], row.trial or "was rejected by rank 0")
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar.

        Raises:
            InvalidRequest: The grammar is invalid; names the reason.
        """
        field, vocabulary = FIELDS[grammar.kind], self._tokens()
        if vocabulary.tokens is None:
            raise InvalidRequest(field, f"cannot be served: {vocabulary.problem}")
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary.tokens, compiled_text(grammar), log_level=0, limits=limits())
        wrong = matcher.get_error() if matcher.is_error() else overlooked(matcher.get_grammar_warnings())
        if wrong:
            raise InvalidRequest(field, explained(wrong))
        return matcher

    def _threads(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(min(THREADS_MAX, len(os.sched_getaffinity(0))))
        return self._executor
