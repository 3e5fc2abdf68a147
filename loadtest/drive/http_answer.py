"""Parses one streamed answer, in pieces of any size, into the outcome of its request. It does no I/O.

Invariants: an answer ends once, and its size is bounded, whatever the server sends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvforge.protocol.errors import ProtocolError

from .http_wire import DONE, MESSAGE_CHARS_MAX, Event, Usage, encode, error_of, event
from .outcome import FAILED, FINISHED, REFUSED, Outcome

LINE_BYTES_MAX = 8 << 20  # with token ids, a server may repeat the prompt in one line
ERROR_BYTES_MAX = 64 << 10
# Events beyond the requested tokens: some servers send extra ones before the first or after the last token.
EVENTS_SPARE = 64
LOST: Final = "connection_lost"
Held = Callable[[Outcome, str], None]
OK = 200
REFUSALS = (429, 503)
LENGTH = "length"


class Answer:
    """The answer to one request.

    Args:
        outcome: The outcome to fill in.
        start: Subtracted from all times.
        whole: Whether fewer tokens than requested are a failure, because the server ignores the end token.
        held: Receives the text of a finished answer; None if it is not needed.

    Attributes:
        end: The final state, code and message; None while the answer continues.
        done: Whether the server has sent its end marker.
    """

    __slots__ = (
        "_counted",
        "_held",
        "_last_s",
        "_outcome",
        "_pieces",
        "_reason",
        "_rest",
        "_start",
        "_status",
        "_whole",
        "done",
        "end",
    )

    def __init__(self, outcome: Outcome, start: float, *, whole: bool, held: Held | None = None) -> None:
        self._held, self._pieces = held, list[str]()
        self._outcome, self._start, self._whole = outcome, start, whole
        self.end: tuple[str, str, str] | None = None
        self.done = False
        self._status = 0
        self._rest = bytearray()  # an incomplete line
        self._reason = ""
        self._counted: Usage | None = None
        self._last_s = -1.0

    def head(self, status: int, now: float) -> None:
        """Handle the headers."""
        self._status = status
        if status == OK:
            self._outcome.accepted_s = now - self._start

    def body(self, data: bytes, now: float) -> None:
        """Handle a piece of the body."""
        if self.end is not None:
            return
        rest = self._rest
        if self._status != OK:
            rest += data[: ERROR_BYTES_MAX - len(rest)]
            return
        if rest:
            if b"\n" not in data:
                rest += data
                self._check_line()
                return
            data = bytes(rest) + data
            rest.clear()
        lines = data.split(b"\n")
        if tail := lines.pop():
            rest += tail
        now -= self._start
        for line in lines:
            if line.startswith(b"data:") and not self._goes_on(line, now):
                return
        self._check_line()

    def complete(self, now: float) -> None:
        """Handle the end of the body."""
        if self.end is not None:
            return
        rest = bytes(self._rest)
        if self._status != OK:
            code, message = error_of(rest, self._status)
            state = REFUSED if self._status in REFUSALS else FAILED
            self.end = state, code, message or f"HTTP status {self._status}"
            return
        if rest.startswith(b"data:"):
            self._goes_on(rest, now - self._start)
        if self.end is None:
            if self._reason:
                self._finish()
            else:
                found = f"; it ends with {rest[:80].decode(errors='replace')!r}" if rest else ""
                self._failed(f"the answer ended without a finish reason and without {DONE.decode()}{found}")

    def lost(self, why: str, now: float) -> None:
        """Handle a lost connection or malformed HTTP."""
        if self.end is None:
            if self._status >= 400:  # an error's body may end with the connection
                self.complete(now)
            else:
                self.end = FAILED, LOST, why

    def _check_line(self) -> None:
        if len(self._rest) > LINE_BYTES_MAX:
            self._failed(f"a line exceeds {LINE_BYTES_MAX} bytes")

    def _goes_on(self, line: bytes, now: float) -> bool:
        """Handle one event. Return False if it was the last."""
        if len(line) < 16 and line[5:].strip() == DONE:
            self.done = True
            self._finish()
            return False
        try:
            came = event(line[5:])
        except (msgspec.MsgspecError, UnicodeError) as error:
            self._failed(f"malformed event ({error}): {line[:80].decode(errors='replace')!r}")
            return False
        if came.error is not None:
            code, message = error_of(encode({"error": came.error}))
            self.end = FAILED, code, message
            return False
        return self._counts(came, now)

    def _counts(self, came: Event, now: float) -> bool:
        stamps = self._outcome.tokens_s
        for choice in came.choices:
            self._last_s = now
            if self._held is not None:
                self._pieces.append(choice.answer_text)
            tokens = choice.tokens
            if tokens == 1:
                stamps.append(now)
            elif tokens:
                stamps.extend([now] * tokens)
            if choice.token_ids is not None:
                try:
                    self._outcome.tokens.extend(choice.token_ids)
                except OverflowError:
                    self._failed("a token id exceeds 32 bits")
                    return False
            if choice.finish_reason is not None:
                self._reason = choice.finish_reason[:MESSAGE_CHARS_MAX] or "stop"
        if (usage := came.usage) is not None:
            self._counted = usage
            if self._last_s < 0:
                self._last_s = now
            if came.choices:  # the server counts in each event: these tokens arrived with it
                self._stamp_up_to(usage.completion_tokens or 0)
        if len(stamps) > self._outcome.asked_tokens + EVENTS_SPARE:
            self._failed(f"more than the {self._outcome.asked_tokens} requested tokens")
            return False
        return True

    def _stamp_up_to(self, count: int) -> None:
        missing = min(count, self._outcome.asked_tokens) - len(self._outcome.tokens_s)
        if missing > 0:
            self._outcome.tokens_s.extend([self._last_s] * missing)

    def _finish(self) -> None:
        outcome, stamps, usage = self._outcome, self._outcome.tokens_s, self._counted
        reason = self._reason or "no_reason"
        if usage is None:
            # Only events can be counted, and one may hold several tokens.
            note = "the server sent no usage: events were counted"
            enough = reason == LENGTH or len(stamps) == outcome.asked_tokens or not self._whole
            self._end_as(*((FINISHED, "", note) if enough else (FAILED, reason, note)))
            return
        count = usage.completion_tokens or 0
        outcome.prompt_tokens = usage.prompt_tokens or outcome.prompt_tokens
        if (details := usage.prompt_tokens_details) is not None:
            outcome.cached_tokens = details.cached_tokens or 0
        if count > outcome.asked_tokens:
            self._failed(f"{count} tokens were generated, but only {outcome.asked_tokens} were requested")
            return
        self._stamp_up_to(count)
        del stamps[count:]
        if count == outcome.asked_tokens:
            self._end_as(FINISHED, "", "")
        else:
            self._end_as(FAILED if self._whole else FINISHED, reason, f"{count} tokens of {outcome.asked_tokens}")

    def _end_as(self, state: str, code: str, message: str) -> None:
        self.end = state, code, message
        if self._held is not None and state == FINISHED:
            self._held(self._outcome, "".join(self._pieces))

    def _failed(self, message: str) -> None:
        self.end = FAILED, ProtocolError.code, message
