"""A background response and its stream, while the gateway, the coordinator and the worker are killed.

The model is tiny and random, with a tokenizer that has a token for each byte.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvforge.gateway.storage import List, Usage
from kvforge.gateway.storage.inline import InlineStorage
from tests.gateway.served import Gateway
from tests.gateway.storage.postgres_server import PostgresServer, why_not
from tools.cluster.cluster import Cluster
from tools.cluster.running import CONFIG

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOKENS = 400
ASKED: dict[str, Any] = {
    "model": "tiny",
    "input": "Tell me something long.",
    "temperature": 1.0,
    "max_output_tokens": TOKENS,
    "extra_body": {"seed": 7},
}
SHORT = {**ASKED, "input": "Be short.", "max_output_tokens": 40}
OTHERS = 12
WITHIN_S = 120.0


def prepare(model: Path, template: str = TEMPLATE) -> None:
    """Let a tiny model never end by itself, and write its tokenizer."""
    (model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": None, "bos_token_id": None}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: at for at, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template).save_pretrained(model)


@contextmanager
def served(tmp_path: Path, url: str) -> Iterator[tuple[Cluster, Gateway, Gateway]]:
    """Yield a coordinator with a worker, and two gateways over one database."""
    settings = f'names = ["tiny"]\n[storage]\nurl = "{url}"\nlease_s = 0.5\n'
    with Cluster(coordinator="[limits]\nreattach_s = 60.0\n") as cluster:
        prepare(cluster.model)
        cluster.start("w0")
        folders = [tmp_path / name for name in ("first", "second")]
        for folder in folders:
            folder.mkdir()
        with (
            Gateway(cluster.runtime, folders[0], settings) as first,
            Gateway(cluster.runtime, folders[1], settings) as second,
        ):
            yield cluster, first, second


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S)


def test_a_stream_goes_on_in_another_gateway_after_every_death(tmp_path: Path) -> None:
    survives(tmp_path, f"sqlite:{tmp_path}/stored.sqlite")


def test_the_same_with_postgresql(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with PostgresServer() as server:
        survives(tmp_path, server.new_database())


def survives(tmp_path: Path, url: str) -> None:
    with served(tmp_path, url) as (cluster, first, second):
        with client_of(first) as client:
            expected = client.responses.create(**ASKED, store=False)
            stream = client.responses.create(**ASKED, background=True, stream=True)
            events = [next(stream) for _ in range(20)]
            name = events[0].response.id  # type: ignore[union-attr]
            others = [
                client.responses.create(**SHORT, background=True, metadata={"at": str(at)}) for at in range(OTHERS)
            ]
            first.kill()
        cluster.kill("w0")
        cluster.kill("coordinator")
        cluster.start_coordinator()
        cluster.start_worker("w0")
        with client_of(second) as client:
            last = events[-1].sequence_number
            events += client.responses.retrieve(name, stream=True, starting_after=last)
            final = client.responses.retrieve(name)
            following = client.responses.create(
                model="tiny", input="Go on.", max_output_tokens=1, previous_response_id=name
            )
            assert following.usage is not None and following.usage.input_tokens > TOKENS
            short = client.responses.create(**SHORT, store=False)
            for at, other in enumerate(others):
                while (found := client.responses.retrieve(other.id)).status in ("queued", "in_progress"):
                    time.sleep(0.05)
                assert (found.output_text, found.metadata) == (short.output_text, {"at": str(at)})
            talk = client.conversations.create(items=[{"type": "message", "role": "user", "content": "I am Ada."}])
            client.responses.create(model="tiny", input="Hi.", max_output_tokens=1, conversation=talk.id)
            assert [item.role for item in client.conversations.items.list(talk.id, order="asc", limit=1)] == [  # type: ignore[union-attr]
                *("user", "user", "assistant")
            ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == final.output_text == expected.output_text
        assert events[-1].type == "response.incomplete" and events[-1].response == final
        assert final.usage is not None and final.usage.output_tokens == TOKENS
    storage = InlineStorage(url)
    (usage,) = storage.done(Usage())[0]  # type: ignore[misc,union-attr]
    assert (usage.documents, usage.in_progress) == (4 + OTHERS, 0), "nothing is lost and nothing doubled"
    documents = storage.done(List(tenant="default", kind="response"))[0]
    assert documents[0].id == name  # type: ignore[union-attr,index]
    storage._engine.close()
