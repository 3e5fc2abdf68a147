"""The next turn of a stored response computes its own tokens alone, with a real coordinator and worker.

The model is tiny and random; a grammar keeps its answers to text that is tokenised again into the same tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.resources.responses import Responses
from tokenizers import pre_tokenizers

from tests.gateway import test_background_deaths as deaths
from tests.gateway.served import Gateway
from tests.gateway.test_background_deaths import WITHIN_S, prepare
from tools.cluster.cluster import Cluster
from tools.cluster.running import CONFIG

TEMPLATE = deaths.TEMPLATE + "{% if add_generation_prompt %}assistant: {% endif %}"
SHAPE: dict[str, Any] = {
    "format": {
        "type": "json_schema",
        "name": "colour",
        "schema": {"type": "string", "enum": ["vermilion and cadmium yellow", "ultramarine and burnt sienna"]},
    }
}


GUIDE = Path(__file__).parents[2] / "docs" / "agents.md"


def turn(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return client.responses.create(model="tiny", input=text, text=SHAPE, max_output_tokens=60, **fields)


def continued(turns: list[Any]) -> None:
    """Check that each turn found all tokens of the one before it, but the last, which is sampled and not computed."""
    for before, after in pairwise(turns):
        assert before.status == after.status == "completed"
        known = before.usage.input_tokens + before.usage.output_tokens
        found = after.usage.input_tokens_details.cached_tokens
        assert found >= known - 1, (found, known)


@contextmanager
def cluster_of_lines() -> Iterator[Cluster]:
    """Yield a service with a model that ends its answers with a line, as its template does."""
    with Cluster(coordinator="[limits]\nreattach_s = 60.0\n") as cluster:
        prepare(cluster.model, TEMPLATE)
        end = sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ċ")
        (cluster.model / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": end, "bos_token_id": None}))
        cluster.start("w0")
        yield cluster


def test_the_guide_for_agents_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GUIDE.read_text(encoding="utf-8").partition("## Over HTTP")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    real = Responses.create

    def create(self: Any, **asked: Any) -> Any:
        return real(self, **asked, text=SHAPE, max_output_tokens=60)

    monkeypatch.setattr(Responses, "create", create)
    names: dict[str, Any] = {}
    with cluster_of_lines() as cluster, Gateway(cluster.runtime, tmp_path, 'names = ["tiny"]\n') as gateway:
        for block in blocks:
            exec(block.replace("http://127.0.0.1:8000", gateway.url), names)  # noqa: S102 - the page of this repository
        names["client"].close()
        names["http"].close()
    known = names["plan"].usage.total_tokens - 1
    found = [int(count) for count in re.findall(r"(\d+) of \d+$", capsys.readouterr().out, re.MULTILINE)]
    assert len(found) == 3 and min(found) >= known, (found, known)


def test_each_turn_continues_the_one_before_also_after_the_deaths_of_gateway_and_coordinator(tmp_path: Path) -> None:
    with cluster_of_lines() as cluster, Gateway(cluster.runtime, tmp_path, 'names = ["tiny"]\n') as gateway:
        url, port = f"{gateway.url}/v1", gateway.port
        with openai.OpenAI(base_url=url, api_key="none", max_retries=3, timeout=WITHIN_S) as client:
            turns = [turn(client, "Name a colour.")]
            turns.append(turn(client, "Another one.", previous_response_id=turns[-1].id))
            branch = turn(client, "And a dark one.", previous_response_id=turns[0].id)
            continued([turns[0], branch])
            gateway.kill()
            cluster.kill("coordinator")
            cluster.start_coordinator()
            gateway.start(port)
            turns.append(turn(client, "A third.", previous_response_id=turns[-1].id))
            continued(turns)
            talk = client.conversations.create().id
            continued([turn(client, text, conversation=talk) for text in ("One.", "Two.", "Three.")])
