"""`python -m kvforge.drain --wait SECONDS`: stops admission and waits until no request runs. For service managers.

Exit status: 0 nothing runs any more, 1 something still does or the coordinator cannot be reached (one line says so).
"""

from __future__ import annotations

import argparse
import sys
import time

from protocol.errors import KvforgeError

from .client import Client

POLL_S = 0.1


def drain(client: Client, wait_s: float) -> int:
    """Stops admission, waits up to `wait_s` and returns how many requests still run. Raises as `Client.stats` does."""
    client.drain()
    deadline = time.monotonic() + wait_s
    while True:
        requests = client.stats().requests
        left = requests.pending + requests.running
        if left == 0 or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvforge.drain", description="Let running requests finish.")
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS")
    options = parser.parse_args(arguments)
    try:
        with Client(name="drain") as client:
            left = drain(client, options.wait)
    except KvforgeError as error:
        print(f"kvforge drain: {error}", file=sys.stderr)
        return 1
    if left:
        print(f"kvforge drain: {left} requests still run after {options.wait:g} s", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
