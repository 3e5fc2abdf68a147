"""Made of `aio/request_handles.py` by `python -m tools.twins`: change it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..handles import Handle
from ..operations import TextCursor, TokenCursor
from ..results import Completion, Finished, Token
from .waiting import Calls, drive


class Request(Handle):
    """One request. Each iteration returns its tokens from the first one on.

    After an attach at an offset, iterations, `tokens` and the result start at that offset.
    """

    _calls: Calls

    def __iter__(self) -> Iterator[Token]:
        """Return the tokens as they arrive.

        Raises:
            KvforgeError: The error that ended the request.
            DeadlineExceeded: No token arrived in time.
        """
        cursor = TokenCursor(self._calls, self._track, self.start)
        return self._calls.reading((self._track,), cursor.next)

    def result(self, timeout_s: float | None = None) -> Finished:
        """Wait for the end and return the outcome. A cancelled request returns with reason `cancelled`.

        Args:
            timeout_s: The limit in seconds, by default the client's `stream_timeout_s`.

        Raises:
            KvforgeError: The error that ended the request.
            DeadlineExceeded: The request has not ended in time. It goes on and can be awaited again.
        """
        return drive(self._calls.result(self._track, timeout_s, self.start))

    def text(self, stop: str | Sequence[str] = ()) -> TextRequest:
        """Return the same request, to be read as text.

        Args:
            stop: Stop strings, as in `generate_stream`.

        Raises:
            InvalidRequest: Names `stop`, or `offset` if this handle does not start at the first token.
        """
        return TextRequest(self._calls, self, self._text_stops(stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """Cancel the request, whichever client submitted it. A request that has ended is unchanged."""
        drive(self._calls.cancel(self._track, timeout_s))


class TextRequest:
    """A request that is read as text. Each iteration returns its pieces of text from the first one on.

    A stop string ends the request only while it is read, here or through `result`.
    """

    def __init__(self, calls: Calls, request: Request, stop: Sequence[str] = ()) -> None:
        self._calls = calls
        self._stop = stop
        self.request = request

    def __iter__(self) -> Iterator[str]:
        """Return pieces of text as they arrive; raises as `Request` does."""
        track = self.request._track
        return self._calls.reading((track,), TextCursor(self._calls, track, self._stop).next)

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end, as `Request.result` does."""
        return drive(self._calls.text(self.request._track, self._stop, timeout_s))

    def received(self) -> str:
        """Return the text received so far, without waiting. It is kept after an error."""
        return drive(self._calls.text_so_far(self.request._track, self._stop))

    def cancel(self, *, timeout_s: float | None = None) -> None:
        """Cancel the request, as `Request.cancel` does."""
        self.request.cancel(timeout_s=timeout_s)
