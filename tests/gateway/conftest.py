"""SQLite connections that are collected open fail the tests on every Python, as they do from 3.13 on."""

from __future__ import annotations

import functools
import sqlite3
import sys
import warnings

if sys.version_info < (3, 13):

    class _Watched(sqlite3.Connection):
        def __del__(self) -> None:
            try:
                _ = self.total_changes  # raises if it is closed
            except sqlite3.ProgrammingError:
                return
            warnings.warn(f"unclosed database in {self!r}", ResourceWarning, stacklevel=2, source=self)

    sqlite3.connect = functools.partial(sqlite3.connect, factory=_Watched)
