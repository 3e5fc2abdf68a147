"""kvforge demo: one real model, four prompts, text on the screen."""

from __future__ import annotations

import argparse
from typing import Any

from ..demo import run_demo
from . import common


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = common.add(
        subparsers, "demo", run, "Serve a small model, ask it four things at once, show the cache, clean up."
    )
    parser.add_argument("--model", default="smollm2-135m", help="[smollm2-135m]")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="of each answer [48]")


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration."""
    return run_demo(options.model, options.max_tokens)
