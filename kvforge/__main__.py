"""`python -m kvforge`, and the command `kvforge`.

It imports little, so that Ctrl-C ends it silently before a command has begun, when nothing needs cleaning up.
"""

import os
import signal
import sys
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def main() -> int:
    """Run the process's own command line; return its exit status."""
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
