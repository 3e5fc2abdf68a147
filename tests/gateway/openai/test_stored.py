"""Stored responses, conversations and background responses, with scripted answers and a database of the test's own.

Two gateways are two applications over one database and one script, which plays the coordinator.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvforge.gateway.config import Key, Settings, StorageSection
from kvforge.gateway.openai.background import Background
from kvforge.gateway.storage import List, Put, Storage, StorageFailed, Usage
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.protocol.errors import QueueFull
from tests.gateway.scripted import Script, application, client, prompt_text

from .test_chat import CALL

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": False}
LEASE_S = 0.3
SETTINGS = Settings(storage=StorageSection(lease_s=LEASE_S))
WITHIN_S = 30.0


class World:
    """Gateways over one database and one script."""

    def __init__(self, script: Script, url: str, settings: Settings = SETTINGS) -> None:
        self.script, self.url, self.settings = script, url, settings
        self.storage = InlineStorage(url)
        self.further: list[Storage] = []
        self.backgrounds: list[Background] = []
        self.tasks: list[asyncio.Task[None]] = []

    def gateway(self, storage: Storage | None = None) -> httpx.AsyncClient:
        """Start a gateway. A storage of its own is closed with the world."""
        self.further += [storage] if storage else []
        app = application(self.script, self.settings, storage=storage or self.storage, started=self.backgrounds.append)
        self.tasks.append(asyncio.ensure_future(self.backgrounds[-1].keep()))
        return client(app)

    async def kill(self, at: int) -> None:
        """Stop a gateway as its death would: it writes nothing more."""
        self.tasks[at].cancel()
        for run in tuple(self.backgrounds[at].runs.values()):
            await run.close()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        for background in self.backgrounds:
            await background.close()
        for storage in (self.storage, *self.further):
            await storage.close()


def play(
    tmp_path: Path, script: Script, work: Callable[[World], Coroutine[Any, Any, None]], settings: Settings = SETTINGS
) -> None:
    async def run() -> None:
        world = World(script, f"sqlite:{tmp_path}/stored.sqlite", settings)
        try:
            await asyncio.wait_for(work(world), WITHIN_S)
        finally:
            await world.close()

    asyncio.run(run())


async def respond(http: httpx.AsyncClient, **fields: Any) -> Response:
    answer = await http.post("/v1/responses", json={"input": "Hi", **fields})
    assert answer.status_code == 200, answer.text
    return Response.model_validate(answer.json())


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked by OpenAI's own types."""
    blocks = [block for block in text.strip().split("\n\n") if block and not block.startswith(":")]
    events: list[dict[str, Any]] = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    for event in events:
        EVENTS.validate_python(event)
    return events


async def streamed(http: httpx.AsyncClient, name: str, after: int | None = None) -> list[dict[str, Any]]:
    query = {"stream": "true", **({} if after is None else {"starting_after": str(after)})}
    answer = await http.get(f"/v1/responses/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return events_of(answer.text)


async def ended(http: httpx.AsyncClient, name: str) -> Response:
    while True:
        answer = await http.get(f"/v1/responses/{name}")
        assert answer.status_code == 200, answer.text
        if answer.json()["status"] not in ("queued", "in_progress"):
            return Response.model_validate(answer.json())
        await asyncio.sleep(0.01)


def error_of(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["param"]


def test_a_response_is_stored_and_continued(tmp_path: Path) -> None:
    script = Script(["Hello", "Again", "Third", "Other"])

    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http, metadata={"a": "b"}, instructions="Be kind")
        assert first.model_extra == {"store": True}
        assert (await ended(http, first.id)).model_dump() == first.model_dump()
        second = await respond(http, input="More", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        await respond(http, input=[{"role": "user", "content": "Go"}], previous_response_id=second.id)
        said = "".join(
            f"<|im_start|>{role}\n{text}<|im_end|>\n"
            for role, text in (("user", "Hi"), ("assistant", "Hello"), ("user", "More"), ("assistant", "Again"))
        )
        assert prompt_text(script) == f"{said}<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
        await respond(http, input="Other", previous_response_id=first.id)
        assert "Again" not in prompt_text(script), "a response may be continued more than once"

    play(tmp_path, script, work)


def test_reasoning_and_calls_are_continued_by_id(tmp_path: Path) -> None:
    script = Script([CALL, "Warm", "Warm"])

    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http, tools=[TOOL])
        call: Any = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 C"}
        await respond(http, tools=[TOOL], previous_response_id=first.id, input=[result])
        continued = prompt_text(script)
        assert "<think>hm</think>" in continued and "20 C" in continued
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        items = [{"role": "user", "content": "Hi"}, *references, result]
        await respond(http, tools=[TOOL], input=items, store=False)
        assert prompt_text(script) == continued
        missing = await http.post(
            "/v1/responses", json={"input": [{"type": "item_reference", "id": f"msg_{'0' * 32}_0"}]}
        )
        assert error_of(missing) == (404, "input[0].id")

    play(tmp_path, script, work)


@pytest.mark.parametrize("answer", ["Hello ☕ you", CALL])
def test_a_stream_is_read_again_from_any_event(tmp_path: Path, answer: str) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        posted = await http.post("/v1/responses", json={"input": "Hi", "stream": True, "tools": [TOOL]})
        events = events_of(posted.text)
        name = events[0]["response"]["id"]
        for after in (None, 0, 3, len(events) - 2, len(events) - 1, 10_000):
            expected = events if after is None else events[after + 1 :]
            assert await streamed(http, name, after) == expected
        shown = await http.get(f"/v1/responses/{name}")
        assert shown.json() == events[-1]["response"]
        for query in ("starting_after=3", "stream=true&starting_after=x", "stream=maybe"):
            assert (await http.get(f"/v1/responses/{name}?{query}")).status_code == 400

    play(tmp_path, Script([answer], step=2), work)


def test_a_response_that_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http, store=False)
        assert first.model_extra == {"store": False}
        assert (await http.get(f"/v1/responses/{first.id}")).status_code == 404
        background = await http.post("/v1/responses", json={"input": "Hi", "store": False, "background": True})
        assert error_of(background) == (400, "background")
        assert world.storage.done(Usage()) == [[]]

    play(tmp_path, Script(), work)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failures", "stored"), [(1, True), (2, False)])
def test_an_answer_is_stored_again_while_it_is_not_known_whether_it_was(
    stream: bool, failures: int, stored: bool, tmp_path: Path
) -> None:
    """The storage's process ends behind the write; twice, it ends before. What is said is what is there."""

    class Dying(InlineStorage):
        left = failures

        async def apply(self, *operations: Any) -> Any:
            if not any(isinstance(operation, Put) for operation in operations) or not self.left:
                return await super().apply(*operations)
            self.left -= 1
            if stored:
                await super().apply(*operations)
            raise StorageFailed("process", "ended", "try again: it is not known whether the call was done")

    async def work(world: World) -> None:
        http = world.gateway(Dying(world.url))
        posted = await http.post("/v1/responses", json={"input": "Hi", "stream": stream})
        body = events_of(posted.text)[-1]["response"] if stream else posted.json()
        assert body["store"] is stored
        assert (await http.get(f"/v1/responses/{body['id']}")).status_code == (200 if stored else 404)
        (usage,) = world.storage.done(Usage())
        assert isinstance(usage, list) and len(usage) == stored
        assert world.script.sequences.removed == ([] if stored else [900 + world.script.next_id - 1])

    play(tmp_path, Script(keeps=900), work)


def test_an_answer_is_not_lost_with_its_storage(tmp_path: Path) -> None:
    class Broken(InlineStorage):
        async def apply(self, *operations: Any) -> Any:
            raise StorageFailed("here", "disk is full", "free space")

    async def work(world: World) -> None:
        http = world.gateway(Broken(world.url))
        first = await respond(http)
        assert (first.output_text, first.model_extra) == ("hello", {"store": False})
        posted = await http.post("/v1/responses", json={"input": "Hi", "stream": True})
        last = events_of(posted.text)[-1]["response"]
        assert (last["status"], last["store"]) == ("completed", False)
        refused = await http.post("/v1/responses", json={"input": "Hi", "background": True})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "storage_failed"
        assert len(world.script.asked) == 2

    play(tmp_path, Script(), work)


def test_what_is_wrong_with_a_stored_request_is_named(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        script = world.script
        first = await respond(http)
        asked = len(script.asked)
        for fields, expected in (
            ({"previous_response_id": "resp_1"}, (404, "previous_response_id")),
            ({"previous_response_id": "r" * 300}, (404, "previous_response_id")),
            ({"conversation": "conv_1"}, (404, "conversation")),
            ({"conversation": {"id": "conv_1"}}, (404, "conversation")),
            ({"conversation": "c", "previous_response_id": first.id}, (400, "previous_response_id")),
            ({"input": None}, (400, "input")),
        ):
            answer = await http.post("/v1/responses", json={"input": "Hi", **fields})
            assert error_of(answer) == expected, (fields, answer.text)
        assert len(script.asked) == asked
        for path in ("", "/input_items"):
            assert (await http.get(f"/v1/responses/resp_1{path}")).status_code == 404
        assert (await http.post("/v1/responses/resp_1/cancel")).status_code == 404
        assert error_of(await http.post(f"/v1/responses/{first.id}/cancel")) == (400, "response_id")
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
            answer = await http.get(f"/v1/responses/{first.id}/input_items?{query}")
            assert error_of(answer) == (400, query.partition("=")[0])

    play(tmp_path, Script(), work)


def test_the_input_is_listed_in_pages(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        items = [
            {"role": "user", "content": "a"},
            {"type": "message", "id": "msg_mine", "role": "assistant", "content": "b"},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        ]
        first = await respond(http, input=items)
        path = f"/v1/responses/{first.id}/input_items"
        listed = (await http.get(path, params={"order": "asc"})).json()
        assert [item["content"][0]["text"] for item in listed["data"]] == ["a", "b", "c"]
        assert [item["content"][0]["type"] for item in listed["data"]] == ["input_text", "output_text", "input_text"]
        for item in listed["data"]:
            ITEM.validate_python(item)
        assert (listed["object"], listed["has_more"], listed["data"][1]["id"]) == ("list", False, "msg_mine")
        page = (await http.get(path, params={"limit": "1"})).json()
        assert (page["data"], page["has_more"]) == (listed["data"][2:], True)
        rest = (await http.get(path, params={"after": page["last_id"]})).json()
        assert rest["data"] == listed["data"][1::-1]

    play(tmp_path, Script(), work)


def test_a_deleted_response_is_gone(tmp_path: Path) -> None:
    secret = "the quick brown secret"

    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http, input=secret)
        second = await respond(http, previous_response_id=first.id)
        assert any(secret.encode() in path.read_bytes() for path in tmp_path.iterdir())
        deleted = await http.delete(f"/v1/responses/{first.id}")
        assert deleted.json() == {"id": first.id, "object": "response", "deleted": True}
        assert not any(secret.encode() in path.read_bytes() for path in tmp_path.iterdir())
        for answer in (
            await http.get(f"/v1/responses/{first.id}"),
            await http.delete(f"/v1/responses/{first.id}"),
            await http.post("/v1/responses", json={"input": "x", "previous_response_id": second.id}),
        ):
            assert answer.status_code == 404, answer.text
        assert (await ended(http, second.id)).id == second.id

    play(tmp_path, Script(), work)


def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    import hashlib

    keys = {
        name: Key(hash=f"sha256:{hashlib.sha256(name.encode()).hexdigest()}", tenant=f"of-{name}")
        for name in ("ada", "eve")
    }
    settings = Settings(keys=keys, storage=StorageSection(lease_s=LEASE_S))

    async def work(world: World) -> None:
        http = world.gateway()
        http.headers["authorization"] = "Bearer ada"
        first = await respond(http, background=True)
        await ended(http, first.id)
        conversation = (await http.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]})).json()
        http.headers["authorization"] = "Bearer eve"
        talk = f"/v1/conversations/{conversation['id']}"
        for method, path, body in (
            ("GET", f"/v1/responses/{first.id}", None),
            ("GET", f"/v1/responses/{first.id}?stream=true", None),
            ("GET", f"/v1/responses/{first.id}/input_items", None),
            ("POST", f"/v1/responses/{first.id}/cancel", None),
            ("DELETE", f"/v1/responses/{first.id}", None),
            ("POST", "/v1/responses", {"input": "x", "previous_response_id": first.id}),
            (
                "POST",
                "/v1/responses",
                {"input": [{"type": "item_reference", "id": first.output[0].id if first.output else "x"}]},
            ),
            ("POST", "/v1/responses", {"input": "x", "conversation": conversation["id"]}),
            ("GET", talk, None),
            ("POST", talk, {"metadata": {}}),
            ("GET", f"{talk}/items", None),
            ("POST", f"{talk}/items", {"items": []}),
            ("DELETE", talk, None),
        ):
            answer = await http.request(method, path, json=body)
            assert answer.status_code == 404, (method, path, answer.text)
        http.headers["authorization"] = "Bearer ada"
        assert (await ended(http, first.id)).status == "completed"
        assert (await http.get(talk)).status_code == 200
        del http.headers["authorization"]
        assert (await http.get(f"/v1/responses/{first.id}")).status_code == 401

    play(tmp_path, Script(), work, settings)


def test_a_conversation_grows_with_its_responses(tmp_path: Path) -> None:
    script = Script(["Hello", "Again"])

    async def work(world: World) -> None:
        http = world.gateway()
        given = [{"role": "user", "content": "I am Ada"}]
        made = (await http.post("/v1/conversations", json={"items": given, "metadata": {"a": "b"}})).json()
        Conversation.model_validate(made)
        talk = f"/v1/conversations/{made['id']}"
        first = await respond(http, conversation=made["id"])
        assert first.conversation is not None and first.conversation.id == made["id"]
        await respond(http, conversation={"id": made["id"]}, input="Bye")
        assert [line for line in ("I am Ada", "Hi", "Hello", "Bye") if line not in prompt_text(script)] == []
        listed = (await http.get(f"{talk}/items", params={"order": "asc"})).json()["data"]
        assert [item["content"][0]["text"] for item in listed] == ["I am Ada", "Hi", "Hello", "Bye", "Again"]
        for item in listed:
            ITEM.validate_python(item)
            assert (await http.get(f"{talk}/items/{item['id']}")).json() == item
        page = (await http.get(f"{talk}/items", params={"limit": "2"})).json()
        assert (page["data"], page["has_more"]) == (listed[:2:-1], True)
        rest = (await http.get(f"{talk}/items", params={"after": page["last_id"]})).json()
        assert (rest["data"], rest["has_more"]) == (listed[2::-1], False)
        assert error_of(await http.get(f"{talk}/items?after=x")) == (400, "after")
        added = (await http.post(f"{talk}/items", json={"items": [{"role": "user", "content": "PS"}]})).json()
        assert added["data"][0]["content"] == [{"type": "input_text", "text": "PS"}]
        changed = (await http.post(talk, json={"metadata": {"c": "d"}})).json()
        assert changed == {**made, "metadata": {"c": "d"}} == (await http.get(talk)).json()
        assert (await http.delete(f"{talk}/items/{listed[0]['id']}")).json()["id"] == made["id"]
        assert (await http.get(f"{talk}/items/{listed[0]['id']}")).status_code == 404
        assert (await http.delete(talk)).json()["deleted"] is True
        assert (await http.get(talk)).status_code == (await http.delete(talk)).status_code == 404
        for wrong in ({"metadata": {"a": 1}}, {"metadata": {str(at): "" for at in range(17)}}):
            assert error_of(await http.post("/v1/conversations", json=wrong)) == (400, "metadata")

    play(tmp_path, script, work)


def test_an_id_of_an_item_that_cannot_be_one_is_replaced(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        ids = ["mine", "a\u0000b", "x" * 300, "", "\u2603"]
        items = [{"id": name, "role": "user", "content": "x"} for name in ids]
        made = (await http.post("/v1/conversations", json={"items": items})).json()
        await respond(http, conversation=made["id"], input=items)
        listed = (await http.get(f"/v1/conversations/{made['id']}/items", params={"order": "asc"})).json()["data"]
        found = [item["id"] for item in listed]
        assert found[0] == "mine" and found.count("mine") == 1, "an item is in a conversation once"
        assert len(found) == len(set(found)) == 5 + 4 + 1 and all(name.isprintable() for name in found)

    play(tmp_path, Script(), work)


def test_a_background_response_outlives_its_request(tmp_path: Path) -> None:
    script = Script(["Hello ☕ you"], step=2, hang=True)

    async def work(world: World) -> None:
        http = world.gateway()
        posted = await respond(http, background=True)
        assert (posted.status, posted.background, posted.output) == ("in_progress", True, [])
        (document,) = world.storage.done(List(tenant="default", kind="response"))[0]  # type: ignore[misc,union-attr]
        assert document.state == "queued", "written down before it was submitted"
        assert (await http.get(f"/v1/responses/{posted.id}")).json() == posted.model_dump(
            mode="json", exclude_unset=True
        )
        unfinished = await http.post("/v1/responses", json={"input": "x", "previous_response_id": posted.id})
        assert error_of(unfinished) == (400, "previous_response_id")
        reading = asyncio.ensure_future(streamed(http, posted.id))
        from_four = asyncio.ensure_future(streamed(http, posted.id, 4))
        await asyncio.sleep(0.01)
        script.resume()
        final = await ended(http, posted.id)
        assert (final.status, final.output_text) == ("completed", "Hello ☕ you")
        assert final.usage is not None and final.usage.output_tokens > 5
        events = await reading
        assert events[-1]["response"] == (await http.get(f"/v1/responses/{posted.id}")).json()
        assert len([event for event in events if event["type"] == "response.output_text.delta"]) > 5
        assert await from_four == events[5:]
        assert await streamed(http, posted.id) == events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        await respond(http, previous_response_id=posted.id)

    play(tmp_path, script, work)


def test_a_background_stream_begins_with_its_request(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        posted = await http.post("/v1/responses", json={"input": "Hi", "background": True, "stream": True})
        events = events_of(posted.text)
        assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
        assert await streamed(http, events[0]["response"]["id"]) == events

    play(tmp_path, Script([CALL]), work)


def test_a_background_response_is_cancelled(tmp_path: Path) -> None:
    script = Script(["Hello you"], hang=True)

    async def work(world: World) -> None:
        http = world.gateway()
        posted = await respond(http, background=True)
        reading = asyncio.ensure_future(streamed(http, posted.id))
        while script.given < len("Hello you"):
            await asyncio.sleep(0.01)
        cancelled = (await http.post(f"/v1/responses/{posted.id}/cancel")).json()
        assert (cancelled["status"], cancelled["output"][0]["content"][0]["text"]) == ("cancelled", "Hello you")
        assert len(script.cancelled) == 1
        events = await reading
        assert events[-1]["response"] == cancelled and await streamed(http, posted.id) == events
        assert (await http.post(f"/v1/responses/{posted.id}/cancel")).json() == cancelled
        again = await respond(http, background=True)
        assert (await http.delete(f"/v1/responses/{again.id}")).json()["deleted"] is True
        assert (await http.get(f"/v1/responses/{again.id}")).status_code == 404 and len(script.cancelled) == 2

    play(tmp_path, script, work)


def test_a_refused_background_response_leaves_nothing(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        answer = await http.post("/v1/responses", json={"input": "Hi", "background": True})
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert world.storage.done(Usage()) == [[]]

    play(tmp_path, Script(refusal=QueueFull(8, 500)), work)


def test_a_request_with_a_key_is_one_response(tmp_path: Path) -> None:
    script = Script(["one", "two"])

    async def work(world: World) -> None:
        http = world.gateway()
        key = {"idempotency-key": "mine"}
        body = {"input": "Hi", "background": True}
        first = (await http.post("/v1/responses", json=body, headers=key)).json()
        again = (await http.post("/v1/responses", json=body, headers=key)).json()
        assert first["id"] == again["id"] and len(script.asked) == 1
        other = await http.post("/v1/responses", json={**body, "input": "Ho"}, headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "key_reused")
        assert (await ended(http, first["id"])).output_text == "one"

    play(tmp_path, script, work)


def test_another_gateway_continues_after_a_death(tmp_path: Path) -> None:
    script = Script(["Hello ☕ you"], hang=True)

    async def work(world: World) -> None:
        first, second = world.gateway(), world.gateway()
        posted = await respond(first, background=True, seed=None)
        await world.kill(0)
        assert script.cancelled == []
        while not world.backgrounds[1].claimed:
            await asyncio.sleep(0.01)
        script.resume()
        final = await ended(second, posted.id)
        assert (final.output_text, world.backgrounds[1].claimed) == ("Hello ☕ you", 1)
        (prompt, _, options), (again, _, same) = script.asked
        assert (prompt, options) == (again, same) and options.sampling.seed is not None  # type: ignore[union-attr]
        assert options.detached and options.idempotency_key == f"response:{posted.id}"
        (usage,) = world.storage.done(Usage())[0]  # type: ignore[misc,union-attr]
        assert (usage.documents, usage.in_progress) == (1, 0)

    play(tmp_path, script, work)


def test_a_response_that_was_never_submitted_is_submitted(tmp_path: Path) -> None:
    script = Script(["Hello"], hang=True)

    async def work(world: World) -> None:
        posted = await respond(world.gateway(), background=True)
        await world.kill(0)
        script.keyed.clear()  # the coordinator never saw it
        script.hang = False
        final = await ended(world.gateway(), posted.id)
        assert (final.output_text, len(script.asked)) == ("Hello", 2)

    play(tmp_path, script, work)


@pytest.mark.parametrize("text", ["Hello ☕ you", CALL])
def test_another_gateway_streams_what_this_one_follows(tmp_path: Path, text: str) -> None:
    script = Script([text], hang=True)

    async def work(world: World) -> None:
        first, second = world.gateway(), world.gateway()
        posted = await respond(first, background=True, tools=[TOOL])
        reading = asyncio.ensure_future(streamed(second, posted.id, 1))
        run = world.backgrounds[0].find("default", posted.id)
        assert run is not None
        while run._publishing is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        script.resume()
        final = await ended(second, posted.id)
        events = await reading
        assert await streamed(first, posted.id, 1) == events
        assert events[-1]["response"]["status"] == final.status == "completed"
        assert len(script.asked) == 1, "reading takes nothing over"

    play(tmp_path, script, work)


def test_another_gateway_cancels_what_this_one_follows(tmp_path: Path) -> None:
    script = Script(["Hello you"], hang=True)

    async def work(world: World) -> None:
        first, second = world.gateway(), world.gateway()
        posted = await respond(first, background=True)
        cancelled = (await second.post(f"/v1/responses/{posted.id}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        while not script.cancelled or world.backgrounds[0].runs:
            await asyncio.sleep(0.01)
        assert (await first.get(f"/v1/responses/{posted.id}")).json() == cancelled

    play(tmp_path, script, work)


def test_the_outcome_is_written_by_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(["Hello you"], hang=True)
    monkeypatch.setattr(Background, "cancel_request", lambda background, work: None)  # the request goes on

    async def work(world: World) -> None:
        first, second = world.gateway(), world.gateway()
        posted = await respond(first, background=True)
        cancelled = (await second.post(f"/v1/responses/{posted.id}/cancel")).json()
        deleted = await respond(first, background=True)
        assert (await second.delete(f"/v1/responses/{deleted.id}")).status_code == 200
        script.resume()
        while world.backgrounds[0].runs:
            await asyncio.sleep(0.01)
        assert (await first.get(f"/v1/responses/{posted.id}")).json() == cancelled
        assert (await first.get(f"/v1/responses/{deleted.id}")).status_code == 404

    play(tmp_path, script, work)


def test_a_fault_of_the_gateway_ends_a_background_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(work: Any, tokens: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvforge.gateway.openai.background_run.answer_of", fault)

    async def work(world: World) -> None:
        http = world.gateway()
        failed = await ended(http, (await respond(http, background=True)).id)
        assert failed.status == "failed" and failed.error is not None and "a bug" in failed.error.message
        assert (await streamed(http, failed.id))[-1]["type"] == "response.failed"

    play(tmp_path, Script(), work)


def test_any_json_can_be_stored(tmp_path: Path) -> None:
    odd = {"n": 10**40, "f": 1e300, "deep": [[[{"\u0000": "\u2603"}]]], "": None}
    tool = {**TOOL, "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**40}}}}

    async def work(world: World) -> None:
        http = world.gateway()
        for background in (False, True):
            body = {"input": "Hi", "metadata": odd, "tools": [tool], "background": background}
            posted = await http.post("/v1/responses", json=body)
            found = posted.json()
            while found["status"] != "completed":
                assert found["status"] in ("queued", "in_progress"), found
                await asyncio.sleep(0.01)
                found = (await http.get(f"/v1/responses/{found['id']}")).json()
            assert (found["metadata"], found["store"]) == (odd, True)
            assert found["output"][0]["content"][0]["text"] == "hello"

    play(tmp_path, Script(), work)


def test_a_full_tenant_loses_what_it_used_longest_ago(tmp_path: Path) -> None:
    settings = Settings(storage=StorageSection(lease_s=LEASE_S, retention_s=20.0))

    async def work(world: World) -> None:
        await world.storage.close()
        world.storage = InlineStorage(world.url, tenant_bytes_max=26_000)  # closed with the world
        http = world.gateway()
        first, second = [await respond(http, input="x" * 8000) for _ in range(2)]
        await asyncio.sleep(0.21)  # longer than a hundredth of the retention
        await respond(http, input="y", previous_response_id=first.id)
        await respond(http, input="x" * 8000)
        found = [(await http.get(f"/v1/responses/{one.id}")).status_code for one in (first, second)]
        assert found == [200, 404], "the first was used since"
        too_large = await respond(http, input="x" * 31_000)
        assert too_large.model_extra == {"store": False}
        refused = await http.post("/v1/responses", json={"input": "x" * 20_000, "background": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")

    play(tmp_path, Script(), work, settings)


def test_a_response_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvforge.gateway.openai.background.EXPIRE_S", 0.0)
    settings = Settings(storage=StorageSection(lease_s=LEASE_S, retention_s=1.0))

    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http)
        while world.storage.done(Usage()) != [[]]:
            await asyncio.sleep(0.05)
        assert (await http.get(f"/v1/responses/{first.id}")).status_code == 404

    play(tmp_path, Script(), work, settings)


def test_the_fields_that_clients_send_by_default_are_accepted_strictly(tmp_path: Path) -> None:
    """What openai, openai-agents and Codex send with each request; `null` and empty values are theirs."""
    fields: dict[str, Any] = {
        "store": True,
        "background": False,
        "previous_response_id": None,
        "conversation": None,
        "metadata": None,
        "include": ["reasoning.encrypted_content"],
        "truncation": "auto",
        "parallel_tool_calls": False,
        "tools": [],
        "top_logprobs": None,
        "max_tool_calls": None,
        "prompt": None,
        "prompt_cache_key": "a",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "medium"},
        "safety_identifier": "a",
        "reasoning": {"effort": None, "summary": "auto"},
        "prompt_cache_retention": "24h",
        "user": "a",
        "context_management": None,
        "prompt_cache_options": None,
        "moderation": None,
        "tool_choice": "auto",
    }

    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http, **fields)
        await respond(http, **{**fields, "previous_response_id": first.id})
        made = await http.post("/v1/conversations", json={"items": [], "metadata": None})
        answer = await http.post(
            "/v1/responses", json={"input": "Hi", "conversation": made.json()["id"], "store": True}
        )
        assert (made.status_code, answer.status_code) == (200, 200), answer.text
        paths = (
            f"/v1/responses/{first.id}?include_obfuscation=true&include[]=x",
            f"/v1/responses/{first.id}/input_items?include=x",
        )
        for path in paths:
            assert (await http.get(path)).status_code == 200

    settings = Settings(strict_fields=True, storage=StorageSection(lease_s=LEASE_S))
    play(tmp_path, Script(), work, settings)
