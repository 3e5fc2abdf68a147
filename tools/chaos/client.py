"""A process with several clients; it ends when its standard input closes.

    python -m tools.chaos.client FILE

FILE is a JSON object:

- endpoint: the coordinator's endpoint;
- cases, notes: paths of files;
- name, clients: the process's name and its number of clients;
- wait_s: the timeout of every wait;
- before: unfinished intents of the killed process that this one replaces. The clients repeat commands with an
  idempotency key, and attach to detached requests.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from kvforge import AsyncClient

from .cases import Known
from .notes import Notes
from .python_client import RandomClient


class Process:
    """The clients of this process."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._known = [Known.of_json(value) for value in json.loads(Path(options["cases"]).read_text())]
        self._notes = Notes(Path(options["notes"]))
        self._over = False

    async def run(self) -> None:
        """Run all clients until standard input closes."""
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._end)
        async with AsyncExitStack() as stack:
            clients = []
            for number in range(self._options["clients"]):
                kv = await stack.enter_async_context(self._client())
                clients.append(RandomClient(kv, self._notes, self._known, f"{self._options['name']}-{number}"))
            await clients[0].resume_intents(self._options["before"])
            await asyncio.gather(*(doer.run(lambda: self._over) for doer in clients))

    def _client(self) -> AsyncClient:
        wait_s = self._options["wait_s"]
        return AsyncClient(
            self._options["endpoint"],
            timeout_s=wait_s,
            connect_timeout_s=wait_s,
            stream_timeout_s=wait_s,
            reconnect_s=wait_s,
        )

    def _end(self) -> None:
        self._over = True
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    asyncio.run(Process(json.loads(Path(sys.argv[1]).read_text())).run())
