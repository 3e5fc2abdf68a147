"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import asyncio
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from kvforge.gateway.openai import logprobs
from tests.gateway.scripted import Script, application, ask, tokenizer

ONCE = tokenizer().encode("Once", special=False)
LOGPROBS = [None, *(-token / 100 for token in ONCE[1:])]


def complete(script: Script, **fields: Any) -> dict[str, Any]:
    response = ask(application(script), "/v1/completions", {"prompt": "Once", **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    typed = response.json()
    for choice in typed["choices"]:  # OpenAI's service begins with null too, which its own type does not allow
        for name, typical in (("token_logprobs", 0.0), ("top_logprobs", {})):
            column = (choice["logprobs"] or {}).get(name)
            if column and column[0] is None:
                column[0] = typical
    Completion.model_validate(typed, strict=True)
    return body


def wanted(script: Script) -> int | None:
    sampling = script.asked[-1][2].sampling
    assert sampling is not None
    return sampling.prompt_logprobs


def test_echo_puts_the_prompts_log_probabilities_before_the_answers() -> None:
    script = Script(["ab"])
    (choice,) = complete(script, echo=True, logprobs=2)["choices"]
    found = choice["logprobs"]
    assert wanted(script) == 2 and choice["text"] == "Onceab"
    assert found["tokens"][:6] == [*"Onceab"] and found["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    assert found["token_logprobs"] == [*LOGPROBS, -0.5, -0.5, -0.5]
    assert found["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in found["top_logprobs"][1:])


def test_without_top_tokens() -> None:
    (choice,) = complete(Script(["ab"]), echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] is None
    assert choice["logprobs"]["token_logprobs"][:4] == LOGPROBS


def test_a_prompt_alone_is_scored_without_an_answer() -> None:
    script = Script(["ab"], reason="length")
    body = complete(script, echo=True, logprobs=1, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once", "length")
    assert choice["logprobs"]["token_logprobs"] == LOGPROBS
    assert (body["usage"]["completion_tokens"], script.asked[0][2].max_tokens) == (0, 0)


def test_each_answer_to_a_prompt_repeats_them() -> None:
    body = complete(Script(["a", "bb", "c", "dd"]), prompt=["Once", "On"], n=2, echo=True, logprobs=1)
    counts = [len(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    assert counts == [4 + 2, 4 + 3, 2 + 2, 2 + 3]
    assert [choice["logprobs"]["token_logprobs"][1] for choice in body["choices"]] == [LOGPROBS[1]] * 4


def expected(width: int) -> list[dict[str, Any] | None]:
    """vLLM's format: the token itself and the most likely ones, by id."""
    entries: list[dict[str, Any] | None] = [None]
    for token in ONCE[1:]:
        best = token if token % 2 == 0 else token + 1
        ranked = {token: (-token / 100, 4 if token % 2 else 1)}
        ranked |= {best + 2 * i: (-best / 100 - i, i + 1) for i in range(width)}
        entries.append(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": tokenizer().table().spelled(other)[0]}
                for other, (value, rank) in ranked.items()
            }
        )
    return entries


@pytest.mark.parametrize("width", [0, 1, 3])
def test_prompt_logprobs_of_a_completion_are_vllms(width: int) -> None:
    script = Script(["ab"])
    (choice,) = complete(script, prompt_logprobs=width)["choices"]
    assert wanted(script) == width and choice["logprobs"] is None
    assert choice["prompt_logprobs"] == expected(width)


def test_both_forms_at_once_have_as_many_as_each_wants() -> None:
    script = Script(["ab"])
    (choice,) = complete(script, prompt_logprobs=1, echo=True, logprobs=3)["choices"]
    assert wanted(script) == 3
    assert choice["prompt_logprobs"] == expected(1)
    assert all(len(top) == 3 for top in choice["logprobs"]["top_logprobs"][1:4])


def test_prompt_logprobs_of_a_chat() -> None:
    script = Script(["ab"])
    body = {"messages": [{"role": "user", "content": "a"}], "prompt_logprobs": 2, "n": 2}
    response = ask(application(script), "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    found = response.json()
    ChatCompletion.model_validate(found, strict=True)
    prompt = script.asked[0][0]
    assert len(found["prompt_logprobs"]) == len(prompt) and found["prompt_logprobs"][0] is None
    assert all(str(token) in entry for token, entry in zip(prompt[1:], found["prompt_logprobs"][1:], strict=True))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_without_them_nothing_is_asked_for_or_added(path: str) -> None:
    script = Script(["ab"])
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    response = ask(application(script), path, {**body, "logprobs": 1 if path == "/v1/completions" else True})
    assert response.status_code == 200 and "prompt_logprobs" not in response.text
    assert wanted(script) is None


def test_a_service_without_a_tokenizer_has_ids_alone() -> None:
    app = application(Script(["ab"]), has_tokenizer=False)
    response = ask(app, "/v1/completions", {"prompt": ONCE, "prompt_logprobs": 0})
    assert response.status_code == 200, response.text
    second = response.json()["choices"][0]["prompt_logprobs"][1]
    assert second == {str(ONCE[1]): {"logprob": LOGPROBS[1], "rank": 4 if ONCE[1] % 2 else 1, "decoded_token": None}}


def test_a_long_prompt_lets_other_requests_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []

    async def sleep(seconds: float) -> None:
        paused.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(logprobs, "asyncio", SimpleNamespace(sleep=sleep))  # other event loops of the process sleep too
    complete(Script(["ab"]), prompt=ONCE * 256, prompt_logprobs=0)
    assert paused == [0] * (4 * 256 // logprobs.PROMPT_TOKENS_AT_A_TIME - 1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [ONCE * 4] * 3, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [ONCE * 4] * 3, "echo": True, "logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 60}], "prompt_logprobs": 1}, ""),
    ],
)
def test_a_response_is_bounded(path: str, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(["ab"])
    monkeypatch.setattr(logprobs, "PROMPT_ENTRIES_MAX", 95)
    response = ask(application(script), path, fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param or "prompt_logprobs")
    assert "the limit is 95" in response.json()["error"]["message"] and not script.asked


def test_what_lm_eval_computes_from_a_batch() -> None:
    """Its loglikelihood requests: a batch of token ids, one token to generate, which is left out of the sums."""
    contexts = [2, 3]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    body = complete(Script(["a"], reason="length"), prompt=[ONCE, ONCE], **fields)
    choices = sorted(body["choices"], key=itemgetter("index"))
    for choice, context in zip(choices, contexts, strict=True):
        found = choice["logprobs"]
        scores, tops = found["token_logprobs"][context:-1], found["top_logprobs"][context:-1]
        assert sum(scores) == pytest.approx(sum(-token / 100 for token in ONCE[context:]))
        greedy = all(score == max(top.values()) for score, top in zip(scores, tops, strict=True))
        assert greedy == all(token % 2 == 0 for token in ONCE[context:])
