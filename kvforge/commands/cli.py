"""The command line. Each command ends with a status of `kvforge.protocol.exits`, never with a traceback."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from kvforge.process.ending import Interrupted, Stopped
from kvforge.process.parser import Parser
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import FAILED, INTERRUPTED, OK, status_of, table

from . import (
    attach,
    cancel,
    chat,
    completion,
    demo,
    deploy,
    drain,
    explain,
    fleet,
    generate,
    health,
    keys,
    loadtest,
    parsing,
    pull,
    replay,
    requests,
    stats,
    status,
    top,
    up,
    version,
    wipe,
)

COMMANDS = (
    *(pull, up, generate, chat, attach, status, health, stats, top, requests, explain, cancel, drain, wipe, replay),
    *(loadtest, keys, fleet, demo, deploy, completion, version),
)
DEBUG = "KVFORGE_DEBUG"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a write to standard output


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and options."""
    top = Parser(
        prog="kvforge",
        description="Serve language models from a paged KV cache.",
        epilog=f"{table()}\n\n{DEBUG}=1 shows the traceback of an error.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", "-V", action=version.Version, help="print the version")
    parsing.global_options(top, top=True)
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    top.set_defaults(parser=top)  # for `completion`, which describes all commands
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments. None: the process's own command line.

    Returns:
        The exit status.
    """
    try:
        if argv is None:
            # SIGTERM acts like Ctrl-C: it cancels the request and removes the download.
            signal.signal(signal.SIGTERM, _interrupt)
            signal.signal(signal.SIGINT, signal.default_int_handler)
        options = parser().parse_args(argv)
        result: int = options.run(options)
        return _flushed(result)
    except SystemExit as ended:  # argparse has printed why, or the help
        return _flushed(ended.code if isinstance(ended.code, int) else FAILED)
    except KeyboardInterrupt as interrupt:
        return interrupt.status if isinstance(interrupt, Interrupted) else INTERRUPTED
    except BrokenPipeError:
        return _no_output()
    except KvforgeError as error:
        return _fail(error, status_of(error))
    except Stopped as stopped:
        return _fail(stopped, stopped.status)
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            return _internal(error)
        return _unwritable(error)
    except Exception as error:  # noqa: BLE001 - the last resort: report one sentence instead of a traceback
        return _internal(error)


def _internal(error: Exception) -> int:
    return _fail(error, FAILED, f"internal error: {type(error).__name__}: {error} (set {DEBUG}=1 for the traceback)")


def _flushed(status: int) -> int:
    """Flush standard output; return the status, or that of a failed flush."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return _no_output() or status
    except OSError as error:
        return _unwritable(error)
    return status


def _unwritable(error: OSError) -> int:
    """Report that standard output takes nothing, for example because its disk is full."""
    _no_output()
    return _fail(error, FAILED, f"the output cannot be written: {error.strerror}")


def _fail(error: Exception, status: int, message: str = "") -> int:
    if os.environ.get(DEBUG, "") not in ("", "0"):
        raise error
    sentence = " ".join((message or str(error)).split())
    with suppress(OSError):
        print(f"kvforge: {sentence}", file=sys.stderr, flush=True)
    return status


def _no_output() -> int:
    """Handle a reader of the output that has left, as `head` does: no error. Python must not flush to it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)
