"""/v1/completions with vLLM's extensions and scripted answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from tests.gateway.scripted import NAME, Script, application, ask, tokenizer


def complete(script: Script, **fields: Any) -> Completion:
    response = ask(application(script), "/v1/completions", {"prompt": "Once", **fields})
    assert response.status_code == 200, response.text
    return Completion.model_validate(response.json(), strict=True)


def streamed(script: Script, **fields: Any) -> list[Completion]:
    response = ask(application(script), "/v1/completions", {"prompt": "Once", "stream": True, **fields})
    lines = [line for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    # OpenAI's own type does not allow a missing finish reason, although its service sends one.
    return [Completion.construct(**json.loads(line[6:])) for line in lines]


def texts(events: list[Completion], index: int = 0) -> str:
    return "".join(c.text for event in events for c in event.choices if c.index == index)


def test_prompts_of_all_four_forms() -> None:
    ids = tokenizer().encode("Once", special=False)
    for prompt, count in (("Once", 1), (ids, 1), (["Once", "Once"], 2), ([ids, ids, ids], 3)):
        script = Script(["!"])
        answer = complete(script, prompt=prompt, max_tokens=5)
        assert [asked[0] for asked in script.asked] == [ids] * count
        assert [choice.index for choice in answer.choices] == list(range(count))
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids) * count


def test_echo_puts_the_prompt_before_the_answer() -> None:
    ids = tokenizer().encode("Once", special=False)
    assert complete(Script([" upon"]), prompt=ids, echo=True).choices[0].text == "Once upon"
    assert texts(streamed(Script([" upon"], step=1), echo=True, max_tokens=20)) == "Once upon"


def test_the_best_are_those_with_the_largest_mean_of_log_probability() -> None:
    script = Script(["a", "bb", "ccc"])
    answer = complete(script, n=2, best_of=3)
    assert len(answer.choices) == 2 and script.asked[0][1] == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 2 + 3 + 4


def test_log_probabilities_with_places_in_the_text() -> None:
    answer = complete(Script(["ab"]), logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None
    assert (found.tokens[:2], found.text_offset) == (["a", "b"], [0, 1, 2])
    assert found.top_logprobs is not None and found.top_logprobs[0]["a"] == -0.5
    assert complete(Script(["ab"]), logprobs=0).choices[0].logprobs.top_logprobs is None  # type: ignore[union-attr]


def test_several_prompts_are_streamed_side_by_side() -> None:
    counted = {"include_usage": True}
    events = streamed(Script(["one", "two"], step=1), prompt=["a", "b"], max_tokens=30, stream_options=counted)
    assert [texts(events, index) for index in (0, 1)] == ["one", "two"]
    assert events[-1].usage is not None and events[-1].usage.completion_tokens == 8


def test_token_ids_where_they_are_asked_for() -> None:
    answer = complete(Script(["ab"]), return_token_ids=True)
    assert answer.choices[0].model_dump()["token_ids"][:2] == tokenizer().encode("ab", special=False)
    events = streamed(Script(["ab"], step=1), return_token_ids=True)
    ids = [token for event in events for choice in event.choices for token in choice.model_dump()["token_ids"]]
    assert ids == answer.choices[0].model_dump()["token_ids"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": ["a"] * 200}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    script = Script()
    response = ask(application(script), "/v1/completions", {"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not script.asked


def test_a_part_of_what_is_asked_for_under_one_key_has_a_key_of_its_own() -> None:
    script = Script()
    ask(application(script), "/v1/completions", {"prompt": ["a", "b"]}, {"idempotency-key": "k"})
    assert [asked[2].idempotency_key for asked in script.asked] == ["k", "k/1"]


def test_token_ids_of_texts_and_conversations() -> None:
    app = application(Script())
    found = ask(app, "/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert found == {"count": 2, "max_model_len": 4096, "tokens": tokenizer().encode("ab"), "token_strs": ["a", "b"]}
    assert ask(app, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "ab"}
    chat = ask(app, "/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False})
    assert chat.json()["count"] == len(tokenizer().encode("<|im_start|>user\na<|im_end|>\n"))
    assert ask(app, "/tokenize", {}).json()["error"]["param"] == "prompt"
    assert ask(app, "/detokenize", {"tokens": [-1]}).json()["error"]["param"] == "tokens"


def test_embeddings_are_refused_by_name() -> None:
    response = ask(application(Script()), "/v1/embeddings", {"input": "a", "model": NAME})
    assert response.status_code == 400 and "embeddings" in response.json()["error"]["message"]
