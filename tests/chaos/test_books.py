"""The ledger of a chaos run finds violations: each test plants one fault into consistent books."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvforge import CapacityExceeded, CoordinatorUnavailable, Draining
from kvforge.protocol.messages import RequestInfo, RequestRow
from tools.chaos.cases import Answer, Case, Known
from tools.chaos.interruptions import GATEWAY
from tools.chaos.ledger import Ledger, Record
from tools.chaos.notes import (
    ACCEPTED,
    ASKED,
    BROKEN,
    CANCELLING,
    ENDED,
    FAULT,
    LEFT,
    REFUSED,
    UNKNOWN,
    ClientNotes,
    Notes,
)
from tools.chaos.processes import LEFT_TAKEN_UP_MAX, Processes, Suspension

PROCESS = "p0.1"
GREEDY = {"temperature": 0.0}
FIRST_ANSWERS = (Answer((5, 6, 7), "length"), Answer((5, 6, 8), "length"))
KNOWN = Known(Case(0, (1, 2), GREEDY, 3, (4,), 2), FIRST_ANSWERS, Answer((9, 10), "length"))
OTHER = Known(Case(1, (2, 2), GREEDY, 4, (4,), 5), (Answer((1, 2, 3, 4), "length"),), Answer((1,) * 5, "length"))


class Books:
    """A request of each kind, consistent on both sides; change `records` and `notes` before calling `faults`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = {
            1: Record("finished", "length", 3, (5, 6, 7)),
            2: Record("finished", "length", 3, (5, 6, 7)),
            3: Record("finished", "length", 3, (5, 6, 8)),
            4: Record("cancelled", "cancelled", 4, (1, 2)),
            5: Record("finished", "length", 2, (9, 10)),
            6: Record("finished", "length", 4, (1, 2, 3, 4)),
        }
        self.notes: list[dict[str, Any]] = [
            {"kind": ASKED, "name": "a", "case": 0, "turn": 1, "count": 1, "how": "plain"},
            {"kind": ACCEPTED, "name": "a", "ids": [1]},
            {"kind": ENDED, "id": 1, "reason": "length", "tokens": 3},
            {"kind": ASKED, "name": "b", "case": 0, "turn": 1, "count": 2, "how": "samples"},
            {"kind": ACCEPTED, "name": "b", "ids": [2, 3]},
            {"kind": ENDED, "id": 2, "reason": "length", "tokens": 3},
            {"kind": ENDED, "id": 3, "reason": "length", "tokens": 3},
            {"kind": ASKED, "name": "c", "case": 1, "turn": 1, "count": 1, "how": "plain"},
            {"kind": ACCEPTED, "name": "c", "ids": [4]},
            {"kind": CANCELLING, "id": 4},
            {"kind": ENDED, "id": 4, "reason": "cancelled", "tokens": 2},
            {"kind": ASKED, "name": "d", "case": 0, "turn": 2, "count": 1, "how": "sequence"},
            {"kind": ACCEPTED, "name": "d", "ids": [5]},
            {"kind": ENDED, "id": 5, "reason": "length", "tokens": 2},
            {"kind": ASKED, "name": "e", "case": 1, "turn": 1, "count": 1, "how": "detached"},
            {"kind": ACCEPTED, "name": "e", "ids": [6]},
            {"kind": LEFT, "id": 6},
        ]
        self.absences: list[Suspension] = []
        self.killed: set[str] = set()

    def note(self, kind: str, **facts: Any) -> None:
        """Add a note."""
        self.notes.append({"kind": kind, **facts})

    def forget(self, kind: str, **facts: Any) -> None:
        """Remove a note."""
        self.notes.remove({"kind": kind, **facts})

    def faults(self) -> list[str]:
        """Return what the ledger finds."""
        path = self.folder / "notes"
        notes = Notes(path)
        for note in self.notes:
            notes.write(**note)
        notes.close()
        ledger = Ledger([KNOWN, OTHER])
        ledger.records = self.records
        ledger.account([ClientNotes.of(PROCESS, path)], self.absences, self.killed)
        return ledger.faults


@pytest.fixture
def books(tmp_path: Path) -> Books:
    return Books(tmp_path)


def test_books_that_are_in_order(books: Books) -> None:
    assert books.faults() == []


def _token_changed(books: Books) -> None:
    books.records[1] = Record("finished", "length", 3, (5, 6, 9))


def _token_doubled(books: Books) -> None:
    books.records[1] = Record("finished", "length", 3, (5, 6, 6))


def _token_lost(books: Books) -> None:
    books.records[1] = Record("finished", "length", 3, (5, 6))


def _other_samples_tokens(books: Books) -> None:
    books.records[3] = Record("finished", "length", 3, (5, 6, 7))


def _cancelled_with_wrong_tokens(books: Books) -> None:
    books.records[4] = Record("cancelled", "cancelled", 4, (1, 3))


def _request_lost(books: Books) -> None:
    del books.records[6]


def _request_doubled(books: Books) -> None:
    books.records[7] = Record("finished", "length", 3, (5, 6, 7))


def _key_made_two(books: Books) -> None:
    books.records[7] = books.records[1]
    books.note(ACCEPTED, name="a", ids=[7])


def _one_for_two(books: Books) -> None:
    books.note(ASKED, name="f", case=0, turn=1, count=1, how="plain")
    books.note(ACCEPTED, name="f", ids=[1])


def _end_never_seen(books: Books) -> None:
    books.forget(ENDED, id=1, reason="length", tokens=3)


def _end_seen_otherwise(books: Books) -> None:
    books.forget(ENDED, id=1, reason="length", tokens=3)
    books.note(ENDED, id=1, reason="length", tokens=2)


def _two_ends(books: Books) -> None:
    books.note(ENDED, id=1, reason="cancelled", tokens=3)


def _cancelled_by_nobody(books: Books) -> None:
    books.forget(CANCELLING, id=4)


def _detached_cancelled(books: Books) -> None:
    books.records[6] = Record("cancelled", "cancelled", 4, (1, 2))
    books.killed.add(PROCESS)


def _error_of_one_never_away(books: Books) -> None:
    books.note(BROKEN, what="_plain", code=CoordinatorUnavailable.code, message="gone", at=100.0)


def _fault_seen_by_a_client(books: Books) -> None:
    books.note(FAULT, what="request 1: 2 9 for 2 7")


PLANTED: list[tuple[Callable[[Books], None], str]] = [
    (_token_changed, r"request 1 \(a\) is finished .*, expected"),
    (_token_doubled, r"request 1 \(a\) is finished .*, expected"),
    (_token_lost, r"request 1 \(a\) is finished .* after 2 tokens of 3, expected"),
    (_other_samples_tokens, r"request 3 \(b\) is finished .*, expected"),
    (_cancelled_with_wrong_tokens, r"request 4 \(c\) is cancelled .*, expected"),
    (_request_lost, r"request 6 \(e\) is lost"),
    (_request_doubled, "request 7 was never submitted"),
    (_key_made_two, r"a was accepted as requests \[1\], then as \[7\]"),
    (_one_for_two, "request 1 belongs to both a and f"),
    (_end_never_seen, r"request 1 \(a\) has no end in its client's notes"),
    (_end_seen_otherwise, "request 1 ended as .* for p0.1, but the coordinator has"),
    (_two_ends, "request 1 ended twice"),
    (_cancelled_by_nobody, r"request 4 \(c\) was cancelled without a cause"),
    (_detached_cancelled, r"request 6 \(e\) was cancelled without a cause"),
    (_error_of_one_never_away, "p0.1 got an unexcused error"),
    (_fault_seen_by_a_client, "request 1: 2 9 for 2 7"),
]


@pytest.mark.parametrize(("plant", "found"), PLANTED, ids=[plant.__name__.strip("_") for plant, _ in PLANTED])
def test_a_fault_is_found(plant: Callable[[Books], None], found: str, books: Books) -> None:
    plant(books)
    faults = books.faults()
    assert any(re.search(found, fault) for fault in faults), faults


def test_what_a_client_that_was_killed_asked_for_may_be_there_or_not(books: Books) -> None:
    """A killed client's unanswered command may or may not have been accepted, but nothing beyond it."""
    books.killed.add(PROCESS)
    books.note(ASKED, name="f", case=0, turn=1, count=1, how="plain")
    assert books.faults() == []
    books.notes = books.notes[: len(Books(books.folder).notes) + 1]
    (books.folder / "notes").unlink()
    books.records[7] = Record("cancelled", "cancelled", 3, (5,))
    assert books.faults() == []
    (books.folder / "notes").unlink()
    books.records[8] = Record("finished", "length", 3, (5, 6, 7))
    assert books.faults() == [f"request 8 was never submitted: {books.records[8]}"]


def test_errors_are_excused_by_an_absence_and_by_want_of_room_alone(books: Books) -> None:
    books.note(ASKED, name="f", case=0, turn=1, count=1, how="plain")
    books.note(REFUSED, name="f", code=CapacityExceeded.code, message="no room")
    books.note(ASKED, name="g", case=0, turn=1, count=1, how="plain")
    books.note(UNKNOWN, name="g", code=CoordinatorUnavailable.code, message="gone", at=100.0)
    books.absences.append(Suspension(PROCESS, 98.0, 101.0))
    assert books.faults() == []
    (books.folder / "notes").unlink()
    books.absences[0] = Suspension("p1.1", 98.0, 101.0)
    assert ["unexcused error" in fault for fault in books.faults()] == [True]


def test_an_answer_that_the_gateway_cuts_off_is_excused_by_its_drain_alone(books: Books) -> None:
    books.note(ASKED, name="g", case=0, turn=1, count=1, how="plain")
    books.note(UNKNOWN, name="g", code=Draining.code, message="cut off", at=100.0)
    books.absences.append(Suspension(GATEWAY, 97.0, 101.0))
    assert books.faults() == []
    (books.folder / "notes").unlink()
    books.absences[0] = Suspension(GATEWAY, 101.0, 105.0)
    assert ["unexcused error" in fault for fault in books.faults()] == [True]
    (books.folder / "notes").unlink()
    books.absences.clear()
    books.note(UNKNOWN, name="g", code=CoordinatorUnavailable.code, message="gone", at=103.0)
    assert len(books.faults()) == 2


def test_the_next_process_takes_up_what_is_open_and_the_last_that_were_left(tmp_path: Path) -> None:
    cluster: Any = SimpleNamespace(folder=tmp_path)
    processes = Processes(cluster, (), ("p0",), {"gone_s": 1.0})
    processes.close()
    processes._incarnations["p0"] = 1
    notes = Notes(tmp_path / f"{PROCESS}.notes")
    for name, how, ids in (("a", "key", ()), ("b", "key", (1,)), ("c", "plain", (2,)), ("d", "detached", (3,))):
        notes.write(ASKED, name=name, case=0, turn=1, count=1, how=how)
        if ids:
            notes.write(ACCEPTED, name=name, ids=ids)
    notes.write(ENDED, id=1, reason="length", tokens=3)
    for left in range(10, 20):
        notes.write(ASKED, name=f"left {left}", case=0, turn=1, count=1, how="detached")
        notes.write(ACCEPTED, name=f"left {left}", ids=[left])
        notes.write(LEFT, id=left)
    notes.close()
    taken_up = [intent["name"] for intent in processes._left_behind("p0")]
    assert taken_up == ["a", "d", *(f"left {left}" for left in range(20 - LEFT_TAKEN_UP_MAX, 20))]


# -------------------------------------------------------------------------------------- the coordinator's records


def listed(state: str, tokens: tuple[int, ...], max_tokens: int = 3) -> tuple[RequestRow, RequestInfo]:
    """Return request 1 as a list row and as its status."""
    facts = {
        "request_id": 1,
        "state": state,
        "tenant": "",
        "prompt_tokens": 2,
        "max_tokens": max_tokens,
        "generated_tokens": len(tokens),
        "reason": "length",
        "age_us": 0,
    }
    return RequestRow(**facts), RequestInfo(rid=0, tokens=np.array(tokens, np.int32), **facts)


def look(*seen: tuple[RequestRow, RequestInfo]) -> Ledger:
    """Return a ledger that looked once for each."""
    ledger = Ledger([KNOWN, OTHER])

    async def each() -> None:
        for row, info in seen:

            async def requests(_most: int, row: RequestRow = row) -> Any:
                return SimpleNamespace(requests=(row,))

            async def status(_request_id: int, with_tokens: bool, info: RequestInfo = info) -> RequestInfo:
                assert with_tokens
                return info

            await ledger.look(SimpleNamespace(requests=requests, status=status))  # type: ignore[arg-type]

    asyncio.run(each())
    return ledger


def test_what_ended_well_is_recorded_with_its_tokens() -> None:
    running, done = listed("running", (5,)), listed("finished", (5, 6, 7))
    ledger = look(running)
    assert (ledger.records, ledger.running, ledger.faults) == ({}, 1, [])
    ledger = look(running, done, done)
    assert (ledger.records[1].tokens, ledger.running, ledger.faults) == ((5, 6, 7), 0, [])


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        ([listed("finished", (5, 6, 9))], "not one of"),
        ([listed("finished", (5, 6))], "not one of"),
        ([listed("failed", (5,))], "request 1 is failed"),
        (
            [listed("finished", (5, 6, 7)), listed("cancelled", (5,))],
            "request 1 changed after its end: finished .*, now",
        ),
        (
            [listed("finished", (5, 6, 7)), listed("running", (5, 6, 7))],
            "request 1 changed after its end: finished .*, now",
        ),
    ],
)
def test_what_the_coordinator_says_is_looked_at(seen: list[tuple[RequestRow, RequestInfo]], found: str) -> None:
    faults = look(*seen).faults
    assert len(faults) == 1 and re.search(found, faults[0])
