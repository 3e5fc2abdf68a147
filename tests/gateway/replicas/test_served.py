"""A gateway over real replicas of a tiny model: routing, and the visible effects of a crash."""

from __future__ import annotations

import asyncio
import json
import select
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvforge import Client
from kvforge.routing import seed_of
from tests.gateway.served import NO_CERTIFICATES, Gateway
from tools.chaos import tokenizer
from tools.cluster.cluster import Cluster
from tools.cluster.drafting_cluster import NO_DRAFTS

NAMES = ("a", "b", "c")
DEADLINE_S = 60.0
LONG = 150
TRIES = 5


_UNDISTURBED: dict[str, list[int]] = {}


class Replicas:
    """Three replicas and a gateway. failover_s: the gateway's setting."""

    def __init__(self, stack: ExitStack, folder: Path, failover_s: float = 1.0) -> None:
        self.failover_s = failover_s
        # With drafts, an answer that was given before would be over before a disturbance comes.
        self.clusters = {name: stack.enter_context(Cluster(blocks=512, coordinator=NO_DRAFTS)) for name in NAMES}
        self.clients: dict[str, Client] = {}
        for cluster in self.clusters.values():
            tokenizer.write(cluster.model)
            cluster.start_coordinator()
            cluster.start_worker("w0")
        self._connect()
        self.file = folder / "gateway.toml"
        runtime = self.clusters["a"].runtime
        self.gateway = stack.enter_context(Gateway(runtime, folder, self.settings(*NAMES)))
        self.wait(lambda: all(one["ready"] for one in self.health()["replicas"].values()))

    def _connect(self) -> None:
        """Take new clients, and wait for the replicas."""
        for name, cluster in self.clusters.items():
            if name in self.clients:
                self.clients[name].close()
            self.clients[name] = cluster.client()
        for client in self.clients.values():
            client.wait_ready(DEADLINE_S)

    def mend(self) -> None:
        """Start or continue the processes of the last test, and wait until the gateway serves from all replicas."""
        for name, cluster in self.clusters.items():
            for process in ("coordinator", "w0"):
                if cluster.status(process) is None:
                    cluster.signal(process, signal.SIGCONT)
            if cluster.status("coordinator") is None and self.clients[name].health().draining:
                cluster.kill("coordinator")
            if cluster.status("coordinator") is not None:
                cluster.start_coordinator()
            if cluster.status("w0") is not None:
                cluster.start_worker("w0")
        self._connect()
        self.use(*NAMES)
        self.wait(lambda: all(one["ready"] for one in self.health()["replicas"].values()))

    def settings(self, *names: str) -> str:
        places = "".join(f'[replicas.{name}]\nruntime_dir = "{self.clusters[name].runtime}"\n' for name in names)
        return f'names = ["tiny"]\nfailover_s = {self.failover_s}\n{places}'

    def use(self, *names: str) -> None:
        """Change the gateway's list of replicas, and wait until it takes effect."""
        self.file.write_text(self.settings(*names))
        self.gateway.process.send_signal(signal.SIGHUP)
        self.wait(lambda: tuple(self.health()["replicas"]) == names)

    def health(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self.gateway.url}/health", timeout=5) as answer:  # noqa: S310 - ours
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            return dict(json.load(error))

    def wait(self, wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not wanted():
            assert time.monotonic() < deadline, self.health()
            select.select([], [], [], 0.05)

    def ready(self, name: str) -> bool:
        return bool(self.health()["replicas"][name]["ready"])

    def accepted(self) -> dict[str, int]:
        return {name: client.stats().requests.accepted_total for name, client in self.clients.items()}

    def ask(self, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        url = f"{self.gateway.url}/v1/completions"
        answer = httpx.post(url, json=body(prompt, **fields), headers=headers, timeout=60, verify=NO_CERTIFICATES)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def undisturbed(self, asked: list[dict[str, Any]]) -> list[list[int]]:
        """Return the tokens of undisturbed answers, asked together.

        Every test's replicas have the same weights: an answer that an earlier test got is not asked for again.
        """
        missing = [each for each in asked if json.dumps(each) not in _UNDISTURBED]
        answers = asyncio.run(together(self, [(each, {}) for each in missing]))
        _UNDISTURBED.update({json.dumps(each): answer for each, answer in zip(missing, answers, strict=True)})
        return [_UNDISTURBED[json.dumps(each)] for each in asked]

    def tokens(self, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> list[int]:
        """Return the tokens of an undisturbed answer."""
        return list(self.ask(prompt, headers, **fields)["choices"][0]["token_ids"])


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    fixed = {"temperature": 0.8, "seed": 7, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": prompt, **fixed, **fields}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Return replicas and a gateway; their start takes most of the time of these tests."""
    with ExitStack() as stack:
        yield Replicas(stack, tmp_path_factory.mktemp("gateway"))


@pytest.fixture
def served(replicas: Replicas) -> Replicas:
    """Return replicas that all serve. Their counters and their prefix caches go on between tests."""
    replicas.mend()
    return replicas


def prompt_of(number: int, length: int = 40) -> list[int]:
    """Return a prompt; its first block is unlike those of all numbers besides."""
    return [3 + number // 250, *(3 + (7 * number + at * (1 + number % 5)) % 250 for at in range(1, length))]


async def streamed(url: str, asked: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[list[int]]:
    """Yield the tokens of an answer as they arrive."""
    async with (
        httpx.AsyncClient(timeout=DEADLINE_S, verify=NO_CERTIFICATES) as http,
        http.stream("POST", f"{url}/v1/completions", json={**asked, "stream": True}, headers=headers) as stream,
    ):
        assert stream.status_code == 200, await stream.aread()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                said = json.loads(line[6:])
                assert "error" not in said, said
                for choice in said["choices"]:
                    yield choice.get("token_ids") or []


async def together(served: Replicas, asked: list[tuple[dict[str, Any], dict[str, str]]]) -> list[list[int]]:
    """Return the answers to requests that run at once."""

    async def one(each: dict[str, Any], headers: dict[str, str]) -> list[int]:
        return [token async for more in streamed(served.gateway.url, each, headers) for token in more]

    return list(await asyncio.gather(*(one(*each) for each in asked)))


async def under_load(
    served: Replicas,
    asked: list[tuple[dict[str, Any], dict[str, str]]],
    misfortune: Callable[[], None],
    after: int,
    before: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Return the answers, after a disturbance once that many tokens have arrived; `before` comes at a tenth."""
    came = 0
    struck = warned = False

    async def one(each: dict[str, Any], headers: dict[str, str]) -> list[int]:
        nonlocal came, struck, warned
        tokens: list[int] = []
        async for more in streamed(served.gateway.url, each, headers):
            tokens += more
            came += len(more)
            if came >= after // 10 and not warned:
                warned = True
                before()
            if came >= after and not struck:
                struck = True
                misfortune()
        return tokens

    answers = await asyncio.gather(*(one(*each) for each in asked))
    assert struck
    return list(answers)


def test_a_prompt_goes_where_it_is_held_and_others_are_spread(served: Replicas) -> None:
    before = served.accepted()

    def came() -> dict[str, int]:
        return {name: count - before[name] for name, count in served.accepted().items()}

    shared = prompt_of(101, 400)
    first = served.ask(shared)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    home = [name for name, count in came().items() if count]
    assert len(home) == 1
    for at in range(4):
        again = served.ask([*shared, *prompt_of(150 + at, 16)])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 384
    assert [name for name, count in came().items() if count] == home
    for at in range(6):
        served.ask(prompt_of(102 + at, 64))
    assert all(came().values())


@pytest.mark.parametrize("how", ["killed", *(pytest.param(how, marks=pytest.mark.soak) for how in ("hung", "drained"))])
def test_a_replica_that_is_lost_under_load_loses_nothing_and_changes_no_token(served: Replicas, how: str) -> None:
    victim = served.clusters["a"]

    def questions(first: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
        """Return prompts that no test has asked before: one that is held goes where it is, so perhaps none to "a"."""
        asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        for at in range(first, first + 12):
            fields: dict[str, Any] = {"seed": at, "max_tokens": LONG}
            headers = {"idempotency-key": f"k{at}"} if at % 2 else {}
            if at % 4 == 1:
                fields["seed"] = None  # derived from the key
            asked.append((body(prompt_of(at), **fields), headers))
        return asked

    running: list[int] = []

    def misfortune() -> None:
        running.append(served.clients["a"].stats().requests.running)
        if running[-1] > 0:
            if how == "killed":
                victim.kill("coordinator")
                victim.kill("w0")
                return
            if how == "hung":
                victim.signal("coordinator", signal.SIGSTOP)
            else:
                served.clients["a"].drain(deadline_s=0.001)
        victim.signal("w0", signal.SIGCONT)

    def stand() -> None:
        """Stop the worker: its requests must not end before the misfortune."""
        victim.signal("w0", signal.SIGSTOP)

    hundred = 100 * (2 + ("killed", "hung", "drained").index(how))
    for attempt in range(TRIES):  # this process may have to wait for a core until all answers have ended there
        first = hundred + 12 * attempt
        asked = questions(first)
        answers = asyncio.run(under_load(served, asked, misfortune, 400, stand))
        if running[-1] > 0:
            break
    assert running[-1] > 0, "no request was running"
    if how == "hung":
        served.wait(lambda: not served.ready("a"))
        victim.signal("coordinator", signal.SIGCONT)
        served.wait(lambda: served.ready("a"))
    else:
        assert not served.ready("a") and served.ready("b") and served.health()["ready"]
    seeded = [
        {**each, "seed": each["seed"] if each["seed"] is not None else seed_of("default", f"k{at}")}
        for at, (each, _) in enumerate(asked, first)
    ]
    for at, expected in enumerate(served.undisturbed(seeded)):
        assert len(expected) == LONG
        assert answers[at] == expected, f"answer {at}"


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Replicas]:
    """Use a patience that no busy machine exceeds."""
    with ExitStack() as stack:
        yield Replicas(stack, tmp_path, DEADLINE_S)


def test_a_gateway_that_was_killed_finds_the_request_again(patient: Replicas) -> None:
    served = patient
    prompt, headers = prompt_of(3), {"idempotency-key": "again"}
    asked = {**body(prompt, max_tokens=LONG, seed=None), "stream": True}
    got: list[int] = []
    with httpx.stream("POST", f"{served.gateway.url}/v1/completions", json=asked, headers=headers) as stream:
        try:
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    got += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if len(got) >= 20:
                        served.gateway.kill()
        except httpx.RemoteProtocolError:
            pass
    served.gateway.start(served.gateway.port)
    before = served.accepted()
    again = served.tokens(prompt, headers, max_tokens=LONG, seed=None)
    assert served.accepted() == before, "it is the same request, where it is"
    assert again[: len(got)] == got and len(again) == LONG


def test_replicas_come_and_go_while_streams_are_open(served: Replicas) -> None:
    here: list[int] = []
    gone = served.clients["a"]
    earlier = gone.stats().requests

    def misfortune() -> None:
        here.append(gone.stats().requests.running)
        served.use("c", "b")

    for attempt in range(TRIES):  # this process may have to wait for a core until all answers have ended there
        served.use(*NAMES)
        served.wait(lambda: all(served.ready(name) for name in NAMES))
        # Prompts that no test has asked before: one that is held goes where it is, and an earlier test ended "a".
        numbers = range(40 + 6 * attempt, 46 + 6 * attempt)
        asked = [(body(prompt_of(number), seed=number, max_tokens=LONG), {}) for number in numbers]
        answers = asyncio.run(under_load(served, asked, misfortune, 50))
        assert [len(answer) for answer in answers] == [LONG] * 6
        if here[-1] > 0:
            break
    assert here[-1] > 0
    stats = gone.stats().requests
    lost = (stats.cancelled_total - earlier.cancelled_total, stats.failed_total - earlier.failed_total)
    assert lost == (0, 0), "running requests must finish"
    before = served.accepted()
    for at in range(3):
        assert len(served.tokens(prompt_of(10 + at))) == 8
    for at, expected in enumerate(served.undisturbed([each for each, _ in asked])):
        assert answers[at] == expected, f"answer {at}"
    assert served.accepted()["a"] == before["a"], "and nothing new goes there"
    served.wait(lambda: gone.stats().clients == 1)
    served.use("a")
    served.wait(lambda: served.ready("a"))
    assert served.tokens(prompt_of(9)) and served.accepted()["a"] == before["a"] + 1
    served.file.write_text('names = ["tiny"]\n')
    served.gateway.process.send_signal(signal.SIGHUP)
    served.wait(
        lambda: "the old keys and replicas stay in use: replicas: " in (served.file.parent / "gateway.log").read_text()
    )
    assert served.health()["ready"]


def test_no_worker_is_left_and_nothing_is_said_to_be_served(served: Replicas) -> None:
    """The coordinators answer, but there are no workers."""
    for name, cluster in served.clusters.items():
        cluster.kill("w0")
        served.wait(lambda name=name: not served.ready(name))  # type: ignore[misc]
    served.wait(lambda: not served.health()["ready"])
    answer = httpx.get(f"{served.gateway.url}/v1/models")
    assert answer.status_code == 503 and "no worker is connected" in answer.text
    served.clusters["c"].start_worker("w0")
    served.wait(lambda: httpx.get(f"{served.gateway.url}/v1/models", verify=NO_CERTIFICATES).status_code == 200)


def test_rank_0_is_dead_and_nothing_is_said_to_be_served(tmp_path: Path) -> None:
    """The other rank and the coordinator still run."""
    with Cluster(blocks=512, ranks=2) as cluster:
        tokenizer.write(cluster.model)
        cluster.start("w0", "w1")
        place = f'names = ["tiny"]\n[replicas.a]\nruntime_dir = "{cluster.runtime}"\n'
        with Gateway(cluster.runtime, tmp_path, place) as gateway:
            assert httpx.get(f"{gateway.url}/v1/models", verify=NO_CERTIFICATES).status_code == 200
            cluster.kill("w0")
            deadline = time.monotonic() + DEADLINE_S
            while httpx.get(f"{gateway.url}/v1/models", verify=NO_CERTIFICATES).status_code != 503:
                assert time.monotonic() < deadline
                select.select([], [], [], 0.05)
            assert httpx.get(f"{gateway.url}/health").status_code == 503


def test_nothing_is_said_to_be_served_where_nobody_serves(served: Replicas) -> None:
    for cluster in served.clusters.values():
        cluster.kill("coordinator")
    served.wait(lambda: not served.health()["ready"])
    for path in ("/v1/models", "/health"):
        assert httpx.get(f"{served.gateway.url}{path}").status_code == 503
    answer = httpx.post(f"{served.gateway.url}/v1/completions", json=body(prompt_of(1)))
    assert answer.status_code == 503
    served.clusters["b"].start_coordinator()
    served.wait(lambda: served.ready("b"))
    assert served.tokens(prompt_of(1))
