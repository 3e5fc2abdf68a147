"""/v1/sessions: fork, rewind, pin, explain and delete, with scripted answers and a database of the test's own."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvforge.gateway.config import Key, Settings, StorageSection
from tests.gateway.scripted import Script

from .test_stored import World, play, respond

KEPT = 10_000


async def created(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/sessions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def done(http: httpx.AsyncClient, session: str, what: str, **fields: Any) -> dict[str, Any]:
    answer = await http.post(f"/v1/sessions/{session}/{what}", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


async def refused(http: httpx.AsyncClient, session: str, what: str, **fields: Any) -> tuple[int, str | None, str]:
    answer = await http.post(f"/v1/sessions/{session}/{what}", json=fields)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def texts(http: httpx.AsyncClient, session: str) -> list[str]:
    listed = (await http.get(f"/v1/sessions/{session}/items", params={"order": "asc"})).json()["data"]
    return [item["content"][0]["text"] for item in listed]


def last_continued(world: World) -> int:
    return world.script.asked[-1][2].continues


def test_a_turn_extends_its_session_and_a_fork_parts_from_it(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        root = (await created(http, metadata={"who": "Ada"}))["id"]
        await respond(http, conversation=root, input="one")
        left = KEPT + world.script.next_id - 1
        forks = (await done(http, root, "fork", n=2))["data"]
        assert [fork["parent"] for fork in forks] == [root, root] and forks[0]["metadata"] == {"who": "Ada"}
        first, second = (fork["id"] for fork in forks)
        for session in (first, second, root):
            await respond(http, conversation=session, input=f"more of {session}")
            assert last_continued(world) == left
        for session in (first, second, root):
            assert await texts(http, session) == ["one", "hello", f"more of {session}", "hello"]
        await respond(http, conversation=first, input="again")
        assert last_continued(world) == left + 1, "each goes on with the sequence of its own last response"

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_session_is_made_and_forked_once_for_an_idempotency_key(tmp_path: Path) -> None:
    """A client that lost its connection cannot know whether it was made, and asks again."""

    async def work(world: World) -> None:
        http = world.gateway()

        async def posted(path: str, key: str, **body: Any) -> tuple[int, Any]:
            answer = await http.post(path, json=body, headers={"idempotency-key": key})
            return answer.status_code, answer.json()

        status, first = await posted("/v1/sessions", "one", metadata={"a": "b"})
        assert status == 200
        assert await posted("/v1/sessions", "one", metadata={"a": "b"}) == (200, first)
        status, other = await posted("/v1/sessions", "one", metadata={"a": "c"})
        assert (status, other["error"]["code"]) == (409, "key_reused")
        assert (await posted("/v1/sessions", "two"))[1]["id"] != first["id"]
        await respond(http, conversation=first["id"])
        fork = f"/v1/sessions/{first['id']}/fork"
        status, forks = await posted(fork, "one", n=2)
        assert status == 200 and len({first["id"], *(each["id"] for each in forks["data"])}) == 3
        assert await posted(fork, "one", n=2) == (200, forks)
        assert await texts(http, forks["data"][1]["id"]) == ["Hi", "hello"], "not twice"
        assert (await posted(fork, "one", n=3))[0] == 409, "three were not made with this key"
        assert (await posted(fork, "two", n=2))[1]["data"][0]["id"] != forks["data"][0]["id"]
        listed = (await http.get("/v1/sessions")).json()["data"]
        assert len(listed) == 2 + 2 + 2

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_session_goes_back_to_an_item_or_to_the_tokens_of_a_response(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        session = (await created(http))["id"]
        lengths = []
        for text in ("one", "two", "three"):
            await respond(http, conversation=session, input=text)
            lengths.append((await http.get(f"/v1/sessions/{session}")).json()["tokens"])
        assert lengths == sorted(set(lengths)) and lengths[0] > 0
        newest = KEPT + world.script.next_id - 1
        shown = await done(http, session, "rewind", tokens=lengths[1])
        assert (shown["tokens"], shown["removed_items"]) == (lengths[1], 2)
        assert await texts(http, session) == ["one", "hello", "two", "hello"]
        await respond(http, conversation=session, input="other")
        assert last_continued(world) == newest, "the longest sequence begins with what is left"
        items = (await http.get(f"/v1/sessions/{session}/items", params={"order": "asc"})).json()["data"]
        await done(http, session, "rewind", item=items[2]["id"])
        assert await texts(http, session) == ["one", "hello", "two"]
        assert (await done(http, session, "rewind", item=""))["tokens"] == 0
        assert await texts(http, session) == []

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_wrong_place_to_go_back_to_is_named(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        session = (await created(http))["id"]
        await respond(http, conversation=session)
        length = (await http.get(f"/v1/sessions/{session}")).json()["tokens"]
        status, field, message = await refused(http, session, "rewind", tokens=length - 1)
        assert (status, field) == (400, "tokens") and f"end at {length} tokens" in message
        assert (await refused(http, session, "rewind", item="msg_x"))[:2] == (404, "item")
        for fields in ({}, {"item": "", "tokens": 1}):
            assert (await refused(http, session, "rewind", **fields))[:2] == (400, "item")
        assert len(await texts(http, session)) == 2, "nothing has changed"

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_pin_and_an_explanation_are_those_of_its_sequence(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        session = (await created(http))["id"]
        assert (await refused(http, session, "pin", ttl_s=60))[0] == 409
        assert (await http.get(f"/v1/sessions/{session}/explain")).json()["sequence"] is None
        await respond(http, conversation=session)
        kept = KEPT + world.script.next_id - 1
        assert (await done(http, session, "pin", ttl_s=60))["pinned_s"] == 60
        assert world.script.sequences.kept == {kept: 60}
        explained = (await http.get(f"/v1/sessions/{session}/explain")).json()
        assert explained["sequence"]["subject"] == f"sequence {kept}" and explained["requests"] == []
        for ttl_s in (0, -1, 1e9):
            assert (await refused(http, session, "pin", ttl_s=ttl_s))[:2] == (400, "ttl_s")
        world.script.sequences.gone.add(kept)
        status, _, message = await refused(http, session, "pin", ttl_s=60)
        assert status == 409 and "its place was needed" in message
        lost = (await http.get(f"/v1/sessions/{session}/explain")).json()
        assert lost["sequence"] is None and "computes its whole prompt" in lost["reason"]

    play(tmp_path, Script(keeps=KEPT), work)


def test_it_explains_what_a_background_response_of_it_waits_for(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        session = (await created(http))["id"]
        world.script.hang = True
        running = await respond(http, conversation=session, background=True)
        (found,) = (await http.get(f"/v1/sessions/{session}/explain")).json()["requests"]
        assert found["response_id"] == running.id and found["subject"].startswith("request ")
        world.script.resume()

    play(tmp_path, Script(keeps=KEPT), work)


def test_what_is_deleted_leaves_no_sequence_unless_forks_use_it(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        alone, shared = (await created(http))["id"], (await created(http))["id"]
        await respond(http, conversation=alone)
        mine = KEPT + world.script.next_id - 1
        await respond(http, conversation=shared)
        await done(http, shared, "fork")
        for session in (shared, alone):
            answer = await http.delete(f"/v1/sessions/{session}")
            assert answer.json() == {"id": session, "object": "session.deleted", "deleted": True}
            assert (await http.get(f"/v1/sessions/{session}")).status_code == 404
        assert world.script.sequences.removed == [mine]
        response = await respond(http)
        await http.delete(f"/v1/responses/{response.id}")
        assert world.script.sequences.removed == [mine, KEPT + world.script.next_id - 1]

    play(tmp_path, Script(keeps=KEPT), work)


def test_sessions_are_listed_in_pages_and_conversations_are_not(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        made = []
        for _ in range(3):
            made.append((await created(http))["id"])
            await http.post("/v1/conversations", json={})
        first = (await http.get("/v1/sessions", params={"limit": 2, "order": "asc"})).json()
        assert [one["id"] for one in first["data"]] == made[:2] and first["has_more"]
        rest = (await http.get("/v1/sessions", params={"order": "asc", "after": made[1]})).json()
        assert [one["id"] for one in rest["data"]] == made[2:] and not rest["has_more"]
        talk = (await http.post("/v1/conversations", json={})).json()["id"]
        assert (await http.get(f"/v1/sessions/{talk}")).status_code == 404

    play(tmp_path, Script(), work)


def test_another_tenant_finds_no_session_and_no_sequence(tmp_path: Path) -> None:
    keys = {
        name: Key(hash=f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", tenant=name) for name in ("ada", "bob")
    }
    settings = Settings(storage=StorageSection(), keys=keys)

    async def work(world: World) -> None:
        http = world.gateway()
        ada, bob = ({"authorization": f"Bearer {name}"} for name in ("ada", "bob"))
        session = (await http.post("/v1/sessions", json={}, headers=ada)).json()["id"]
        asked = {"input": "Hi", "conversation": session}
        assert (await http.post("/v1/responses", json=asked, headers=ada)).status_code == 200
        assert (await http.post("/v1/responses", json=asked, headers=bob)).status_code == 404
        assert (await http.get("/v1/sessions", headers=bob)).json()["data"] == []
        for what, fields in (("fork", {}), ("rewind", {"item": ""}), ("pin", {"ttl_s": 9}), ("items", {"items": []})):
            answer = await http.post(f"/v1/sessions/{session}/{what}", json=fields, headers=bob)
            assert answer.status_code == 404, what
        for path in ("", "/items", "/explain"):
            assert (await http.get(f"/v1/sessions/{session}{path}", headers=bob)).status_code == 404
        assert (await http.delete(f"/v1/sessions/{session}", headers=bob)).status_code == 404
        assert world.script.sequences.removed == [] and world.script.sequences.kept == {}

    play(tmp_path, Script(keeps=KEPT), work, settings)


@pytest.mark.parametrize("n", [0, 17])
def test_the_number_of_forks_is_bounded(tmp_path: Path, n: int) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        session = (await created(http))["id"]
        assert (await refused(http, session, "fork", n=n))[:2] == (400, "n")

    play(tmp_path, Script(), work)
