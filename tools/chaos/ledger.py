"""The ledger of a chaos run: compares the coordinator's record of each request with what its client observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvforge import AsyncClient
from kvforge.protocol.messages import RequestInfo

from .cases import Answer, Known
from .interruptions import COORDINATOR, GATEWAY
from .notes import LOST, ClientNotes, Intent
from .processes import Suspension
from .python_client import CANCELLED, FIRST

LIST_MAX = 1000
FINISHED = "finished"
ENDED_STATES = (FINISHED, CANCELLED, "failed", "expired")
NO_ROOM = "capacity_exceeded"  # expected: the pools are small and running requests may fill them
DRAINING = "draining"  # the end of an answer that a stopped gateway cut off after its drain_s
EXCUSED_S = 60.0  # errors may show up this long after an absence


@dataclass(frozen=True)
class Record:
    """The coordinator's record of a finished request."""

    state: str
    reason: str
    max_tokens: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.state} ({self.reason}) after {len(self.tokens)} tokens of {self.max_tokens}"


class Ledger:
    """Collected records and the violations found in them.

    Attributes:
        records: request id -> the record of a finished request.
        before: ids of requests that finished before the first process fault.
        faults: descriptions of violations.
    """

    def __init__(self, known: Sequence[Known]) -> None:
        self.records: dict[int, Record] = {}
        self.before: frozenset[int] = frozenset()
        self.faults: list[str] = []
        self.running = 0
        self._known = known
        self._answers: dict[int, tuple[Answer, ...]] = {}
        for each in known:
            self._answers[each.case.max_tokens] = each.answers
            self._answers[each.case.follow_max_tokens] = (each.second,)

    async def begin(self, kv: AsyncClient) -> None:
        """Set aside the requests that have finished so far: no client of the run owns them."""
        await self.look(kv)
        self.before = frozenset(self.records)

    async def look(self, kv: AsyncClient) -> None:
        """List the newest requests and fetch the status of those that finished since the last call."""
        listed = await kv.requests(LIST_MAX)
        self.running = sum(row.state not in ENDED_STATES for row in listed.requests)
        for row in listed.requests:
            record = self.records.get(row.request_id)
            if record is None:
                if row.state in ENDED_STATES:
                    self._settle(await kv.status(row.request_id, with_tokens=True))
            elif (row.state, row.reason, row.generated_tokens) != (record.state, record.reason, len(record.tokens)):
                self._fault(f"request {row.request_id} changed after its end: {record}, now {row}")

    def _settle(self, info: RequestInfo) -> None:
        tokens = tuple(info.tokens.tolist())
        self.records[info.request_id] = Record(info.state, info.reason, info.max_tokens, tokens)
        answers = self._answers[info.max_tokens]
        if info.state not in (FINISHED, CANCELLED):
            self._fault(f"request {info.request_id} is {info.state}: {info.error}")
        elif not any(_fits(answer, info.state, tokens) for answer in answers):
            self._fault(
                f"request {info.request_id} is {info.state} with {tokens}, not one of {[a.tokens for a in answers]}"
            )

    def account(self, stories: Sequence[ClientNotes], absences: Sequence[Suspension], killed: Collection[str]) -> None:
        """Compare the records with the client processes' notes.

        Args:
            stories: the notes of each client process.
            absences: when processes were stopped long enough to be dropped, and when the gateway was asked to end.
            killed: names of killed client processes.
        """
        self.faults += [fault for story in stories for fault in story.faults]
        owners: dict[int, tuple[Intent, int]] = {}
        names = {intent.name for story in stories for intent in story.intents.values() if intent.settled}
        open_ends: Counter[int] = Counter()
        for story in stories:
            for intent in story.intents.values():
                for index, request_id in enumerate(intent.ids):
                    known = owners.setdefault(request_id, (intent, index))
                    if known[0].name != intent.name:
                        self._fault(f"request {request_id} belongs to both {known[0].name} and {intent.name}")
                if intent.name not in names:
                    open_ends[self._max_tokens(intent)] += intent.count
        for request_id, record in self.records.items():
            if request_id not in owners and request_id not in self.before:
                open_ends[record.max_tokens] -= 1
                if open_ends[record.max_tokens] < 0:
                    self._fault(f"request {request_id} was never submitted: {record}")
        for request_id, (intent, index) in owners.items():
            self._compare(request_id, intent, index)
        for story in stories:
            self._read(story, absences, story.process in killed)
        self._cancels(stories, owners, absences, killed)

    def _compare(self, request_id: int, intent: Intent, index: int) -> None:
        """Check that an accepted request exists and has the tokens of its own seed."""
        record = self.records.get(request_id)
        if record is None:
            self._fault(f"request {request_id} ({intent.name}) is lost: the coordinator has no record")
            return
        known = self._known[intent.case]
        answer = known.answers[index] if intent.turn == FIRST else known.second
        if not _fits(answer, record.state, record.tokens):
            self._fault(f"request {request_id} ({intent.name}) is {record}, expected {answer}")

    def _read(self, story: ClientNotes, absences: Sequence[Suspension], killed: bool) -> None:
        """Check that a client process saw the same ends as the coordinator, and missed none."""
        for request_id, note in story.ended.items():
            record = self.records.get(request_id)
            if record is not None and (note["reason"], note["tokens"]) != (record.reason, len(record.tokens)):
                self._fault(
                    f"request {request_id} ended as {note} for {story.process}, but the coordinator has {record}"
                )
        for note in story.broken:
            cut = GATEWAY if note["code"] == DRAINING else COORDINATOR
            away = [absence for absence in absences if absence.member in (story.process, COORDINATOR, cut)]
            if note["code"] not in (NO_ROOM, LOST) and not any(
                a.since <= note["at"] <= a.until + EXCUSED_S for a in away
            ):
                self._fault(f"{story.process} got an unexcused error (no absence): {note}")
        broken = {note.get("id") for note in story.broken}
        for intent in story.intents.values() if not killed else ():
            for request_id in intent.ids:
                if request_id not in story.ended and request_id not in story.left and request_id not in broken:
                    self._fault(f"request {request_id} ({intent.name}) has no end in its client's notes")

    def _cancels(
        self,
        stories: Sequence[ClientNotes],
        owners: dict[int, tuple[Intent, int]],
        absences: Sequence[Suspension],
        killed: Collection[str],
    ) -> None:
        """Check that each cancelled request was cancelled by a client, or ended with its client's connection.

        Only a client can cancel a detached request.
        """
        wanted = {request_id for story in stories for request_id in story.cancelling}
        away = {absence.member for absence in absences} | set(killed)
        excused = {
            request_id
            for story in stories
            if story.process in away or COORDINATOR in away
            for intent in story.intents.values()
            for request_id in intent.ids
        }
        excused |= {note.get("id", 0) for story in stories for note in story.broken if note["code"] in (LOST, DRAINING)}
        for request_id, record in self.records.items():
            if record.state != CANCELLED or request_id in wanted or request_id not in owners:
                continue
            if owners[request_id][0].how == "detached" or request_id not in excused:
                self._fault(f"request {request_id} ({owners[request_id][0].name}) was cancelled without a cause")

    def _max_tokens(self, intent: Intent) -> int:
        case = self._known[intent.case].case
        return case.max_tokens if intent.turn == FIRST else case.follow_max_tokens

    def _fault(self, what: str) -> None:
        self.faults.append(what)


def _fits(answer: Answer, state: str, tokens: tuple[int, ...]) -> bool:
    return tokens == answer.tokens if state == FINISHED else tokens == answer.tokens[: len(tokens)]
