"""kvforge attach ID: reads the answer of a request that runs, or ended not long ago."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.client.arguments import stop_strings
from kvforge.protocol.errors import InvalidRequest

from . import parsing, printing
from .answers import Answer, add_reading
from .waiting import add_wait, wait_for_model


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = parsing.add(
        subparsers,
        "attach",
        run,
        "Read the answer of a request as it comes; leaving cancels it, unless it was detached.",
    )
    parser.add_argument("request_id", type=int, metavar="ID", help="as `kvforge requests` shows it")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="leave out the first N tokens (with --ids)")
    parser.add_argument("--ids", action="store_true", help="print token ids; no tokenizer is needed")
    add_reading(parser)
    add_wait(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(options: argparse.Namespace) -> int:
    """Prints the answer as it comes."""
    stop_strings(options.stop)
    if options.ids and options.stop:
        raise InvalidRequest("stop", "is looked for in text; with --ids there is none")
    if options.offset and not options.ids:
        raise InvalidRequest("offset", "text is read from the first token on; with --ids it may begin anywhere")
    with parsing.open_client(options, options.tokenizer) as kv:
        if not options.ids:
            wait_for_model(kv, options.wait)
            # Loads the tokenizer before attaching: if there is none, whoever reads the request now must not lose it.
            kv.encode("-", raw=True)
        request = kv.attach(options.request_id, options.offset)
        afterwards = "it goes on: attach again" if kv.status(request.id).detached else "it is cancelled"
        text = None if options.ids else request.text(options.stop)
        answer = Answer(request, text, options.generate_timeout, afterwards)
        if not options.json:
            answer.show(stream=True)
            return 0
        document, error = answer.document()
        printing.print_json(document)
        if error is not None:
            raise error
    return 0
