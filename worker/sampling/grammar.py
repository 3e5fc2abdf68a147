"""Which tokens a row may choose from where its request has a grammar: a matcher of llguidance for each, and its masks.

A matcher follows the answer's tokens: those that the row begins with, then each that the host learns of. So its state
can always be made of the tokens again, and it is nowhere kept. A grammar is compiled once and copied for each row.
Before that another process tries it within limits of time and memory, and steps go on meanwhile: a row that would
choose before the answer is known is put off (`GrammarUntried`).
Masks are made by threads of llguidance's own; none of them runs Python.
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
COMPILED_MAX = 32  # grammars that are kept as they were compiled
THREADS_MAX = 8
CONTRADICTS = "doesn't satisfy the grammar"  # in what a matcher says of a token


class GrammarUntried(WorkerError):
    """The row's grammar is being tried: the row is to be computed again in again_ms."""

    def __init__(self, waited_s: float) -> None:
        super().__init__("the grammar is being tried")
        self.again_ms = round(min(max(AGAIN_MS_MIN, 500 * waited_s), AGAIN_MS_MAX))


@dataclass(eq=False)
class Shaped:
    """A row with a grammar. generated: [n] int32, what it begins after. awaited: tokens chosen that are not known yet.

    matcher: None until it is compiled. problem: why the row cannot go on. trial: why another process refuses the
    grammar, "" where it does not, None while that is not known.
    """

    grammar: Grammar
    generated: Int32Array
    awaited: int = 0
    matcher: LLMatcher | None = None
    problem: KvforgeError | None = None
    trial: str | None = None

    def accept(self, token: int) -> None:
        """The row has chosen this token. One after the answer's end, of a step that was on its way, is ignored."""
        if self.matcher is None or self.problem is not None or self.matcher.is_stopped():
            return
        if not self.matcher.consume_token(token):
            self.problem = self.stuck(f"token {token} was chosen, which the grammar does not allow")

    def stuck(self, contradiction: str) -> KvforgeError:
        """Why the matcher does not go on: what is said, or a limit that the grammar has come to."""
        assert self.matcher is not None
        told = self.matcher.get_error()
        if CONTRADICTS in told or not told:
            return WorkerError(contradiction)
        return InvalidRequest(FIELDS[self.grammar.kind], f"cannot go on: {explained(told)}")


class Grammars:
    """The rows with grammars, by slot. Not thread-safe."""

    def __init__(
        self,
        slots_max: int,
        vocab_size: int,
        tokens: Callable[[], GrammarTokens],
        agree: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        """tokens: makes the vocabulary when the first grammar needs it. agree: gives all ranks rank 0's numbers, where
        there are several; the same rows ask on each."""
        self.words = -(-vocab_size // WORD_BITS)
        self._tokens, self._agree = tokens, agree
        self._of: dict[int, Shaped] = {}
        self._holds = np.zeros(slots_max, np.bool_)
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._new: dict[int, Shaped] = {}
        self._executor: LLExecutor | None = None

    def __bool__(self) -> bool:
        """Whether any slot has one."""
        return bool(self._of)

    def holds(self, slots: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Which of the slots have a grammar: [n] bool."""
        return self._holds[slots]

    def row(self, slot: int) -> Shaped:
        """The row in a slot that has a grammar."""
        return self._of[slot]

    def prepare(self) -> str:
        """Make the vocabulary and start the trials' process now. Why there is none, or ""."""
        made = self._tokens()
        if made.trials is not None:
            made.trials.start()
        return made.problem

    def begin(self, slot: int, grammar: Grammar | None, generated: Int32Array) -> None:
        """A slot changes hands. `compile` does what takes time."""
        self._holds[slot] = grammar is not None
        self._of.pop(slot, None)
        self._new.pop(slot, None)
        if grammar is not None:
            self._of[slot] = self._new[slot] = Shaped(grammar, generated.copy())

    def forget(self) -> None:
        """No slot has any."""
        self._holds[:] = False
        self._of, self._new = {}, {}

    def submit(self, slots: Collection[int]) -> None:
        """Have the grammars of those rows tried that have begun; `compile` reads the answers."""
        for slot in self._new.keys() & slots:
            self._try(self._new[slot])

    def wait(self, seconds: float) -> None:
        """Wait for the trials, no longer than this."""
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
            choosing: The rows that are to choose a token now; None: all rows.

        Returns:
            The error of a row's grammar, by slot; GrammarUntried where a row would choose before the verdict.
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
                    raise row.stuck("the answer so far is not what its grammar allows")
            except KvforgeError as error:
                row.problem = problems[slot] = error
        return problems

    def fill(self, rows: Sequence[Shaped], masks: Int32Array) -> dict[int, KvforgeError]:
        """Writes which tokens each row may choose: masks [n, words] int32, bit t % 32 of word t // 32 for token t.

        Rows that cannot go on are told, by their place; their masks mean nothing.
        """
        sound = [
            (row.matcher, place) for place, row in enumerate(rows) if row.problem is None and row.matcher is not None
        ]
        if sound:
            self._threads().unsafe_compute_mask_ptr(sound, masks.ctypes.data, masks.strides[0], len(masks))
        for matcher, place in sound:
            if matcher.is_error():
                rows[place].problem = rows[place].stuck("what was chosen is not what its grammar allows")
        return {place: row.problem for place, row in enumerate(rows) if row.problem is not None}

    def _try(self, row: Shaped) -> int:
        """Return the verdict on a row's grammar. It is ACCEPTED, too, where no trial is needed to find an error."""
        trials = None if row.grammar in self._compiled else self._tokens().trials
        if trials is None:
            return ACCEPTED
        if row.trial is None:
            try:
                row.trial = trials.problem(compiled_text(row.grammar))
            except InvalidRequest:
                row.trial = ""
        return UNKNOWN if row.trial is None else REFUSED if row.trial else ACCEPTED

    def _matcher(self, row: Shaped, verdict: int) -> LLMatcher:
        """Raises InvalidRequest naming what is wrong, GrammarUntried."""
        grammar = row.grammar
        if verdict == UNKNOWN:
            trials = self._tokens().trials
            raise GrammarUntried(0.0 if trials is None else trials.waited_s(compiled_text(grammar)))
        if verdict == REFUSED:
            raise InvalidRequest(FIELDS[grammar.kind], row.trial or "is refused by the first of the ranks")
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            self._compiled[grammar] = found
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """Raises InvalidRequest naming what is wrong."""
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
