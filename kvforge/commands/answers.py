"""Prints answers: text for text, token ids for token ids, or JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from kvforge.client.blocking import Request, TextRequest
from kvforge.client.results import Finished
from kvforge.protocol.errors import DeadlineExceeded, KvforgeError

from . import parsing
from .screen import printable


@dataclass(frozen=True)
class Answer:
    """A request and how its answer is read.

    Attributes:
        request: The request.
        text: The request read as text; None: as token ids.
        timeout_s: The limit for its end; None: the client's own limit.
        afterwards: The fate of a request that does not end in time, in words.
    """

    request: Request
    text: TextRequest | None
    timeout_s: float | None
    afterwards: str = "it is cancelled"

    def show(self, *, stream: bool) -> None:
        """Print the answer, with `stream` as it arrives.

        Raises:
            KvforgeError: The error that ended the request, after printing the tokens received so far.
        """
        if stream:
            self._stream()
            return
        try:
            text, done = self._result()
        except BaseException:
            if self.request.tokens:
                print(self._received(), flush=True)
            raise
        print(text if text is not None else " ".join(map(str, done.tokens)))

    def _result(self) -> tuple[str | None, Finished]:
        """Wait for the end.

        Raises:
            KvforgeError: The error that ended the request.
            DeadlineExceeded: The request has not ended in time; the error states what happens to it.
        """
        try:
            if self.text is None:
                return None, self.request.result(self.timeout_s)
            completion = self.text.result(self.timeout_s)
            return completion.text, completion.finished
        except DeadlineExceeded:
            if self.request.done:  # the request itself expired
                raise
            limit = "in time" if self.timeout_s is None else f"within {self.timeout_s:g} s (--generate-timeout)"
            raise DeadlineExceeded(f"request {self.request.id} has not ended {limit}; {self.afterwards}") from None

    def _received(self) -> str:
        """Return the part received so far, up to a stop string."""
        return self.text.received() if self.text is not None else " ".join(map(str, self.request.tokens))

    def _stream(self) -> None:
        try:
            if self.text is not None:
                for piece in self.text:
                    print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
            else:
                for token in self.request:
                    print(token.token_id, end=" ", flush=True)
        finally:
            print(flush=True)
        self._result()

    def document(self) -> tuple[dict[str, Any], KvforgeError | None]:
        """Return the document for --json, and the error that ended the request.

        With an error, the document holds the part received before it.
        """
        try:
            text, done = self._result()
        except KvforgeError as error:
            known = {"text": self._received()} if self.text is not None and self.request.tokens else {}
            ids = {"request_id": self.request.id, "tokens": self.request.tokens, "seed": self.request.seed}
            return {**known, **ids, "error": error.code}, error
        return {
            **({"text": text} if text is not None else {}),
            "request_id": done.request_id,
            "reason": done.reason,
            "tokens": done.tokens,
            "logprobs": done.logprobs,
            **({"top_logprobs": done.top_logprobs} if any(done.top_logprobs) else {}),
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "seed": self.request.seed,
            "timings": done.timings,
        }, None


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Declare the options for reading an answer."""
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="string that ends the text; may be repeated"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="where to load the tokenizer from [KVFORGE_TOKENIZER]")
    parser.add_argument("--generate-timeout", type=parsing.seconds, metavar="S", help="seconds for the answer [600]")
