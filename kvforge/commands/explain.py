"""`kvforge explain`: why a request waits, which holders a block has, what a tenant occupies."""

from __future__ import annotations

import argparse
from typing import Any

from kvforge.protocol.errors import InvalidRequest

from . import parsing, printing
from .screen import printable

SUBJECTS = ("request", "block", "tenant", "sequence")


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers,
        "explain",
        run,
        "Explain why a request waits, a block's holders, or the memory of a tenant or sequence.",
    )
    parser.add_argument("subject", choices=SUBJECTS, help=", ".join(SUBJECTS), metavar="SUBJECT")
    parser.add_argument("id", metavar="ID", help="number as listed by `kvforge requests`, or a tenant's name")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Print a heading and sentences, or one JSON document.

    Raises:
        InvalidRequest: The id is not a number.
        NotFound: There is no such object.
    """
    subject: Any = options.id if options.subject == "tenant" else _number(options.subject, options.id)
    with parsing.open_client(options) as kv:
        explanation = kv.explain(**{options.subject: subject})
    if options.json:
        printing.print_json(explanation)
        return 0
    print(printable(f"{explanation.subject}:"))
    for sentence in explanation.sentences:
        print(f"  {printable(sentence)}")
    return 0


def _number(subject: str, text: str) -> int:
    if not text.isdecimal():
        raise InvalidRequest(subject, f"{text!r} is not a number of a {subject}, like 17")
    return int(text)
