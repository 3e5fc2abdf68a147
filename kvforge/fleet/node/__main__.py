"""A program of a fleet on this node: `entry.py kvforge.fleet.node replica --link 7`, started by its keeper."""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("a node of a fleet")

import argparse
import os

from kvforge.fleet.messages import FAILED, KINDS, REPLICA, NodeStatus
from kvforge.process.ending import Interrupted, Stopped
from kvforge.process.signals import Signals
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import status_of

from .gateway import Gateway
from .keeper_link import KeeperLink
from .replica import Replica

BEGIN_S = 30.0


def main() -> int:
    """Run until an order, a signal or an error ends the program.

    Returns:
        The exit status of `protocol.exits`. The reason is sent over the link and is the last line of the output.
    """
    parser = argparse.ArgumentParser(prog="kvforge.fleet.node", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--link", type=int, required=True, metavar="DESCRIPTOR")
    options = parser.parse_args()
    _restore_priority(options.kind)
    link = KeeperLink(options.link)
    with Signals() as signals:
        try:
            begin = link.begin(BEGIN_S)
            program = Replica(link, begin, signals) if options.kind == REPLICA else Gateway(link, begin, signals)
            return program.run()
        except Interrupted as interrupted:
            return interrupted.status
        except (KvforgeError, Stopped) as error:
            link.send_status(NodeStatus(phase=FAILED, reason=str(error)))
            print(f"{options.kind}: {error}", file=sys.stderr, flush=True)
            return error.status if isinstance(error, Stopped) else status_of(error)
        finally:
            link.close()


def _restore_priority(kind: str) -> None:
    """Restore the normal priority: Ray lowers that of its workers, and a slow coordinator delays all requests."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if nice > 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        except OSError:
            problem = f"it runs at niceness {nice}, set by Ray, which this user may not lower"
            print(f"{kind}: {problem}: start Ray with RAY_worker_niceness=0", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
