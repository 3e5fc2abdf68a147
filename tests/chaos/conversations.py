"""Conversations that go on while processes are killed: no turn lost, doubled or changed, nothing left.

    python -m tests.chaos.conversations [--minutes 2] [--seed 1] [--postgres] [--json FILE]

Two gateways share a database and a coordinator, with a tiny random model. Each talk is a thread of its own: it names
the response before (`previous_response_id`) or a session, which it forks and rewinds on its way. Half of the turns run
in the background and are polled; the others are repeated with their idempotency key until they are answered. Meanwhile
a process is killed and started again every few seconds. Each text is compared with that of the same talk without
deaths, and the items of a session are counted. In the end everything is deleted.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.background import AGAIN_S, BUSY, VICTIMS, WAIT_S, Run
from tests.chaos.command import Log, log, parser_of, show, storage
from tools.chaos import leftovers

TITLE = "chaos: turns of conversations lost, doubled, changed or left while processes were killed"
KINDS, TURNS, AT_ONCE = 6, 4, 6
PAUSE_S = 3.0
GONE_S = 30.0  # in which the last kept sequences are removed
INTERNAL = 500


class Talk:
    """A conversation of TURNS turns. Talks of one kind have the same texts.

    Args:
        run: Sends the requests.
        name: Of its idempotency keys.
        kind: Which texts it sends.
        session: Whether it goes on by a session, or by the response before.
    """

    def __init__(self, run: Conversations, name: str, kind: int, *, session: bool) -> None:
        self._run, self._name, self._kind = run, name, kind
        self._rng = random.Random(name)
        self._by_session = session
        self.responses: list[str] = []
        self.sessions: list[str] = []
        self.texts: list[str] = []

    def hold(self) -> None:
        """Run it to its end. Fill in `texts`: the answers, and those of a fork and of a rewound session."""
        if not self._by_session:
            for turn in range(TURNS):
                before = {"previous_response_id": self.responses[-1]} if self.responses else {}
                self._turn(turn, f"{turn}", before)
            return
        session = str(self._run.call("POST", "/v1/sessions", {}, self._key("session"))["id"])
        self.sessions.append(session)
        for turn in range(TURNS):
            self._turn(turn, f"{turn}", {"conversation": session})
            if turn == 1:
                middle = self.last["usage"]["total_tokens"]
                forks = self._run.call("POST", f"/v1/sessions/{session}/fork", {"n": 1}, self._key("forks"))
                fork = forks["data"][0]["id"]
                self.sessions.append(fork)
        self._turn(TURNS, "fork", {"conversation": fork})
        self._run.call("POST", f"/v1/sessions/{session}/rewind", {"tokens": middle})
        self._turn(TURNS, "rewound", {"conversation": session})
        if self.texts[-1] != self.texts[-2]:
            self._run.fault(f"{self._name}: a rewound session goes on with {self.texts[-1]!r}, a fork otherwise")
        for each in self.sessions:
            items = self._run.call("GET", f"/v1/sessions/{each}/items?limit=100&order=asc")["data"]
            if len(items) != 6:
                self._run.fault(f"{self._name}: session {each} has {len(items)} items, expected 6")

    def _key(self, what: str) -> dict[str, str]:
        """Return the header with which a request that is sent again makes nothing twice."""
        return {"idempotency-key": f"{self._name}-{what}"}

    def _turn(self, turn: int, label: str, more: dict[str, Any]) -> None:
        body = {
            "model": "tiny",
            "input": f"Question {turn} of {self._kind}",
            "seed": turn,
            "temperature": 1.0,
            "max_output_tokens": 10 + 7 * turn,
            **more,
        }
        background, tries = self._rng.random() < 0.5, 0
        while True:
            key = self._key(f"{label}-{tries}")
            answer = self._run.call("POST", "/v1/responses", {**body, "background": background}, key)
            if answer["store"]:
                break
            self._run.unstored += 1  # the database was away at the end of the answer, which says so
            tries += 1
        deadline = time.monotonic() + WAIT_S
        while answer["status"] in ("queued", "in_progress"):
            if time.monotonic() > deadline:
                self._run.fault(f"{self._name}: {answer['id']} is still {answer['status']} after {WAIT_S:g} s")
                break
            time.sleep(AGAIN_S)
            answer = self._run.call("GET", f"/v1/responses/{answer['id']}")
        self.last = answer
        self.responses.append(answer["id"])
        self.texts.append(answer["output"][0]["content"][0]["text"] if answer["output"] else f"{answer['error']}")


class Conversations(Run):
    """One run. Its `faults` describe each violation."""

    def __init__(self, minutes: float, seed: int, url: str, folder: Path, log: Log) -> None:
        super().__init__(0, seed, url, folder, log)
        self._minutes, self._over = minutes, threading.Event()
        self._seed = seed
        self._lock = threading.Lock()
        self.unstored = 0

    def fault(self, what: str) -> None:
        """Note a violation."""
        with self._lock:
            self.faults.append(what)

    def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Send a request to either gateway until one answers.

        Raises:
            TimeoutError: None does.
            HTTPStatusError: It is refused.
        """
        deadline, last = time.monotonic() + WAIT_S, ""
        while time.monotonic() < deadline:
            gateway = random.choice(self._gateways)
            try:
                answer = self._http.request(method, f"{gateway.url}{path}", json=body, headers=headers)
            except httpx.TransportError as error:
                last = str(error)
            else:
                if answer.status_code not in BUSY:
                    if answer.is_error:
                        self.fault(f"{method} {path}: {answer.status_code} {answer.text}")
                    found: dict[str, Any] = answer.raise_for_status().json()
                    return found
                last = answer.text
            time.sleep(AGAIN_S)
        raise TimeoutError(f"{method} {path} was not answered within {WAIT_S:g} s: {last}")

    def run(self) -> dict[str, Any]:
        """Run to the end and return the report."""
        began = time.monotonic()
        with ExitStack() as stack:
            self._serve(stack)
            expected = {}
            for kind in range(KINDS):
                for session in (False, True):
                    talk = Talk(self, f"expected-{kind}-{session}", kind, session=session)
                    talk.hold()
                    expected[kind, session] = talk
            talks: list[Talk] = []
            with ThreadPoolExecutor(AT_ONCE) as pool:
                threads = [pool.submit(self._talk, number, talks) for number in range(AT_ONCE)]
                until = time.monotonic() + self._minutes * 60
                while time.monotonic() < until and not any(thread.done() for thread in threads):
                    time.sleep(self._rng.expovariate(1 / PAUSE_S))
                    self._kill(self._rng.choice(VICTIMS))
                self._over.set()
                for thread in threads:
                    thread.result()
            self._log(f"{len(talks)} talks, {dict(self.killed)} killed")
            for talk in talks:
                if talk.texts != (due := expected[talk._kind, talk._by_session].texts):
                    self.fault(f"{talk._name} is {talk.texts}, expected {due}")
            turns = sum(len(talk.texts) for talk in talks)
            self._log("\n".join(self.faults))
            self._delete([*talks, *expected.values()])
            self._kv.close()
        return {
            "minutes": self._minutes,
            "talks": len(talks),
            "turns": turns,
            "unstored": self.unstored,
            "killed": dict(self.killed),
            "took_s": round(time.monotonic() - began, 1),
            "faults": self.faults,
        }

    def _talk(self, thread: int, talks: list[Talk]) -> None:
        """Hold one talk after the other."""
        rng, number = random.Random(f"{self._seed} {thread}"), 0
        while not self._over.is_set():
            kind, session = rng.randrange(KINDS), rng.random() < 0.5
            talk = Talk(self, f"talk-{thread}-{number}", kind, session=session)
            talk.hold()
            with self._lock:
                talks.append(talk)
            number += 1

    def _delete(self, talks: list[Talk]) -> None:
        """Delete all talks, and check that nothing is left."""
        stored = Counter(name for talk in talks for name in talk.responses)
        if doubled := [name for name, count in stored.items() if count > 1]:
            self.fault(f"two turns have one response: {doubled}")
        sessions = [name for talk in talks for name in talk.sessions]
        usage = self._usage()
        if (usage.documents, usage.in_progress) != (len(stored) + len(sessions), 0):
            self.fault(f"the database has {usage}, expected {len(stored)} responses and {len(sessions)} sessions")
        for name in sessions:
            self.call("DELETE", f"/v1/sessions/{name}")
        for name in stored:
            self.call("DELETE", f"/v1/responses/{name}")
        if left := self._usage().documents:
            self.fault(f"{left} documents are left after all were deleted")
        deadline = time.monotonic() + GONE_S
        while True:
            with self._cluster.client() as kv:
                left_over = [*leftovers.not_given_back(kv.stats())]
            if not left_over or time.monotonic() > deadline:
                break
            time.sleep(AGAIN_S)
        self.faults += left_over


def run(minutes: float, seed: int, *, postgres: bool, log: Log) -> dict[str, Any]:
    """Run in a folder of its own and return the report."""
    with storage("conversations", postgres=postgres) as (url, folder):
        report = Conversations(minutes, seed, url, folder, log).run()
    return {"seed": seed, "database": "postgresql" if postgres else "sqlite", **report}


def main() -> int:
    """Print the report; return exit status 1 if it has faults."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    options = parser.parse_args()
    return show(TITLE, run(options.minutes, options.seed, postgres=options.postgres, log=log), options.json)


if __name__ == "__main__":
    sys.exit(main())
