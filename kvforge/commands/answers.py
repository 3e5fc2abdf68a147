"""How answers are printed: text for text, token ids for token ids, or as JSON."""

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
    """A request and how it is read. text: None: as token ids. timeout_s: for its end; None: the client's own limit.
    afterwards: what becomes of it where its end did not come in time, in words.
    """

    request: Request
    text: TextRequest | None
    timeout_s: float | None
    afterwards: str = "it is cancelled"

    def show(self, *, stream: bool) -> None:
        """Prints it, with `stream` as it comes. Raises what the request ended with, after what there is of it."""
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
        """Waits for the end. Raises what it ended with, or DeadlineExceeded, which says what becomes of it."""
        try:
            if self.text is None:
                return None, self.request.result(self.timeout_s)
            completion = self.text.result(self.timeout_s)
            return completion.text, completion.finished
        except DeadlineExceeded:
            if self.request.done:  # the request's own end
                raise
            limit = "in its time" if self.timeout_s is None else f"within {self.timeout_s:g} s (--generate-timeout)"
            raise DeadlineExceeded(f"request {self.request.id} has not ended {limit}; {self.afterwards}") from None

    def _received(self) -> str:
        """What has come, up to a stop string."""
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
        """What --json prints of it, and the error that it ended with: then the document holds what there is."""
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
            **({"top_logprobs": done.top} if any(done.top) else {}),
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "seed": self.request.seed,
            "timings": done.timings,
        }, None


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Declares the options that say how an answer is read."""
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--tokenizer", metavar="PATH", help="where to load the tokenizer from [KVFORGE_TOKENIZER]")
    parser.add_argument("--generate-timeout", type=parsing.seconds, metavar="S", help="seconds for the answer [600]")
