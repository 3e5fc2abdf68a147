"""How answers are printed: text for text, token ids for token ids, or as JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from ..client import Request, TextRequest
from ..screen import printable
from . import common


@dataclass(frozen=True)
class Answer:
    """A request and how it is read. text: None: as token ids. timeout_s: for its end; None: the client's own limit."""

    request: Request
    text: TextRequest | None
    timeout_s: float | None

    def show(self, *, stream: bool) -> None:
        """Prints it, with `stream` as it comes. Raises what the request ended with."""
        if stream:
            self._stream()
        elif self.text is not None:
            print(self.text.result(self.timeout_s).text)
        else:
            print(" ".join(map(str, self.request.result(self.timeout_s).tokens)))

    def _stream(self) -> None:
        if self.text is not None:
            for piece in self.text:
                print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
            print()
            self.text.result(self.timeout_s)
            return
        for token in self.request:
            print(token.token_id, end=" ", flush=True)
        print()
        self.request.result(self.timeout_s)

    def document(self) -> dict[str, Any]:
        """What --json prints of it. Raises what the request ended with."""
        shown: dict[str, Any] = {}
        if self.text is not None:
            completion = self.text.result(self.timeout_s)
            shown, done = {"text": completion.text}, completion.finished
        else:
            done = self.request.result(self.timeout_s)
        return {
            **shown,
            "request_id": done.request_id,
            "reason": done.reason,
            "tokens": done.tokens,
            "logprobs": done.logprobs,
            **({"top_logprobs": done.top} if any(done.top) else {}),
            "prompt_tokens": done.prompt_tokens,
            "cached_tokens": done.cached_tokens,
            "seed": self.request.seed,
            "timings": done.timings,
        }


def add_reading(parser: argparse.ArgumentParser) -> None:
    """Declares the options that say how an answer is read."""
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--tokenizer", metavar="PATH", help="where to load the tokenizer from [KVFORGE_TOKENIZER]")
    parser.add_argument("--generate-timeout", type=common.seconds, metavar="S", help="seconds for the answer [600]")
