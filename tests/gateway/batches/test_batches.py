"""/v1/batches with OpenAI's client."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from pathlib import Path
from typing import Any, cast

import openai
import pytest

from kvforge.gateway.config import BatchesSection, Key, StorageSection
from kvforge.gateway.storage import Append, Claim, Get
from kvforge.protocol.errors import StorageFailed
from tests.gateway import scripted
from tests.gateway.batches.app import App, chats, ended, jsonl, output


def test_a_batch_of_chats(tmp_path: Path) -> None:
    script = scripted.Script(reply=lambda prompt: prompt[::-1])
    app = App(tmp_path, script)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(100)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"a": "b"})
        assert batch.expires_at == batch.created_at + 86_400
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.error_file_id is None
        assert (batch.request_counts.total, batch.request_counts.completed) == (100, 100)
        for one in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
            assert one >= batch.created_at
        lines = await output(client, batch.output_file_id)
        assert [line["custom_id"] for line in lines] == [str(at) for at in range(100)]
        for at, line in enumerate(lines):
            assert line["error"] is None and line["response"]["status_code"] == 200
            assert str(at)[::-1] in line["response"]["body"]["choices"][0]["message"]["content"]
        assert len({line["id"] for line in lines}) == 100
        assert all(options.priority == -100 and options.detached for _, _, options in script.asked)
        assert len({options.idempotency_key for _, _, options in script.asked}) == 100

    app.run(work)


def test_each_endpoint_and_lines_that_fail(tmp_path: Path) -> None:
    """A failed request is a line of the error file with the status and the body that it would have had over HTTP."""
    bodies = {
        "/v1/completions": [{"prompt": "x"}, {"prompt": "x", "n": 2}, {"prompt": ""}, {"prompt": "x", "stream": True}],
        "/v1/responses": [{"input": "x"}, {"input": "x", "model": "other-model"}],
        "/v1/chat/completions": [{"messages": []}, {"messages": [{"role": "user", "content": "x"}]}],
    }
    app, counted = App(tmp_path), list[bool]()
    app.batches.runner.count = counted.append
    wanted = {"/v1/completions": [200, 200, 400, 400], "/v1/responses": [200, 404], "/v1/chat/completions": [400, 200]}

    async def work(client: openai.AsyncOpenAI) -> None:
        for endpoint, asked in bodies.items():
            made = await client.files.create(file=("in.jsonl", jsonl(asked, endpoint)), purpose="batch")
            batch = await client.batches.create(
                input_file_id=made.id, endpoint=cast(Any, endpoint), completion_window="24h"
            )
            batch = await ended(client, batch.id)
            good, bad = [await output(client, name) for name in (batch.output_file_id, batch.error_file_id)]
            found = {int(line["custom_id"]): line["response"]["status_code"] for line in (*good, *bad)}
            assert [found[at] for at in range(len(asked))] == wanted[endpoint]
            assert all(line["response"]["status_code"] == 200 for line in good)
            assert all(line["response"]["body"]["error"]["message"] for line in bad)
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (len(asked), len(good), len(bad))

    app.run(work)
    assert (counted.count(True), counted.count(False)) == (4, 4)


def test_malformed_lines_fail_a_batch_by_their_numbers(tmp_path: Path) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    lines: list[Any] = [
        good,
        b"",
        b"{not json",
        {**good, "custom_id": "b", "method": "GET"},
        {**good, "custom_id": "c", "url": "/v1/embeddings"},
        good,
        {**good, "custom_id": ""},
        {**good, "custom_id": "d", "body": []},
        {"custom_id": "e"},
    ]
    content = b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
        batch = await ended(client, batch.id)
        assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
        assert batch.errors is not None and batch.errors.data is not None
        assert [(one.line, one.code) for one in batch.errors.data] == [
            (3, "invalid_json_line"),
            (4, "invalid_method"),
            (5, "mismatched_endpoint"),
            (6, "duplicate_custom_id"),
            (7, "invalid_custom_id"),
            (8, "invalid_json_line"),
            (9, "invalid_json_line"),
        ]

    script = scripted.Script()
    App(tmp_path, script).run(work)
    assert not script.asked, "nothing runs of a batch that is refused"


def test_files_without_requests_or_with_too_many_fail(tmp_path: Path) -> None:
    app = App(tmp_path, batches=BatchesSection(lines_max=3), body_bytes_max=2048)

    async def work(client: openai.AsyncOpenAI) -> None:
        for content, line, code in (
            (b"\n \n", None, "empty_file"),
            (chats(4), 4, "too_many_requests"),
            (chats(1) + b" " * 3000, 2, "line_too_long"),
        ):
            made = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            batch = await ended(client, batch.id)
            assert batch.errors is not None and batch.errors.data is not None
            assert [(one.line, one.code) for one in batch.errors.data] == [(line, code)]

    app.run(work)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"input_file_id": "file-0"}, "input_file_id|there is no file"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1 year"}, "completion_window"),
        ({"completion_window": "15d"}, "completion_window"),
        ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "seconds"),
    ],
)
def test_a_wrong_batch_is_refused_and_nothing_is_stored(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(1)), purpose="batch")
        given = {"input_file_id": made.id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
        with pytest.raises(openai.APIStatusError, match=named) as refused:
            await client.batches.create(**cast(Any, given))
        assert refused.value.status_code in (400, 404)
        assert [batch.id async for batch in client.batches.list()] == []

    App(tmp_path).run(work)


def test_lists_quotas_and_tenants(tmp_path: Path) -> None:
    keys = {
        name: Key(hash="sha256:" + hashlib.sha256(name.encode()).hexdigest(), tenant=f"tenant-{name}") for name in "ab"
    }
    script = scripted.Script(hang=True)
    app = App(tmp_path, script, keys=keys, batches=BatchesSection(tenant_batches_max=2))

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(1)), purpose="batch")
        given: Any = {"input_file_id": made.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        both = [(await client.batches.create(**given)).id for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="tenant_batches_max"):
            await client.batches.create(**given)
        assert [batch.id async for batch in client.batches.list(limit=1)] == both[::-1]
        async with app.client("b") as other:
            assert [batch.id async for batch in other.batches.list()] == []
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    await call(both[0])
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(**given)
        for name in both:
            await client.batches.cancel(name)
            assert (await ended(client, name)).status == "cancelled"
        last = await client.batches.create(**given)
        await client.batches.cancel(last.id)
        await ended(client, last.id)

    app.run(work, "a")
    assert {options.tenant for _, _, options in script.asked} == {"tenant-a"}


def test_a_cancelled_batch_keeps_its_answers_and_names_the_rest(tmp_path: Path) -> None:
    script = scripted.Script()
    app = App(tmp_path, script, batches=BatchesSection(in_flight_max=4))

    def reply(prompt: str) -> str:
        script.hang = len(script.asked) > 20
        return "hello"

    script.reply = reply

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(50)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 15:
            await asyncio.sleep(0.01)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling" and batch.cancelling_at
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelled_at
        good, bad = [await output(client, name) for name in (batch.output_file_id, batch.error_file_id)]
        assert {line["custom_id"] for line in (*good, *bad)} == {str(at) for at in range(50)}
        assert len(good) + len(bad) == 50 and len(good) == batch.request_counts.completed >= 15
        assert {line["error"]["code"] for line in bad} == {"batch_cancelled"} and bad[0]["response"] is None
        assert script.cancelled, "requests that ran are cancelled"
        with pytest.raises(openai.ConflictError, match="ended"):
            await client.batches.cancel(batch.id)

    app.run(work)


def test_another_process_cancels_a_batch(tmp_path: Path) -> None:
    script = scripted.Script(hang=True)
    app, other = App(tmp_path, script), App(tmp_path)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(5)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while len(script.asked) < 5:
            await asyncio.sleep(0.01)
        async with other.client() as elsewhere:  # it does not work on batches itself
            assert (await elsewhere.batches.cancel(batch.id)).status == "cancelling"
        assert (await ended(client, batch.id)).status == "cancelled"
        assert len(script.cancelled) == 5
        await other.storage.close()

    app.run(work)


def test_two_processes_share_the_batches(tmp_path: Path) -> None:
    """Each batch runs in one of them, and each line once."""
    script = scripted.Script()
    app, other = App(tmp_path, script), App(tmp_path, script)

    async def work(client: openai.AsyncOpenAI) -> None:
        async with other.opened():
            made = await client.files.create(file=("in.jsonl", chats(20)), purpose="batch")
            names = [
                (
                    await client.batches.create(
                        input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
                    )
                ).id
                for _ in range(6)
            ]
            for name in names:
                batch = await ended(client, name)
                assert (batch.status, batch.request_counts.completed) == ("completed", 20)
                lines = await output(client, batch.output_file_id)
                assert [line["custom_id"] for line in lines] == [str(at) for at in range(20)]
        keys = [options.idempotency_key for _, _, options in script.asked]
        assert len(keys) == len(set(keys)) == 6 * 20

    app.run(work)


def test_an_expired_batch_keeps_its_answers_and_names_the_rest(tmp_path: Path) -> None:
    script = scripted.Script(hang=True)
    app = App(tmp_path, script)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(50)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="4s"
        )
        batch = await ended(client, batch.id)
        assert batch.status == "expired" and batch.expired_at and batch.output_file_id is None
        bad = await output(client, batch.error_file_id)
        assert [line["custom_id"] for line in bad] == [str(at) for at in range(50)]
        assert {line["error"]["code"] for line in bad} == {"batch_expired"} and script.cancelled

    app.run(work)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_a_batch_whose_model_is_never_served_ends(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway ended before it began; the one that runs now serves nothing."""
    monkeypatch.setattr("kvforge.gateway.batches.runner.OVERDUE_S", 0.1)
    script = scripted.Script(hang=True)
    names: list[str] = []

    async def begin(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(5)), purpose="batch")
        for window in ("24h", "1s" if how == "expired" else "24h"):
            batch = await client.batches.create(
                input_file_id=made.id, endpoint="/v1/chat/completions", completion_window=window
            )
            names.append(batch.id)
        if how == "cancelled":
            await client.batches.cancel(names[1])

    async def main(app: App) -> None:
        async with app.client() as client:  # nothing works on batches
            await begin(client)
        await app.storage.close()

    asyncio.run(main(App(tmp_path, script)))
    app = App(tmp_path, script, storage=StorageSection(lease_s=2.0))
    app.service.reason = "no model is served"

    async def wait(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, names[1])
        assert batch.status == how
        assert (await client.batches.retrieve(names[0])).status == "validating"
        (claimed,) = app.storage.done(Claim(kind="batch", owner="its own gateway", lease_s=10.0))
        assert isinstance(claimed, list) and [each.id for each in claimed] == [names[0]]  # type: ignore[union-attr]

    app.run(wait)


def test_the_next_process_continues_and_doubles_nothing(tmp_path: Path) -> None:
    """The first process ends with outcomes behind requests that still run; the second one joins these."""
    script = scripted.Script(reply=lambda prompt: "answer to " + re.findall(r"[0-9]+", prompt)[0])
    script.stuck = lambda prompt: int(re.findall(r"[0-9]+", prompt)[0]) % 10 == 3 or len(script.asked) > 40
    names: list[str] = []

    async def begin(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", b"\n" + chats(60)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        names.append(batch.id)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:
            await asyncio.sleep(0.01)

    async def finish(client: openai.AsyncOpenAI) -> None:
        batch = await ended(client, names[0])
        lines = await output(client, batch.output_file_id)
        assert [line["custom_id"] for line in lines] == [str(at) for at in range(60)]
        for at, line in enumerate(lines):
            assert line["response"]["body"]["choices"][0]["message"]["content"] == f"answer to {at}"
        assert batch.request_counts.completed == 60 and batch.status == "completed"

    App(tmp_path, script).run(begin)
    assert script.left and not script.cancelled, "requests go on for the next owner"
    first = {options.idempotency_key: (prompt, options.sampling) for prompt, _, options in script.asked}
    before = len(script.asked)
    script.stuck = None
    App(tmp_path, script).run(finish)
    again = {options.idempotency_key: (prompt, options.sampling) for prompt, _, options in script.asked[before:]}
    joined = first.keys() & again.keys()
    assert len(again) == len(script.asked) - before < 60 and len(joined) >= 3
    assert {key: first[key] for key in joined} == {key: again[key] for key in joined}
    assert {*first, *again} == {f"{names[0]}:{at}" for at in range(60)}


def test_a_full_disk_delays_a_batch(tmp_path: Path) -> None:
    app = App(tmp_path)
    apply, failures = app.storage.apply, 5

    async def full(*operations: Any) -> Any:
        nonlocal failures
        if failures and any(isinstance(operation, Append) and operation.name == "chunks" for operation in operations):
            failures -= 1
            raise StorageFailed("stored.sqlite", "database or disk is full", "free space on its disk")
        return await apply(*operations)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(10)), purpose="batch")
        app.storage.apply = full  # type: ignore[method-assign]
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and not failures
        assert len(await output(client, batch.output_file_id)) == 10

    app.run(work)


def test_a_tenant_without_room_gets_what_was_written_and_a_reason(tmp_path: Path) -> None:
    script = scripted.Script(answers=["x" * 300])
    app = App(tmp_path, script, storage=StorageSection(tenant_bytes_max=60_000))

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(200)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await ended(client, batch.id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "quota_exceeded"
        assert len(await output(client, batch.output_file_id)) == batch.request_counts.completed

    app.run(work)


def test_a_deleted_input_file_ends_its_batch(tmp_path: Path) -> None:
    app = App(tmp_path, scripted.Script(hang=True), batches=BatchesSection(in_flight_max=1))

    async def work(client: openai.AsyncOpenAI) -> None:
        big = jsonl([{"messages": [{"role": "user", "content": "x" * 1000}]}] * 2000)
        made = await client.files.create(file=("in.jsonl", big), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="2s"
        )
        while (await client.batches.retrieve(batch.id)).status == "validating":
            await asyncio.sleep(0.01)
        await client.files.delete(made.id)
        batch = await ended(client, batch.id)
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "input_file_deleted"

    app.run(work)


def test_an_input_file_expires_only_after_its_batches(tmp_path: Path) -> None:
    app = App(tmp_path)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", chats(3)), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        (document,) = app.storage.done(Get(tenant="default", kind="file", id=made.id))
        assert document.expires_at == 0  # type: ignore[union-attr]
        await ended(client, batch.id)
        (document,) = app.storage.done(Get(tenant="default", kind="file", id=made.id))
        assert document.expires_at == pytest.approx(made.expires_at, abs=5)  # type: ignore[union-attr]

    app.run(work)
