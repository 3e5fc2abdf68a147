"""`kvforge attach ID`: read the answer of a request that runs or ended recently."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.client.arguments import stop_strings
from kvforge.protocol.errors import InvalidRequest

from . import parsing, printing
from .answers import Answer, add_reading
from .waiting import add_wait, wait_for_model


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers,
        "attach",
        run,
        "Stream the answer of a request; leaving cancels the request unless it is detached.",
    )
    parser.add_argument("request_id", type=int, metavar="ID", help="as listed by `kvforge requests`")
    parser.add_argument("--offset", type=int, default=0, metavar="N", help="skip the first N tokens (with --ids)")
    parser.add_argument("--ids", action="store_true", help="print token ids; no tokenizer is needed")
    add_reading(parser)
    add_wait(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(options: argparse.Namespace) -> int:
    """Print the answer as it arrives."""
    stop_strings(options.stop)
    if options.ids and options.stop:
        raise InvalidRequest("stop", "applies to text only, not to --ids")
    if options.offset and not options.ids:
        raise InvalidRequest("offset", "must be 0 for text; use --ids to start at another token")
    with parsing.open_client(options, options.tokenizer) as kv:
        if not options.ids:
            wait_for_model(kv, options.wait)
            # Load the tokenizer before attaching: if there is none, the current reader must not lose the request.
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
