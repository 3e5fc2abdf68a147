"""A client that works on sequences while others do: `python -m tests.integration.appending ENDPOINT NUMBER MODE`.

MODE is `own`: a sequence of its own; `small`: many in a pool that is too small; or the id of a sequence of all clients.
"""

from __future__ import annotations

import sys

from kvforge import Client, KvforgeError


def work(endpoint: str, number: int, mode: str) -> None:
    """Work, and print ids, counts or outcomes."""
    with Client(endpoint, timeout_s=60, connect_timeout_s=30) as kv:
        refused = 0
        if mode == "own":
            s = kv.create_sequence(idle_ttl_s=60)
            for i in range(100):
                kv.append(s, [(number * 100 + i) % 256])
            assert kv.tokens(s) == tuple((number * 100 + i) % 256 for i in range(100)), "a lost update"
            print(s.id)
        elif mode == "small":
            made = []
            for _ in range(30):
                try:
                    made.append(kv.create_sequence([number] * 9, idle_ttl_s=60))
                except KvforgeError as error:
                    assert error.code == "capacity_exceeded", error
                    refused += 1
                    if made:
                        kv.remove(made.pop())
            for s in made:
                assert kv.tokens(s) == (number,) * 9
            print(len(made), refused)
        else:
            outcomes: set[str] = set()
            for i in range(60):
                try:
                    if number == 3 and i == 40:
                        kv.remove(int(mode))
                    elif (i + number) % 3 == 0:
                        kv.append(int(mode), [number])
                    elif (i + number) % 3 == 1:
                        kv.submit(sequence=int(mode), max_tokens=5)
                    else:
                        kv.fork(int(mode)) if i % 2 else kv.tokens(int(mode))
                    outcomes.add("ok")
                except KvforgeError as error:
                    outcomes.add(error.code)
            print(*sorted(outcomes))


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), sys.argv[3])
