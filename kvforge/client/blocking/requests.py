"""Made of `aio/requests.py` by `python -m tools.twins`: change it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..handles import Handle
from ..operations import TextCursor, TokenCursor
from ..results import Completion, Finished, Token
from .waiting import Calls, drive


class Request(Handle):
    """One request. Iterating gives its tokens from the first one, however often it is done.

    One that was attached to at an offset begins there: its `tokens`, and those of its result, are those from there on.
    """

    _calls: Calls

    def __iter__(self) -> Iterator[Token]:
        """Tokens as they come. Raises the error the request ended with, or DeadlineExceeded when none comes."""
        cursor = TokenCursor(self._calls, self._track, self.start)
        return self._calls.reading((self._track,), cursor.next)

    def result(self, timeout_s: float | None = None) -> Finished:
        """Waits for the end (the client's `stream_timeout_s` unless given) and returns the outcome.

        Raises the error the request ended with; a cancelled one is returned, with reason `cancelled`. Raises
        DeadlineExceeded when the end does not come in time: the request goes on and can be waited for again.
        """
        return drive(self._calls.result(self._track, timeout_s, self.start))

    def text(self, stop: str | Sequence[str] = ()) -> TextRequest:
        """The same request, to be read as text; stop: as in `generate_stream`.

        Raises InvalidRequest naming `stop`, or `offset` where this handle does not begin at the first token.
        """
        return TextRequest(self._calls, self, self._text_stops(stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """Ends it, whoever submitted it: `result()` then has the reason `cancelled`. One that has ended stays so."""
        drive(self._calls.cancel(self._track, timeout_s))


class TextRequest:
    """A request that is read as text. Iterating gives pieces of text, from the first one.

    With stop strings somebody must read it, here or through `result`, for the request to end at one.
    """

    def __init__(self, calls: Calls, request: Request, stop: Sequence[str] = ()) -> None:
        self._calls = calls
        self._stop = stop
        self.request = request

    def __iter__(self) -> Iterator[str]:
        """Pieces of text as they come; raises as `Request` does."""
        track = self.request._track
        return self._calls.reading((track,), TextCursor(self._calls, track, self._stop).next)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Waits for the end, as `Request.result` does."""
        return drive(self._calls.text(self.request._track, self._stop, timeout_s))

    def received(self) -> str:
        """The text of what has come so far, without waiting for more; it stays after an error."""
        return drive(self._calls.text_so_far(self.request._track, self._stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """As `Request.cancel`."""
        self.request.cancel(timeout_s=timeout_s)
