"""The check finds lost and changed tokens: faults are planted into a correct run."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import numpy as np
import pytest

from kvforge import AsyncClient, Finished
from kvforge.loadtest.chaos.durability import NO_TOKEN, DurabilityCheck, check
from kvforge.loadtest.drive.outcome import FAILED, INTERRUPTED, REFUSED, TIMED_OUT, Outcome
from kvforge.protocol.errors import WorkerError
from kvforge.protocol.messages import Timings
from tests.loadtest.chaos.sessions import Sessions, draw, drive

LOAD = Sessions(6, 3, output_tokens=8)


class Server:
    """A stand-in for AsyncClient: an answer is a function of the prompt and the sampling parameters, as required."""

    def __init__(self, fails: bool = False, reason: str = "length") -> None:
        self.asked: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        self._fails, self._reason = fails, reason

    async def submit(self, prompt: Any, *, max_tokens: int, sampling: Any, tenant: str = "default", **_: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.asked.append({"prompt": prompt.tolist(), "tenant": tenant, "sampling": sampling})
        context = sum((place + 1) * token for place, token in enumerate(prompt.tolist()))
        drawn = int(sampling.temperature * 10) * int(sampling.seed)
        tokens = [(context * 31 + drawn + place * 7) % 97 for place in range(max_tokens)]
        return _Answer(self, len(self.asked), tokens)

    async def done(self, request_id: int, tokens: list[int]) -> Finished:
        await asyncio.sleep(0)
        self.under_way -= 1
        if self._fails:
            raise WorkerError("three workers died")
        return Finished(request_id, tuple(tokens), self._reason, 1, 0, Timings(), ())


class _Answer:
    def __init__(self, server: Server, request_id: int, tokens: list[int]) -> None:
        self.id, self._server, self._tokens = request_id, server, tokens

    async def result(self, timeout_s: float) -> Finished:
        return await self._server.done(self.id, self._tokens)


def client(server: Server) -> AsyncClient:
    return cast("AsyncClient", server)


def lived(temperature: float = 0.7) -> list[Outcome]:
    """Return the outcomes of a correct run."""
    return asyncio.run(drive(client(Server()), LOAD, temperature))


def checked(outcomes: list[Outcome], server: Server | None = None, **options: Any) -> DurabilityCheck:
    """Return the findings against an undisturbed server."""
    given = {"draw": draw, "temperature": 0.7, **options}
    return asyncio.run(check(outcomes, LOAD, client(server or Server()), **given))


def place(outcomes: list[Outcome], session: int, turn: int) -> Outcome:
    return next(outcome for outcome in outcomes if (outcome.session, outcome.turn) == (session, turn))


def test_a_run_without_faults_keeps_it() -> None:
    outcomes = lived()
    promise = checked(outcomes)
    assert promise.kept and (promise.accepted, promise.finished, promise.compared) == (18, 18, 18)
    assert promise.compared_tokens == 18 * 8
    assert promise.sentences() == [
        "the promise was kept: 18 of 18 accepted requests finished, 0 were lost; 18 answers (144 tokens) were "
        "compared with undisturbed twins, 0 differ, 0 have no twin"
    ]


def test_a_twin_is_the_same_request_with_the_prompt_that_was_really_sent() -> None:
    first, again = Server(), Server()
    outcomes = asyncio.run(drive(client(first), LOAD, 0.7))
    for outcome in outcomes:
        outcome.tenant = f"tenant {outcome.session % 2}"
    checked(outcomes, again)
    tenants = {tuple(one["prompt"]): one.pop("tenant") for one in again.asked}
    for one in first.asked:
        one.pop("tenant")
        assert one in again.asked
    assert len(again.asked) == len(first.asked) and set(tenants.values()) == {"tenant 0", "tenant 1"}


def test_so_many_twins_at_once_and_no_more() -> None:
    server = Server()
    assert checked(lived(), server, concurrency=4).kept
    assert server.most == 4


@pytest.mark.parametrize("turn", [0, 2])
def test_a_changed_token_is_named(turn: int) -> None:
    outcomes = lived()
    wrong = place(outcomes, 3, turn)
    right = wrong.tokens[5]
    wrong.tokens[5] = right + 1
    promise = checked(outcomes)
    # Later turns were really requested with the wrong token, and either match the server's answer to that, or not.
    first = promise.differences[0]
    assert not promise.kept
    assert (first.request_id, first.offset, first.token, first.twin_token) == (wrong.request_id, 5, right + 1, right)
    assert f"request {wrong.request_id} changed: token 5 is {right + 1}, without faults it is {right}" in (
        promise.sentences()
    )


@pytest.mark.parametrize(("cut", "token", "twin"), [(True, False, True), (False, True, False)])
def test_a_token_too_few_or_too_many_is_a_change(cut: bool, token: bool, twin: bool) -> None:
    outcomes = lived()
    wrong = place(outcomes, 1, 2)
    offset = 7 if cut else 8
    if cut:
        del wrong.tokens[7]
    else:
        wrong.tokens.append(5)
    promise = checked(outcomes)
    (difference,) = promise.differences
    assert (difference.request_id, difference.offset) == (wrong.request_id, offset)
    assert (difference.token != NO_TOKEN, difference.twin_token != NO_TOKEN) == (token, twin)
    (lost,) = promise.lost
    assert lost.problem == f"it has {len(wrong.tokens)} of 8 tokens"


@pytest.mark.parametrize("state", [FAILED, TIMED_OUT])
def test_a_request_that_was_accepted_and_did_not_end_finished_is_lost(state: str) -> None:
    outcomes = lived()
    gone = place(outcomes, 2, 2)
    gone.state, gone.code, gone.message = state, "request_not_found", "there is no request 9"
    del gone.tokens[3:]
    promise = checked(outcomes)
    assert not promise.kept and promise.differences == [], "as far as it came it is right"
    (lost,) = promise.lost
    assert (lost.request_id, lost.state) == (gone.request_id, state)
    assert f"request {gone.request_id} was lost: {state}, request_not_found: there is no request 9" in (
        promise.sentences()
    )


def test_what_was_told_of_a_lost_request_is_compared_too() -> None:
    outcomes = lived()
    gone = place(outcomes, 2, 2)
    gone.state = FAILED
    del gone.tokens[3:]
    gone.tokens[1] += 1
    promise = checked(outcomes)
    assert [difference.offset for difference in promise.differences] == [1] and len(promise.lost) == 1


def test_two_requests_under_one_id_are_one_too_few() -> None:
    outcomes = lived()
    outcomes[1].request_id = outcomes[0].request_id
    assert [lost.problem for lost in checked(outcomes).lost] == ["another request of the run has the same id"]


def test_one_that_was_refused_or_given_up_by_us_was_not_lost() -> None:
    outcomes = lived()
    refused, interrupted = place(outcomes, 0, 2), place(outcomes, 1, 2)
    refused.state, refused.request_id = REFUSED, 0
    interrupted.state = INTERRUPTED
    del interrupted.tokens[2:]
    promise = checked(outcomes)
    assert promise.kept and (promise.accepted, promise.finished) == (17, 16)


@pytest.mark.parametrize(
    ("server", "why"), [(Server(fails=True), "three workers died"), (Server(reason="cancelled"), "cancelled")]
)
def test_a_twin_that_cannot_be_had_proves_nothing(server: Server, why: str) -> None:
    promise = checked(lived(), server)
    assert not promise.kept and len(promise.unproven) == 18 and promise.compared == 0
    assert all(why in problem for problem in promise.unproven.values())


def test_an_answer_whose_tokens_are_not_known_is_not_proven_nor_are_those_after_it() -> None:
    outcomes = lived()
    unknown = place(outcomes, 4, 1)
    del unknown.tokens[:]
    promise = checked(outcomes)
    assert set(promise.unproven) == {unknown.request_id, place(outcomes, 4, 2).request_id}


def test_a_check_that_is_interrupted_proves_nothing_more() -> None:
    async def interrupted() -> DurabilityCheck:
        stop = asyncio.Event()
        stop.set()
        return await check(await drive(client(Server()), LOAD, 0.0), LOAD, client(Server()), draw=draw, stop=stop)

    promise = asyncio.run(interrupted())
    assert len(promise.unproven) == 18 and not promise.kept


def test_it_is_plain_values() -> None:
    outcomes = lived()
    for outcome in outcomes:
        outcome.tokens[0] += 1
    promise = checked(outcomes)
    found = json.loads(json.dumps(promise.json()))
    assert (found["kept"], found["different"], found["accepted"]) == (False, 18, 18)
    assert len(found["differences"]) == 18 and np.all([one["offset"] == 0 for one in found["differences"]])
