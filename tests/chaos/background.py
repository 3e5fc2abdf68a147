"""Background responses and a batch while processes are killed: none lost, doubled, changed or left.

    python -m tests.chaos.background [--responses 1000] [--seed 1] [--postgres] [--json FILE]

Two gateways share a database and a coordinator, with a tiny random model. In each round some responses are posted to
either gateway; then a process is killed and started again. A POST without an answer is repeated with its idempotency
key. Beside them a batch with as many requests runs. In the end every response and every line of the batch is read,
compared with the answer to the same request with `store: false`, and deleted.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from kvforge.gateway.storage import TenantUsage, Usage
from kvforge.gateway.storage.inline import InlineStorage
from tests.chaos.command import Log, log, parser_of, show, storage
from tests.gateway.served import Gateway
from tests.gateway.test_background_deaths import prepare
from tools.chaos import leftovers
from tools.cluster.cluster import Cluster

TITLE = "chaos: background responses and lines of a batch lost, doubled, changed or left while processes were killed"
EACH = 25  # responses of a round
ASKED = 12  # different requests
WAIT_S = 120.0
AGAIN_S = 0.1
BUSY = (429, 503)
STOPPED = "stopped "  # by SIGTERM: it hands its responses over
STORAGE = "storage of "  # the storage process of a gateway, while responses are posted
VICTIMS = (
    *("gateway 0", "gateway 1", f"{STOPPED}gateway 0", f"{STOPPED}gateway 1", "coordinator", "w0"),
    *(f"{STORAGE}gateway 0", f"{STORAGE}gateway 1"),
)


class Run:
    """One run.

    Attributes:
        faults: A description of each violation.
        killed: How often each process was killed.
    """

    def __init__(self, responses: int, seed: int, url: str, folder: Path, log: Log) -> None:
        self._responses, self._rng = responses, random.Random(seed)
        self._url, self._folder, self._log = url, folder, log
        self.faults: list[str] = []
        self.killed: Counter[str] = Counter()
        self._ids: dict[str, int] = {}  # of a response: which request it answers

    def run(self) -> dict[str, Any]:
        """Run to the end and return the report."""
        began = time.monotonic()
        with ExitStack() as stack:
            self._serve(stack)
            expected = [self._expected(at) for at in range(ASKED)]
            batch = self._begin_batch()
            while len(self._ids) < self._responses:
                victim, before = self._rng.choice(VICTIMS), self._rng.randrange(EACH)
                for at in range(min(EACH, self._responses - len(self._ids))):
                    if at == before and victim.startswith(STORAGE):
                        self._kill(victim)
                    self._post()
                if not victim.startswith(STORAGE):
                    self._kill(victim)
            self._log(f"{len(self._ids)} posted, {dict(self.killed)} killed")
            ended = Counter(self._compare(name, expected[at]) for name, at in self._ids.items())
            files = self._compare_batch(batch, expected)
            usage, kept = self._usage(), self._responses + len(files) + 1
            if (usage.documents, usage.in_progress) != (kept, 0):
                self.faults.append(f"the database has {usage}, expected {kept} documents that have ended")
            with self._cluster.client() as kv:
                stats = kv.stats()
            wanted = 2 * self._responses + ASKED
            if (accepted := stats.requests.accepted_total) != wanted:
                self.faults.append(f"the coordinator accepted {accepted} requests, expected {wanted}")
            for name in self._ids:
                self._http.delete(f"{self._gateways[0].url}/v1/responses/{name}").raise_for_status()
            for name in files:
                self._http.delete(f"{self._gateways[0].url}/v1/files/{name}").raise_for_status()
            if (left := self._usage().documents) != 1:  # the batch
                self.faults.append(f"{left - 1} responses and files are left after all were deleted")
            with self._cluster.client() as kv:  # a stored response keeps its sequence until it is deleted
                self.faults += leftovers.not_given_back(kv.stats())
            self._kv.close()
        return {
            "responses": self._responses,
            "killed": dict(self.killed),
            "ended": dict(ended),
            "took_s": round(time.monotonic() - began, 1),
            "faults": self.faults,
        }

    def _serve(self, stack: ExitStack) -> None:
        """Start a coordinator, a worker and two gateways over one database."""
        settings = f'names = ["tiny"]\ndrain_s = 1\n[storage]\nurl = "{self._url}"\nlease_s = 1.0\n'
        limits = "[limits]\nreattach_s = 60.0\nfinished_max = 100000\nqueue_max = 4096\nsequences_max = 64\n"
        self._cluster = stack.enter_context(Cluster(coordinator=limits, blocks=512))
        prepare(self._cluster.model)
        self._kv = self._cluster.start("w0")
        self._http = stack.enter_context(httpx.Client(timeout=WAIT_S))
        self._gateways = []
        for at in range(2):
            folder = self._folder / f"gateway-{at}"
            folder.mkdir()
            self._gateways.append(stack.enter_context(Gateway(self._cluster.runtime, folder, settings)))

    def _body(self, at: int) -> dict[str, Any]:
        tokens = 8 + 3 * at
        return {"model": "tiny", "input": f"Question {at}", "seed": at, "temperature": 1.0, "max_output_tokens": tokens}

    def _expected(self, at: int) -> str:
        answer = self._http.post(f"{self._gateways[0].url}/v1/responses", json={**self._body(at), "store": False})
        return str(answer.raise_for_status().json()["output"][0]["content"][0]["text"])

    def _begin_batch(self) -> str:
        """Begin a batch with as many requests as there are responses. Return its id."""
        lines = [
            {"custom_id": str(at), "method": "POST", "url": "/v1/responses", "body": self._body(at % ASKED)}
            for at in range(self._responses)
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        url = self._gateways[0].url
        given = self._http.post(
            f"{url}/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        ).raise_for_status()
        body = {"input_file_id": given.json()["id"], "endpoint": "/v1/responses", "completion_window": "24h"}
        return str(self._http.post(f"{url}/v1/batches", json=body).raise_for_status().json()["id"])

    def _compare_batch(self, name: str, expected: list[str]) -> list[str]:
        """Wait for the end of the batch and compare its output. Return its files."""
        deadline, url = time.monotonic() + WAIT_S, self._gateways[0].url
        while True:
            batch = self._http.get(f"{url}/v1/batches/{name}").raise_for_status().json()
            if batch["status"] not in ("validating", "in_progress", "finalizing"):
                break
            if time.monotonic() > deadline:
                self.faults.append(f"{name} has not ended: {batch}")
                return [batch["input_file_id"]]
            time.sleep(AGAIN_S)
        if batch["status"] != "completed" or batch["request_counts"]["completed"] != self._responses:
            self.faults.append(f"{name} did not complete: {batch}")
        text = self._http.get(f"{url}/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        outcomes = [json.loads(line) for line in text.splitlines()]
        seen = Counter(int(line["custom_id"]) for line in outcomes)
        if wrong := {at: seen[at] for at in range(self._responses) if seen[at] != 1}:
            self.faults.append(f"lines of {name} that are not in its output once: {wrong}")
        for line in outcomes:
            at = int(line["custom_id"])
            if (found := line["response"]["body"]["output"][0]["content"][0]["text"]) != expected[at % ASKED]:
                self.faults.append(f"line {at} of {name} is {found!r}, expected {expected[at % ASKED]!r}")
        return [batch["input_file_id"], batch["output_file_id"]]

    def _post(self) -> None:
        """Post one response, until one of the gateways has answered."""
        at, key = self._rng.randrange(ASKED), f"response-{len(self._ids)}"
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            gateway = self._rng.choice(self._gateways)
            try:
                answer = self._http.post(
                    f"{gateway.url}/v1/responses",
                    json={**self._body(at), "background": True},
                    headers={"idempotency-key": key},
                )
            except httpx.TransportError:
                time.sleep(AGAIN_S)
                continue
            if answer.status_code in BUSY:
                time.sleep(AGAIN_S)
                continue
            self._ids[answer.raise_for_status().json()["id"]] = at
            return
        raise TimeoutError(f"{key} was not accepted within {WAIT_S:g} s")

    def _kill(self, victim: str) -> None:
        self.killed[victim] += 1
        if victim == "coordinator":
            self._cluster.kill(victim)
            self._cluster.start_coordinator()
        elif victim == "w0":
            self._cluster.kill(victim)
            self._cluster.start_worker(victim)
        elif victim.startswith(STORAGE):
            for pid in storage_processes(self._gateways[int(victim[-1])].process.pid):
                os.kill(pid, signal.SIGKILL)
        else:
            gateway = self._gateways[int(victim[-1])]
            gateway.stop() if victim.startswith(STOPPED) else gateway.kill()
            gateway.start(0)

    def _compare(self, name: str, expected: str) -> str:
        """Wait for the end of a response and compare its text. Return its status."""
        deadline = time.monotonic() + WAIT_S
        status = ""
        while time.monotonic() < deadline:
            answer = self._http.get(f"{self._rng.choice(self._gateways).url}/v1/responses/{name}")
            if answer.status_code == httpx.codes.NOT_FOUND:
                self.faults.append(f"{name} is lost")
                return "lost"
            body = answer.raise_for_status().json()
            status = body["status"]
            if status not in ("queued", "in_progress"):
                if (text := body["output"][0]["content"][0]["text"] if body["output"] else "") != expected:
                    self.faults.append(f"{name} is {status} with {text!r}, expected {expected!r}: {body['error']}")
                return str(status)
            time.sleep(AGAIN_S)
        self.faults.append(f"{name} is still {status} after {WAIT_S:g} s")
        return str(status)

    def _usage(self) -> TenantUsage:
        storage = InlineStorage(self._url)
        (tenants,) = storage.done(Usage())
        storage._engine.close()
        assert isinstance(tenants, list)
        found = [one for one in tenants if isinstance(one, TenantUsage)]
        return found[0] if found else TenantUsage("", 0, 0, 0)


def storage_processes(gateway: int) -> list[int]:
    """Return the storage processes of a gateway process."""
    children = Path(f"/proc/{gateway}/task/{gateway}/children").read_text().split()
    return [int(pid) for pid in children if b"kvforge.gateway.storage" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def run(responses: int, seed: int, *, postgres: bool, log: Log) -> dict[str, Any]:
    """Run in a folder of its own and return the report."""
    with storage("background", postgres=postgres) as (url, folder):
        report = Run(responses, seed, url, folder, log).run()
    return {"seed": seed, "database": "postgresql" if postgres else "sqlite", **report}


def main() -> int:
    """Print the report; return exit status 1 if it has faults."""
    parser = parser_of(__doc__)
    parser.add_argument("--responses", type=int, default=1000)
    options = parser.parse_args()
    return show(TITLE, run(options.responses, options.seed, postgres=options.postgres, log=log), options.json)


if __name__ == "__main__":
    sys.exit(main())
