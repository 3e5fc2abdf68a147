"""/v1/files with OpenAI's client."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from kvforge.gateway.batches.files import CHUNK_BYTES
from kvforge.gateway.config import BatchesSection, Key
from kvforge.protocol.errors import StorageFailed
from tests.gateway.batches.app import App


def test_a_file_is_created_read_listed_and_deleted(tmp_path: Path) -> None:
    content = os.urandom(2 * CHUNK_BYTES + 1000)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (made.bytes, made.filename, made.purpose, made.status) == (
            len(content),
            "in.jsonl",
            "batch",
            "processed",
        )
        assert made.id.startswith("file-") and made.expires_at == made.created_at + 2_592_000
        other = await client.files.create(
            file=("b", b"x\r\n--x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200}
        )
        assert other.expires_at == other.created_at + 7200
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == content
        assert (await client.files.content(other.id)).content == b"x\r\n--x"
        assert [file.id async for file in client.files.list()] == [other.id, made.id]
        assert [file.id async for file in client.files.list(order="asc", limit=1)] == [made.id, other.id]
        assert [file.id async for file in client.files.list(purpose="batch_output")] == []
        gone = await client.files.delete(made.id)
        assert gone.deleted and [file.id async for file in client.files.list()] == [other.id]
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError, match="there is no file"):
                await call(made.id)

    App(tmp_path).run(work)


def test_a_deleted_file_is_gone_from_the_disk(tmp_path: Path) -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        secret = b"a secret of this file " * 20_000
        made = await client.files.create(file=("in.jsonl", secret), purpose="batch")
        assert any(b"a secret of" in path.read_bytes() for path in tmp_path.iterdir())
        await client.files.delete(made.id)
        assert not any(b"a secret of" in path.read_bytes() for path in tmp_path.iterdir())

    App(tmp_path).run(work)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"purpose": "user_data"}, "'user_data' is not served"),
        ({"purpose": "other"}, "'other' is unknown"),
        ({"expires_after": {"anchor": "x", "seconds": 7200}}, "anchor"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "seconds"),
    ],
)
def test_a_refused_upload_leaves_nothing(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    app = App(tmp_path)

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=named):
            await client.files.create(file=("a", b"x" * CHUNK_BYTES), **{"purpose": "batch", **given})
        assert [file.id async for file in client.files.list()] == []
        assert app.files_held() == 0

    app.run(work)


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    app = App(tmp_path)

    async def work(client: openai.AsyncOpenAI) -> None:
        body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 2 * CHUNK_BYTES
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client._client.post("http://localhost/v1/files", content=body, headers=headers)
        assert answer.status_code == 400 and "last boundary" in answer.text
        assert app.files_held() == 0

    app.run(work)


def test_the_limits_of_a_file_and_of_a_tenant(tmp_path: Path) -> None:
    limits = BatchesSection(file_bytes_max=8192, tenant_file_bytes_max=12_000)
    app = App(tmp_path, batches=limits)

    async def work(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match="file_bytes_max") as large:
            await client.files.create(file=("a", b"x" * 8193), purpose="batch")
        assert large.value.status_code == 413
        first = await client.files.create(file=("a", b"x" * 8000), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="tenant_file_bytes_max"):
            await client.files.create(file=("a", b"x" * 8000), purpose="batch")
        await client.files.delete(first.id)
        await client.files.create(file=("a", b"x" * 8000), purpose="batch")

    app.run(work)


def test_a_tenant_does_not_see_the_files_of_another(tmp_path: Path) -> None:
    keys = {
        name: Key(hash="sha256:" + hashlib.sha256(name.encode()).hexdigest(), tenant=f"tenant-{name}") for name in "ab"
    }
    app = App(tmp_path, keys=keys)

    async def work(client: openai.AsyncOpenAI) -> None:
        made = await client.files.create(file=("a", b"x"), purpose="batch")
        async with app.client("b") as other:
            assert [file.id async for file in other.files.list()] == []
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(made.id)
        assert (await client.files.content(made.id)).content == b"x"

    app.run(work, "a")


def test_a_full_disk_is_a_503_that_names_it(tmp_path: Path) -> None:
    app = App(tmp_path)

    async def full(*operations: Any) -> Any:
        raise StorageFailed("stored.sqlite", "database or disk is full", "free space on its disk")

    async def work(client: openai.AsyncOpenAI) -> None:
        app.storage.apply = full  # type: ignore[method-assign]
        with pytest.raises(openai.APIStatusError, match="disk is full") as failed:
            await client.files.create(file=("a", b"x"), purpose="batch")
        assert failed.value.status_code == 503

    app.run(work)
