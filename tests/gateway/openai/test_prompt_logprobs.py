"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import asyncio
import json
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from kvforge.client.prompt_stream import PromptStream
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.openai import logprobs
from kvforge.gateway.openai.prompt_events import PromptEvents
from kvforge.gateway.replicas.stream import Stream
from kvforge.gateway.text.inline import NoTexts
from kvforge.protocol.errors import InternalError
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


def streamed(script: Script, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of all events."""
    response = ask(application(script), "/v1/completions", {"prompt": "Once", "stream": True, **fields})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line[6:])["choices"]]


def joined(choices: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the events of one choice as the complete answer would have it."""
    mine = [choice for choice in choices if choice["index"] == index]
    logs = [choice["logprobs"] for choice in mine if choice["logprobs"]]
    columns = [name for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset") if logs and logs[0][name]]
    whole: dict[str, Any] = {"text": "".join(choice["text"] for choice in mine)}
    whole |= {name: [value for each in logs for value in each[name]] for name in columns}
    listed = [entry for choice in mine for entry in choice.get("prompt_logprobs", ())]
    return whole | ({"prompt_logprobs": listed} if listed else {})


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0},
        {"prompt_logprobs": 1},
        {"prompt_logprobs": 1, "echo": True},
        {"prompt_logprobs": 0, "echo": True, "logprobs": 3},
        {"prompt_logprobs": 2, "n": 2, "echo": True, "logprobs": 1},
    ],
)
def test_a_stream_has_what_the_complete_answer_has(fields: dict[str, Any]) -> None:
    count = fields.get("n", 1)
    found = streamed(Script(["ab", "cd"][:count], step=1), **fields)
    for index, whole in enumerate(complete(Script(["ab", "cd"][:count]), **fields)["choices"]):
        expected = {"text": whole["text"], **{k: v for k, v in (whole["logprobs"] or {}).items() if v is not None}}
        expected |= {name: whole[name] for name in ("prompt_logprobs",) if name in whole}
        assert joined(found, index) == expected


def test_the_first_event_of_a_stream_has_a_short_prompt_whole() -> None:
    first, *rest = streamed(Script(["ab"], step=1), echo=True, logprobs=1, prompt_logprobs=1)
    assert first["text"] == "Once" and first["logprobs"]["token_logprobs"] == LOGPROBS
    assert first["prompt_logprobs"] == expected(1) and first["finish_reason"] is None
    assert rest and not any("prompt_logprobs" in choice for choice in rest)


def test_a_long_prompt_is_streamed_in_parts() -> None:
    found = streamed(Script(["ab"], step=1), prompt=ONCE * 200, prompt_logprobs=1)
    sizes = [len(choice["prompt_logprobs"]) for choice in found if "prompt_logprobs" in choice]
    assert sizes == [256, 256, 256, 32]
    (whole,) = complete(Script(["ab"]), prompt=ONCE * 200, prompt_logprobs=1)["choices"]
    assert joined(found)["prompt_logprobs"] == whole["prompt_logprobs"]


def test_a_prompt_alone_is_streamed_too() -> None:
    found = streamed(Script(["ab"], reason="length"), echo=True, logprobs=1, max_tokens=0)
    assert found[0]["logprobs"]["token_logprobs"] == LOGPROBS
    assert found[-1]["finish_reason"] == "length" and joined(found)["text"] == "Once"


def test_a_prompt_that_fails_ends_the_stream_with_its_error() -> None:
    response = ask(
        application(Script(["ab"], error=InternalError("lost"))),
        "/v1/completions",
        {"prompt": "Once", "stream": True, "prompt_logprobs": 1},
    )
    assert "lost" in response.text


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


def test_a_part_waits_until_its_tokens_have_arrived() -> None:
    """A prompt that is computed in chunks is reported in chunks; the parts of the stream do not depend on these."""
    prompt, scored = ONCE * 100, PromptStream(len(ONCE) * 100 - 1)
    part, stream = PromptEvents(Prompts(None, NoTexts()), prompt, "", None, 0), SimpleNamespace(prompt_logprobs=None)
    assert part.pop_part(cast(Stream, stream)) is None
    stream.prompt_logprobs = scored
    sizes = []
    for token in prompt[1:]:
        scored.tokens.append(token)
        scored.logprobs.append(-1.0)
        scored.ranks.append(1)
        scored.top_logprobs.append(())
        found = part.pop_part(cast(Stream, stream))
        sizes += [(len(scored.tokens), len(found["prompt_logprobs"]))] if found is not None else []
    assert sizes == [(255, 256), (399, 144)] and part.over
