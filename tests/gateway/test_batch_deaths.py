"""A batch while its gateway, the coordinator and the worker are killed: no line is lost, doubled or changed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from kvforge.gateway.storage import Usage
from kvforge.gateway.storage.inline import InlineStorage
from kvforge.routing import seed_of
from tests.gateway.served import Gateway
from tests.gateway.storage.postgres_server import PostgresServer, why_not
from tests.gateway.test_background_deaths import WITHIN_S, client_of, prepare
from tools.cluster.cluster import Cluster

LINES, COMPARED = 200, 5
IN_FLIGHT = 50  # lines that may be answered although the worker is stopped
TRIES = 20
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 1.0}


def test_a_batch_goes_on_in_another_gateway_after_every_death(tmp_path: Path) -> None:
    survives(tmp_path, f"sqlite:{tmp_path}/stored.sqlite")


def test_the_same_with_postgresql(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with PostgresServer() as server:
        survives(tmp_path, server.new_database())


def body(at: int) -> dict[str, Any]:
    return {**BODY, "messages": [{"role": "user", "content": f"Say {at}."}]}


def survives(tmp_path: Path, url: str) -> None:
    lines = [
        {"custom_id": f"line-{at}", "method": "POST", "url": "/v1/chat/completions", "body": body(at)}
        for at in range(LINES)
    ]
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    settings = f'names = ["tiny"]\n[storage]\nurl = "{url}"\nlease_s = 0.5\n'
    settings += f"[batches]\nin_flight_max = {IN_FLIGHT}\n"
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with Cluster(coordinator="[limits]\nreattach_s = 60.0\n") as cluster:
        prepare(cluster.model)
        cluster.start("w0")
        with Gateway(cluster.runtime, folders[0], settings) as first, client_of(first) as client:
            tries, file, batch = stopped_midway(cluster, client, content)
            first.kill()
        cluster.kill("w0")
        cluster.kill("coordinator")
        cluster.start_coordinator()
        cluster.start_worker("w0")
        with Gateway(cluster.runtime, folders[1], settings) as second, client_of(second) as client:
            deadline = time.monotonic() + WITHIN_S
            while (found := client.batches.retrieve(batch.id)).status != "completed":
                assert time.monotonic() < deadline and found.status in ("in_progress", "finalizing"), found
                time.sleep(0.05)
            assert found.output_file_id is not None and found.error_file_id is None
            assert found.request_counts is not None and found.request_counts.completed == LINES
            text = client.files.content(found.output_file_id).text
            outcomes = [json.loads(line) for line in text.splitlines()]
            assert sorted(line["custom_id"] for line in outcomes) == sorted(line["custom_id"] for line in lines)
            answers = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"] for line in outcomes}
            for at in range(0, LINES, LINES // COMPARED):
                asked = {**body(at), "seed": seed_of("default", f"{batch.id}:{at}")}
                alone = client.chat.completions.create(**asked)
                assert answers[f"line-{at}"]["content"] == alone.choices[0].message.content
            client.files.delete(file.id)
            client.files.delete(found.output_file_id)
    storage = InlineStorage(url)
    (usage,) = storage.done(Usage())[0]  # type: ignore[misc,union-attr]
    assert (usage.documents, usage.in_progress) == (tries, 0), "batches alone are left"
    storage._engine.close()


def stopped_midway(cluster: Cluster, client: openai.OpenAI, content: bytes) -> tuple[int, FileObject, Batch]:
    """Return how often it tried, a file, and its batch, which has begun, with its worker stopped (SIGSTOP).

    Where this process had to wait for a core for so long that the batch ended first, it is removed and made again.
    """
    for at in range(TRIES):
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        while completed(client, batch.id) == 0:
            time.sleep(0.01)
        cluster.signal("w0", signal.SIGSTOP)
        if completed(client, batch.id) < LINES - IN_FLIGHT:  # lines that no worker has seen
            return at + 1, file, batch
        cluster.signal("w0", signal.SIGCONT)
        while (found := client.batches.retrieve(batch.id)).output_file_id is None:
            time.sleep(0.05)
        client.files.delete(file.id)
        client.files.delete(found.output_file_id)
    raise AssertionError(f"the batch ended {TRIES} times before its worker could be stopped")


def completed(client: openai.OpenAI, name: str) -> int:
    counts = client.batches.retrieve(name).request_counts
    assert counts is not None
    return counts.completed
