"""A model without a tokenizer: token ids in and out, and errors with a remedy for requests that need text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.scripted import Script, application, ask, tokenizer

IDS = [5, 6, 7]


def test_ids_are_answered_with_ids() -> None:
    script = Script(["abc"])
    body = {"prompt": IDS, "max_tokens": 9, "logprobs": 1}
    answer = ask(application(script, has_tokenizer=False), "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    spoken = tokenizer().encode("abc", special=False)
    assert script.asked[0][0] == choice["prompt_token_ids"] == IDS
    assert (choice["text"], choice["token_ids"][:3]) == ("", spoken)
    assert choice["logprobs"]["tokens"][:3] == [f"token_id:{token}" for token in spoken]


def test_a_stream_has_the_ids_too() -> None:
    body = {"prompt": IDS, "max_tokens": 9, "stream": True}
    answer = ask(application(Script(["abcdef"], step=2), has_tokenizer=False), "/v1/completions", body)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    ids = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert ids[:6] == tokenizer().encode("abcdef", special=False)
    assert events[0]["choices"][0]["prompt_token_ids"] == IDS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt[0]"),
        ("/v1/completions", {"prompt": IDS, "stop": ["x"]}, "stop"),
        ("/v1/completions", {"prompt": IDS, "echo": True}, "prompt[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
        ("/tokenize", {"prompt": "hi"}, "prompt"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
    ],
)
def test_text_is_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    answer = ask(application(Script(), has_tokenizer=False), path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "no tokenizer" in error["message"]
