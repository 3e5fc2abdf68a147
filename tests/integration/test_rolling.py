"""A rolling restart replaces workers and coordinator one by one, invisibly to clients."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from kvforge import Client, SamplingParams
from kvforge.protocol.errors import KvforgeError
from tools.cluster.cluster import Cluster

from .mixed import Shape
from .shared import wait_empty
from .test_thousand import submitted

READERS = 4
DEADLINE_S = 60.0
BETWEEN = 10  # answers between one replacement and the next
LONG = 800  # tokens of the stream, which has about 300 of these after the last replacement
KEEPS = 'on_stop = "keep"\n[schedule]\nstep_rows_max = 16\n'


@dataclass
class Load:
    """Clients that submit continuously, each in its own thread, without code for failures."""

    endpoint: str
    alone: dict[Shape, tuple[int, ...]]
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    over: bool = False
    more: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the load until the `with` block ends, then wait for the requests in flight."""
        threads = [threading.Thread(target=self._use, args=(i,)) for i in range(READERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.over = True
            for thread in threads:
                thread.join(DEADLINE_S)

    def wait_answers(self, more: int) -> None:
        """Wait for `count` more answers, or a wrong one."""
        with self.more:
            until = self.answers + more
            there = self.more.wait_for(lambda: self.answers >= until or bool(self.wrong), DEADLINE_S)
        assert there, f"{self.answers} answers, {until} were waited for"
        assert not self.wrong, self.wrong

    def _use(self, number: int) -> None:
        kinds = list(self.alone)
        with Client(self.endpoint, timeout_s=DEADLINE_S) as kv:
            for turn in count(number):
                if self.over:
                    return
                chosen = [kinds[(turn * READERS * 3 + i) % len(kinds)] for i in range(3)]
                try:
                    given = [
                        kv.submit(s.prompt, max_tokens=s.max_tokens, sampling=s.sampling, tenant=s.tenant)
                        for s in chosen
                    ]
                    self._note([(s, request.result().tokens) for s, request in zip(chosen, given, strict=True)])
                except KvforgeError as error:
                    with self.more:
                        self.wrong.append(repr(error))
                        self.more.notify()
                    return

    def _note(self, answers: list[tuple[Shape, tuple[int, ...]]]) -> None:
        with self.more:
            self.answers += len(answers)
            self.wrong += [f"{shape} gave {came}" for shape, came in answers if came != self.alone[shape]]
            self.more.notify()


def answers_together(kv: Client) -> dict[Shape, tuple[int, ...]]:
    """Return each shape's undisturbed answer, without cached prefixes."""
    return {shape: request.result(DEADLINE_S).tokens for shape, request in [*submitted(kv)]}


def replace_worker(cluster: Cluster, kv: Client, name: str) -> None:
    """Restart a worker like `systemctl restart`: stop, wait, start; return when the successor serves."""
    cluster.signal(name, signal.SIGTERM)
    assert cluster.end(name) == 0
    cluster.start_worker(name)
    cluster.wait_workers(kv, 2)


def test_nobody_notices_a_rolling_restart() -> None:
    with Cluster(blocks=256, coordinator=KEEPS) as cluster:
        kv = cluster.start("w0", "w1")
        alone = answers_together(kv)
        long = SamplingParams(temperature=1.0, seed=5, ignore_eos=True)
        whole = kv.submit([1, 2, 3], max_tokens=LONG, sampling=long).result(120).tokens
        load = Load(cluster.endpoint, alone)
        stream = kv.submit([1, 2, 3], max_tokens=LONG, sampling=long)  # read before and after all replacements
        reader = iter(stream)
        tokens = [next(reader).token_id]
        with load.running():
            load.wait_answers(BETWEEN)
            for name in ("w0", "w1"):
                replace_worker(cluster, kv, name)
                load.wait_answers(BETWEEN)
            cluster.signal("coordinator", signal.SIGTERM)
            assert cluster.end("coordinator") == 0
            cluster.start_coordinator()
            load.wait_answers(BETWEEN)
        assert not load.wrong
        tokens += [token.token_id for token in reader]
        assert tuple(tokens) == whole
        requests = wait_empty(kv).requests
        assert (requests.failed_total, requests.expired_total, requests.cancelled_total) == (0, 0, 0)
        assert requests.finished_total == requests.accepted_total == load.answers + len(alone) + 2
        assert "the next start resumes" in cluster.log("coordinator")
        assert cluster.log("w1").count("registered: blocks") == 2, "the coordinator's restart costs no registration"
