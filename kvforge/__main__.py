"""python -m kvforge, and the command `kvforge`.

Little is imported here: before a command has begun, Ctrl-C ends it without a word, as nothing is to be cleaned up.
"""

import os
import signal
import sys
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> int:
    """Runs the process's own command line; returns its exit status."""
    for number in ENDING:
        signal.signal(number, _leave)
    from .commands.cli import main as run

    try:
        return run()
    finally:
        for number in ENDING:
            signal.signal(number, _leave)


if __name__ == "__main__":
    sys.exit(main())
