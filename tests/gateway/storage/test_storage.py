"""The contract of a storage, with SQLite and with a real PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvforge.gateway.storage import (
    Append,
    Chain,
    Claim,
    Delete,
    Document,
    Entry,
    Expire,
    Get,
    GetEntry,
    List,
    Mark,
    Put,
    Read,
    Release,
    RemoveEntry,
    Renew,
    Usage,
    Watch,
)
from kvforge.gateway.storage.engine import DOCUMENT_BYTES
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.protocol.errors import CapacityExceeded, Conflict, NotFound

LIMIT = 100_000
A = {"tenant": "a", "kind": "thing"}
HELD = {**A, "name": "items"}


@pytest.fixture
def storage(url: str) -> Iterator[InlineStorage]:
    made = InlineStorage(url, tenant_bytes_max=LIMIT)
    yield made
    made._engine.close()


def one(storage: InlineStorage, operation: Any) -> Any:
    (result,) = storage.done(operation)
    return result


def ids(documents: list[Document]) -> list[str]:
    return [document.id for document in documents]


def test_a_document_comes_back_as_it_was_and_only_to_its_tenant(storage: InlineStorage) -> None:
    body = bytes(range(256))
    written = one(storage, Put(**A, id="x", body=body, group="g", parent="p", state="busy", keep_s=60.0))
    found = one(storage, Get(**A, id="x"))
    assert (found.body, found.group, found.parent, found.state, found.version) == (body, "g", "p", "busy", 1)
    assert (found.size_bytes, found.expires_at) == (256 + DOCUMENT_BYTES, found.updated_at + 60.0)
    assert (written.version, written.created_at) == (1, found.created_at)
    for tenant, kind in (("b", "thing"), ("a", "other")):
        other: dict[str, Any] = {"tenant": tenant, "kind": kind, "id": "x"}
        assert one(storage, Get(**other)) is None
        assert one(storage, Delete(**other)) is False
        assert one(storage, Read(**other, name="items")) == []
        assert one(storage, List(tenant=tenant, kind=kind)) == []
        assert one(storage, Chain(**other)) == []
        assert one(storage, Watch(**other, for_s=9.0)) is False
        with pytest.raises(NotFound):
            storage.done(Append(**other, name="items", entries=[Entry("e", b"")]))
    assert one(storage, Get(**A, id="x")) == found


def test_a_write_that_expects_another_version_changes_nothing(storage: InlineStorage) -> None:
    storage.done(Put(**A, id="x", body=b"one", expect=0))
    for expect in (0, 2):
        with pytest.raises(Conflict, match="version 1"):
            storage.done(Put(**A, id="y", body=b"too"), Put(**A, id="x", body=b"two", expect=expect))
    assert one(storage, Get(**A, id="x")).body == b"one"
    assert one(storage, Get(**A, id="y")) is None, "the operations of a call are done together or not at all"
    again = one(storage, Put(**A, id="x", body=b"two", expect=1))
    assert again.version == 2 and one(storage, Get(**A, id="x")).body == b"two"


def test_calls_of_a_group_fail_alone(storage: InlineStorage) -> None:
    first, wrong, last = storage._engine.run(
        [
            [Put(**A, id="x", body=b"1")],
            [Put(**A, id="z", body=b"1"), Put(**A, id="x", body=b"2", expect=0)],
            [Get(**A, id="x"), Get(**A, id="z")],
        ]
    )
    assert isinstance(first, list) and isinstance(wrong, Conflict) and isinstance(last, list)
    assert last[0].body == b"1" and last[1] is None  # type: ignore[union-attr]


@pytest.mark.parametrize("descending", [False, True])
def test_documents_are_listed_in_pages(storage: InlineStorage, descending: bool) -> None:
    for name in "edcba":
        storage.done(Put(**A, id=name, body=name.encode()))
    storage.done(Put(**A, id="d", body=b"changed"))
    order = "abcde" if descending else "edcba"
    page = one(storage, List(**A, limit=2, descending=descending))
    assert ids(page) == [*order[:2]] and all(document.body for document in page)
    rest = one(storage, List(**A, after=order[1], limit=9, descending=descending, bodies=False))
    assert ids(rest) == [*order[2:]] and not any(document.body for document in rest)
    with pytest.raises(NotFound):
        storage.done(List(**A, after="nothing"))


@pytest.mark.parametrize("descending", [False, True])
def test_entries_are_read_in_pages_and_their_positions_are_never_used_again(
    storage: InlineStorage, descending: bool
) -> None:
    storage.done(Put(**A, id="x", body=b""))
    entries = [Entry(name, name.encode() * 3) for name in "abcde"]
    assert one(storage, Append(**HELD, id="x", entries=entries[:3])) == 0
    assert one(storage, Append(**HELD, id="x", entries=entries[3:])) == 3
    order = "edcba" if descending else "abcde"
    page = one(storage, Read(**HELD, id="x", limit=2, descending=descending))
    assert [(entry.id, entry.body) for entry in page] == [(name, name.encode() * 3) for name in order[:2]]
    rest = one(storage, Read(**HELD, id="x", after=order[1], descending=descending))
    assert [entry.id for entry in rest] == [*order[2:]]
    behind = one(storage, Read(**HELD, id="x", behind=page[-1].position, descending=descending))
    assert behind == rest
    assert one(storage, GetEntry(**HELD, id="x", entry="c")) == Entry("c", b"ccc", 2)
    assert one(storage, RemoveEntry(**HELD, id="x", entry="e")) is True
    assert one(storage, RemoveEntry(**HELD, id="x", entry="e")) is False
    assert one(storage, GetEntry(**HELD, id="x", entry="e")) is None
    assert one(storage, Append(**HELD, id="x", entries=[Entry("f", b"")])) == 5
    with pytest.raises(Conflict, match="'a'"):
        storage.done(Append(**HELD, id="x", entries=[Entry("g", b""), Entry("a", b"")]))
    skipping = Append(**HELD, id="x", entries=[Entry("a", b"new"), Entry("g", b"")], skip=True)
    assert (one(storage, skipping), one(storage, GetEntry(**HELD, id="x", entry="a")).body) == (6, b"aaa")
    assert one(storage, GetEntry(**HELD, id="x", entry="g")).position == 6
    with pytest.raises(NotFound):
        storage.done(Read(**HELD, id="x", after="h"))
    held = one(storage, Get(**A, id="x"))
    assert held.size_bytes == DOCUMENT_BYTES + 4 * (3 + DOCUMENT_BYTES) + 2 * DOCUMENT_BYTES
    assert one(storage, Usage(tenant="a"))[0].size_bytes == held.size_bytes
    assert one(storage, Put(**A, id="x", body=b"12", clear=True)).size_bytes == 2 + DOCUMENT_BYTES
    assert one(storage, Read(**HELD, id="x")) == []
    assert one(storage, Usage(tenant="a"))[0].size_bytes == 2 + DOCUMENT_BYTES


def test_a_chain_is_what_a_document_continues(storage: InlineStorage) -> None:
    for name, parent in (("a", ""), ("b", "a"), ("c", "b"), ("d", "b")):
        storage.done(Put(**A, id=name, parent=parent, body=b"12", keep_s=50.0))
    assert ids(one(storage, Chain(**A, id="d"))) == ["a", "b", "d"]
    assert one(storage, Chain(**A, id="nothing")) == []
    before = one(storage, Get(**A, id="a")).expires_at
    storage.done(Chain(**A, id="c", keep_s=500.0))
    kept = {name: one(storage, Get(**A, id=name)).expires_at for name in "abcd"}
    assert kept["a"] == kept["b"] == kept["c"] > before + 400 and kept["d"] < kept["a"]
    with pytest.raises(CapacityExceeded, match="bytes of things that 'd' continues"):
        storage.done(Chain(**A, id="d", bytes_max=5))
    with pytest.raises(CapacityExceeded, match="things that 'd' continues"):
        storage.done(Chain(**A, id="d", documents_max=2))
    storage.done(Delete(**A, id="a"))
    assert ids(one(storage, Chain(**A, id="d"))) == ["b", "d"]
    storage.done(Put(**A, id="b", parent="d", body=b""))
    assert ids(one(storage, Chain(**A, id="d"))) == ["b", "d"], "a circle ends"


def test_work_is_claimed_when_its_lease_has_ended(storage: InlineStorage) -> None:
    storage.done(Put(**A, id="x", body=b"", state="busy", group="m", owner="first", lease_s=60.0))
    storage.done(Put(**A, id="y", body=b"", state="busy", group="n", owner="first", lease_s=0.0))
    storage.done(Put(**A, id="z", body=b"", group="n"))
    claim: dict[str, Any] = {"kind": "thing", "owner": "second", "lease_s": 60.0}
    assert one(storage, Claim(**claim, groups=["m"])) == []
    assert one(storage, Claim(**{**claim, "kind": "other"})) == []
    assert ids(one(storage, Claim(**claim, groups=["m", "n"]))) == ["y"]
    assert one(storage, Claim(**{**claim, "owner": "third"})) == []
    assert one(storage, Watch(**A, id="y", for_s=60.0)) is True
    assert one(storage, Watch(**A, id="z", for_s=60.0)) is False, "it is at rest"
    assert ids(one(storage, Renew(owner="second", lease_s=0.0))) == ["y"]
    assert ids(one(storage, Claim(**{**claim, "owner": "third"}))) == ["y"]
    assert one(storage, Renew(owner="third", lease_s=60.0)) == [], "a new owner has not been asked yet"
    assert one(storage, Mark(**A, id="y", owner="second", state="on")) is False
    assert one(storage, Mark(**A, id="y", owner="third", state="on")) is True
    assert (one(storage, Get(**A, id="y")).state, one(storage, Get(**A, id="y")).version) == ("on", 1)
    assert one(storage, Release(owner="third")) == 1
    assert ids(one(storage, Claim(**claim))) == ["y"]
    storage.done(Put(**A, id="y", body=b"done"))
    assert one(storage, Renew(owner="second", lease_s=60.0)) == []
    assert ids(one(storage, Claim(**{**claim, "lease_s": 0.0}))) == []


def test_only_documents_at_rest_expire(storage: InlineStorage) -> None:
    storage.done(Put(**A, id="old", body=b"", keep_s=1e-9))
    storage.done(Append(**HELD, id="old", entries=[Entry("e", b"secret")]))
    storage.done(Put(**A, id="busy", body=b"", keep_s=1e-9, state="busy"))
    storage.done(Put(**A, id="new", body=b"", keep_s=60.0))
    storage.done(Put(**A, id="ever", body=b""))
    assert one(storage, Expire()) == 1
    assert ids(one(storage, List(**A))) == ["busy", "new", "ever"]
    (usage,) = one(storage, Usage())
    assert (usage.tenant, usage.documents, usage.size_bytes, usage.in_progress) == ("a", 3, 3 * DOCUMENT_BYTES, 1)


def test_a_full_tenant_loses_what_it_used_longest_ago(storage: InlineStorage) -> None:
    size = LIMIT // 4
    for name in "abc":
        storage.done(Put(**A, id=name, body=b"x" * size, keep_s=60.0))
    storage.done(Put(tenant="b", kind="thing", id="theirs", body=b"x" * size))
    storage.done(Chain(**A, id="a", keep_s=90.0))
    storage.done(Put(**A, id="d", body=b"x" * size, keep_s=60.0))
    assert ids(one(storage, List(**A))) == ["a", "c", "d"]
    storage.done(Put(**A, id="e", body=b"x" * size), Append(**HELD, id="e", entries=[Entry("e", b"x" * size)]))
    assert ids(one(storage, List(**A))) == ["a", "e"]
    before = [one(storage, Usage()), one(storage, List(**A))]
    with pytest.raises(CapacityExceeded, match=r"tenant 'a'.*tenant_bytes_max"):
        storage.done(Put(**A, id="f", body=b"x" * 3 * size))
    assert [one(storage, Usage()), one(storage, List(**A))] == before, "nothing was removed for nothing"
    assert one(storage, Get(tenant="b", kind="thing", id="theirs")) is not None


def test_it_is_all_there_in_the_next_process(url: str, storage: InlineStorage) -> None:
    storage.done(Put(**A, id="x", body=b"kept"))
    storage._engine.close()
    again = InlineStorage(url)
    assert again.done(Get(**A, id="x"))[0].body == b"kept"  # type: ignore[union-attr]
    again._engine.close()
