"""One client of a chaos run: it runs one operation after the other and checks each token it receives.

The client does what any user would, without code for lost connections. It records each request and each result before
it goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvforge import AsyncClient, AsyncRequest, CoordinatorUnavailable, DeadlineExceeded, KvforgeError
from kvforge.client.sequences import CachedSequence

from .cases import SAMPLES_MAX, Answer, Case, Known
from .notes import ACCEPTED, ASKED, BROKEN, CANCELLING, ENDED, FAULT, LEFT, REFUSED, UNKNOWN, Notes

THINK_S = 0.3  # mean pause between two operations
CANCELLED = "cancelled"
FIRST, SECOND = 1, 2  # turns


class RandomClient:
    """A client, identified by its name.

    It records every error; the ledger decides whether the process faults excuse it.
    """

    def __init__(self, kv: AsyncClient, notes: Notes, known: Sequence[Known], name: str) -> None:
        self._kv, self._notes, self._known, self._name = kv, notes, known, name
        self._rng = random.Random(name)
        self._asked = 0
        self._operations: list[tuple[int, Callable[[Known], Awaitable[None]]]] = [
            (6, self._plain),
            (4, self._keyed),
            (3, self._detached),
            (2, self._samples),
            (3, self._conversation),
            (2, self._cancelled),
            (2, self._merged),
        ]

    async def run(self, over: Callable[[], bool]) -> None:
        """Run operations until `over()` returns True; finish the current one first."""
        weights, operations = zip(*self._operations, strict=True)
        while not over():
            (operation,) = self._rng.choices(operations, weights)
            try:
                await operation(self._rng.choice(self._known))
            except KvforgeError as error:
                self._notes.write(BROKEN, what=operation.__name__, code=error.code, message=error.message)
            await asyncio.sleep(self._rng.expovariate(1 / THINK_S))

    async def resume_intents(self, before: Sequence[dict[str, Any]]) -> None:
        """Resume the intents of a killed client: repeat those with a key, attach to the detached ones."""
        for intent in before:
            known = self._known[intent["case"]]
            try:
                if intent["how"] == "key":
                    requests = await self._submit(known, intent["name"], key=intent["name"])
                else:
                    requests = tuple([await self._kv.attach(request_id) for request_id in intent["ids"]])
                await self._all(requests, known.answers)
            except KvforgeError as error:
                self._notes.write(BROKEN, what="resume_intents", code=error.code, message=error.message)

    # --------------------------------------------------------------------------------------------------- operations

    async def _plain(self, known: Known) -> None:
        for request in await self._submit(known):
            await self.read(request, known.answers[0])

    async def _keyed(self, known: Known) -> None:
        """Submit with a key twice: while the first request runs, or after it."""
        name = self._new_name()
        first = await self._submit(known, name, key=name)
        at_once = self._rng.random() < 0.5
        if not at_once:
            await self._all(first, known.answers)
        again = await self._submit(known, name, key=name)
        await self._all((*first, *again) if at_once else again, known.answers)

    async def _detached(self, known: Known) -> None:
        """Abandon a detached request, or read a part and attach again for the rest."""
        for request in await self._submit(known, detached=True):
            if self._rng.random() < 0.5:
                self._notes.write(LEFT, id=request.id)
                continue
            some = self._rng.randrange(known.case.max_tokens)
            if not await self.read(request, known.answers[0], some):
                offset = self._rng.randint(0, len(request.tokens))
                await self.read(await self._kv.attach(request.id, offset), known.answers[0])

    async def _samples(self, known: Known) -> None:
        count = self._rng.randint(2, SAMPLES_MAX)
        name = self._new_name()
        self._note_asked(name, known.case, FIRST, count, "samples")
        requests = await self._accepted(
            name,
            self._kv.submit_samples(
                known.case.prompt, count, max_tokens=known.case.max_tokens, sampling=known.case.drawn()
            ),
        )
        await self._all(requests, known.answers)

    async def _merged(self, known: Known) -> None:
        others = [known, self._rng.choice(self._known)]
        requests = [request for other in others for request in await self._submit(other)]
        if len(requests) < len(others):
            return
        came: dict[int, list[int]] = {request.id: [] for request in requests}
        async for request, token in self._kv.merge(*requests):
            if token.offset != len(came[request.id]):
                self._fault(
                    f"request {request.id}: token {token.offset} arrived, expected offset {len(came[request.id])}"
                )
            came[request.id].append(token.token_id)
        for request, other in zip(requests, others, strict=True):
            if tuple(came[request.id]) != request.tokens:
                self._fault(
                    f"request {request.id}: merge yielded {came[request.id]}, but the request has {request.tokens}"
                )
            await self.read(request, other.answers[0])

    async def _cancelled(self, known: Known) -> None:
        for request in await self._submit(known):
            if not await self.read(request, known.answers[0], self._rng.randrange(known.case.max_tokens)):
                self._notes.write(CANCELLING, id=request.id)
                await request.cancel()
                await self.read(request, known.answers[0])

    async def _conversation(self, known: Known) -> None:
        """Run two turns on a sequence; the second one also on a fork."""
        case, answer = known.case, known.answers[0]
        sequence = await self._kv.create_sequence(case.prompt)
        held = [sequence]
        try:
            for request in await self._turn(sequence, (), case, FIRST):
                if await self.read(request, answer) == answer.reason:
                    held += await self._kv.fork(sequence)
                    await asyncio.gather(*(self._second(each, known) for each in held))
        finally:
            await self._kv.remove(held)

    async def _second(self, sequence: CachedSequence, known: Known) -> None:
        before = (*known.case.prompt, *known.answers[0].tokens)
        if (tokens := await self._kv.tokens(sequence)) != before:
            self._fault(f"sequence {sequence.id} has {tokens}, expected {before}")
        for request in await self._turn(sequence, known.case.follow, known.case, SECOND):
            await self.read(request, known.second)

    # --------------------------------------------------------------------------------------------------- submitting

    async def _submit(
        self, known: Known, name: str = "", *, key: str = "", detached: bool = False
    ) -> tuple[AsyncRequest, ...]:
        """Submit a first turn; return no request if it was not accepted."""
        name, case = name or self._new_name(), known.case
        self._note_asked(name, case, FIRST, 1, "key" if key else "detached" if detached else "plain")
        call = self._kv.submit(
            case.prompt, max_tokens=case.max_tokens, sampling=case.drawn(), idempotency_key=key, detached=detached
        )
        return await self._accepted(name, _one(call))

    async def _turn(
        self, sequence: CachedSequence, tokens: tuple[int, ...], case: Case, turn: int
    ) -> tuple[AsyncRequest, ...]:
        name = self._new_name()
        self._note_asked(name, case, turn, 1, "sequence")
        most = case.max_tokens if turn == FIRST else case.follow_max_tokens
        call = self._kv.submit(tokens, sequence=sequence, max_tokens=most, sampling=case.drawn())
        return await self._accepted(name, _one(call))

    def _new_name(self) -> str:
        self._asked += 1
        return f"{self._name}-{self._asked}"

    def _note_asked(self, name: str, case: Case, turn: int, count: int, how: str) -> None:
        self._notes.write(ASKED, name=name, case=case.number, turn=turn, count=count, how=how)

    async def _accepted(self, name: str, call: Awaitable[tuple[AsyncRequest, ...]]) -> tuple[AsyncRequest, ...]:
        try:
            requests = await call
        except KvforgeError as error:
            kind = UNKNOWN if isinstance(error, CoordinatorUnavailable | DeadlineExceeded) else REFUSED
            self._notes.write(kind, name=name, code=error.code, message=error.message)
            return ()
        self._notes.write(ACCEPTED, name=name, ids=[request.id for request in requests])
        return requests

    # ------------------------------------------------------------------------------------------------------- reading

    async def _all(self, requests: Sequence[AsyncRequest], answers: Sequence[Answer]) -> None:
        """Read requests concurrently; `answers` has one entry per request, or one for all."""
        several = answers if len(requests) > 1 and len({request.id for request in requests}) > 1 else [answers[0]] * 2
        await asyncio.gather(*(self.read(*each) for each in zip(requests, several, strict=False)))

    async def read(self, request: AsyncRequest, answer: Answer, most: int | None = None) -> str:
        """Check up to `most` tokens of a request.

        Args:
            request: the request.
            answer: the expected answer.
            most: maximum tokens to read, or None for all.

        Returns:
            The finish reason, or "" if the request has not ended or this client cannot see its end.
        """
        at = request.start
        try:
            if most != 0:
                async for token in request:
                    due = answer.tokens[at] if at < len(answer.tokens) else None
                    if (token.offset, token.token_id) != (at, due):
                        self._fault(
                            f"request {request.id}: got {token.token_id} at {token.offset}, expected {due} at {at}"
                        )
                    at += 1
                    if most is not None and at >= most:
                        break
            if not request.done:
                return ""
            done = await request.result()
        except KvforgeError as error:
            self._notes.write(BROKEN, id=request.id, code=error.code, message=error.message)
            return ""
        due_end = answer.tokens[request.start : request.start + len(done.tokens)]
        if done.tokens != due_end or (done.reason != CANCELLED and _end(request, done.tokens) != len(answer.tokens)):
            self._fault(f"request {request.id} ended with {done.tokens}, not {answer.tokens[request.start :]}")
        if done.reason not in (answer.reason, CANCELLED):
            self._fault(f"request {request.id} ended by {done.reason}, expected {answer.reason}")
        self._notes.write(ENDED, id=request.id, reason=done.reason, tokens=_end(request, done.tokens))
        return done.reason

    def _fault(self, what: str) -> None:
        self._notes.write(FAULT, what=f"{self._name}: {what}")


def _end(request: AsyncRequest, tokens: tuple[int, ...]) -> int:
    """Return how many tokens the request has generated, also if it was read from an offset on."""
    return request.start + len(tokens)


async def _one(call: Awaitable[AsyncRequest]) -> tuple[AsyncRequest, ...]:
    return (await call,)
