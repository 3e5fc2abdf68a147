"""Writes docs/errors.md of `kvforge.protocol.errors`: `python docs/error_catalogue.py`."""

from __future__ import annotations

from pathlib import Path

from kvforge.protocol import errors

PAGE = Path(__file__).with_name("errors.md")


def catalogue() -> str:
    """The page: the tree with every class, its code on the wire and what it means."""
    tree = (errors.__doc__ or "").strip()
    head = "Made by `python docs/error_catalogue.py` of the program's own table. Programs distinguish errors by code."
    return f"# Errors\n\n{head}\n\n```text\n{tree}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
