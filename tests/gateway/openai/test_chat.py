"""/v1/chat/completions with scripted answers; OpenAI's own types validate the responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvforge.protocol.errors import Draining, QueueFull, WorkerError
from tests.gateway.scripted import EOS, FIRST_ID, Script, application, ask, prompt_text

HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<think>\nhm\n</think>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\u2615"}}\n</tool_call>'


def chat(script: Script, **fields: Any) -> Any:
    """Return a whole answer."""
    response = ask(application(script), "/v1/chat/completions", {"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json(), strict=True)


def chunks(text: str) -> list[ChatCompletionChunk]:
    """Return the events of a stream that ends correctly."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [ChatCompletionChunk.model_validate(json.loads(line[6:]), strict=True) for line in lines]


def streamed(script: Script, **fields: Any) -> list[ChatCompletionChunk]:
    response = ask(application(script), "/v1/chat/completions", {"messages": HELLO, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return chunks(response.text)


def put_together(events: list[ChatCompletionChunk], index: int = 0) -> dict[str, Any]:
    """Assemble a stream as the OpenAI library's helper does."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reasons": []}
    for event in events:
        for choice in event.choices:
            if choice.index != index:
                continue
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(message["calls"]):
                    assert call.id and call.type == "function" and call.function and call.function.name
                    message["calls"].append([call.function.name, ""])
                assert call.function is not None
                message["calls"][call.index][1] += call.function.arguments or ""
            if choice.finish_reason:
                message["reasons"].append(choice.finish_reason)
    return message


def test_a_whole_answer_with_its_counts() -> None:
    script = Script(["Hello, you ☕"], cached=7)
    answer = chat(script, model="other", user="me", metadata={"a": "b"})
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.model) == ("Hello, you ☕", "stop", "other")
    tokens = len("Hello, you ☕".encode()) + 1
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (tokens, 7)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + tokens
    assert prompt_text(script) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_the_same_as_it_comes() -> None:
    events = streamed(Script(["Hello, you ☕"], cached=7), stream_options={"include_usage": True})
    assert put_together(events) == {"content": "Hello, you ☕", "reasoning": "", "calls": [], "reasons": ["stop"]}
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].usage is not None and events[-1].usage.prompt_tokens_details is not None
    assert events[-1].usage.prompt_tokens_details.cached_tokens == 7 and not events[-1].choices
    assert all(event.usage is None for event in events[:-1])
    assert len({event.id for event in events}) == 1


def test_counts_come_with_each_event_where_that_is_asked() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = streamed(Script(["abcdef"], step=2), stream_options=options)
    counted = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert counted == [0, 2, 4, 6, 7, 7]


def test_several_answers_are_choices_of_one_response() -> None:
    script = Script(["one", "two", "three"])
    answer = chat(script, n=3)
    assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
    assert len(script.asked) == 1 and script.asked[0][1] == 3
    events = streamed(Script(["one", "two", "three"]), n=3)
    assert [put_together(events, index)["content"] for index in range(3)] == ["one", "two", "three"]


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_reasoning_and_calls_whole_and_streamed(step: int) -> None:
    answer = chat(Script([CALL], step=step), tools=TOOLS)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.reasoning_content == "hm"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln ☕"})
    assert call.id == f"call-chatcmpl-{FIRST_ID:016x}-0-0"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    message = put_together(streamed(Script([CALL], step=step), tools=TOOLS))
    assert message["calls"] == [["weather", call.function.arguments]]
    assert (message["content"], message["reasoning"], message["reasons"]) == ("", "hm", ["tool_calls"])


def test_a_conversation_with_calls_is_what_the_template_reads() -> None:
    script = Script()
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    conversation = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "kind"}]},
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "c1", "content": "warm"},
    ]
    chat(script, messages=conversation, tools=TOOLS)
    text = prompt_text(script)
    assert "system\nBe\nkind" in text and 'weather:{"city": "K' in text and "tool\nwarm" in text and "[weather]" in text


def test_no_tools_are_offered_where_none_may_be_called() -> None:
    script = Script([CALL])
    answer = chat(script, tools=TOOLS, tool_choice="none")
    assert "[weather]" not in prompt_text(script)
    assert answer.choices[0].message.tool_calls is None and "<tool_call>" in answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(stream: bool) -> None:
    script = Script(["one two three"], step=1)
    if stream:
        assert put_together(streamed(script, stop=["two", "xyz"]))["content"] == "one "
    else:
        answer = chat(script, stop="two")
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one ", "stop")
        assert answer.usage.completion_tokens == len("one two")
    assert script.finished_at == [len("one two")]


def test_a_token_that_ends_it_is_no_text() -> None:
    assert chat(Script(["abc!"]), stop_token_ids=[tokens_of("!")[0]]).choices[0].message.content == "abc"


def tokens_of(text: str) -> list[int]:
    from tests.gateway.scripted import tokenizer

    return tokenizer().encode(text, special=False)


def test_log_probabilities_of_each_token() -> None:
    answer = chat(Script(["añ"]), logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in entries] == [[97], [0xC3], [0xB1], list(EOS.encode())]
    assert entries[0].token == "a" and entries[0].logprob == -0.5
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.5, -1.5]
    events = streamed(Script(["añ"], step=1), logprobs=True, top_logprobs=2)
    said = [
        entry
        for event in events
        for choice in event.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert [entry.bytes for entry in said] == [entry.bytes for entry in entries]


def test_what_is_chosen_reaches_the_coordinator_by_its_names() -> None:
    script = Script()
    chat(
        script,
        max_completion_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias={"5": 1.5, "6": -100},
        cache_salt="mine",
        priority=3,
    )
    ((_, count, options),) = script.asked
    message = options.command(1, [], 0, count)  # type: ignore[arg-type]
    sampling = message.sampling
    assert (message.max_tokens, message.salt, message.priority, message.detached) == (9, "mine", 3, False)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert sampling.seed == (1 << 64) - 1 and sampling.repetition_penalty == 1.1
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((5, 1.5), (6, float("-inf")))


def test_what_is_not_chosen_is_the_models_own() -> None:
    script = Script()
    chat(script)
    assert "temperature" in script.asked[0][2].command(1, [], 0, 1).model_defaults  # type: ignore[arg-type]
    # As long as the context.
    assert script.asked[0][2].max_tokens == 4096 - len(script.asked[0][0])


def test_an_answer_that_was_begun_goes_on() -> None:
    script = Script()
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    chat(script, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt_text(script).endswith("assistant\nIt is")


def test_what_the_template_is_told() -> None:
    script = Script(["hm</think>yes"])
    answer = chat(script, chat_template_kwargs={"enable_thinking": True})
    assert prompt_text(script).endswith("<think>\n")
    assert (answer.choices[0].message.reasoning_content, answer.choices[0].message.content) == ("hm", "yes")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "Expected `array` of length >= 1"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role", "king"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "image_url",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "missing"),
        ({"temperature": -1}, "temperature", "0"),
        ({"temperature": "hot"}, "temperature", "str"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"n": 0}, "n", ">= 1"),
        ({"stop": [""]}, "stop", "characters"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "true"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "custom"),
        ({"tools": TOOLS + TOOLS}, "tools[1]", "duplicate tool name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "no function"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "missing"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
                }
            },
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has 2 members"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    script = Script()
    response = ask(application(script), "/v1/chat/completions", {"messages": HELLO, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert words in error["message"] and error["code"] == "invalid_request"
    assert not script.asked


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b'"x"', b"\xff", b"[" * 5000])
def test_a_body_that_is_no_request(body: bytes) -> None:
    response = ask(application(Script()), "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "body")


def test_an_unknown_model_is_not_found() -> None:
    response = ask(application(Script()), "/v1/chat/completions", {"messages": HELLO, "model": "gpt-5"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_without_a_template_says_what_to_do() -> None:
    response = ask(application(Script(), template=""), "/v1/chat/completions", {"messages": HELLO})
    assert response.status_code == 400 and "/v1/completions" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "headers"),
    [
        (QueueFull(8, 2500), 429, {"retry-after": "3", "retry-after-ms": "2500"}),
        (Draining("going"), 503, {"retry-after": "1"}),
    ],
)
def test_a_refusal_is_a_status_and_says_when_to_come_again(
    stream: bool, refusal: Exception, status: int, headers: dict[str, str]
) -> None:
    script = Script(refusal=refusal)  # type: ignore[arg-type]
    response = ask(application(script), "/v1/chat/completions", {"messages": HELLO, "stream": stream})
    assert response.status_code == status
    assert {name: response.headers[name] for name in headers} == headers
    assert response.json()["error"]["code"] == refusal.code  # type: ignore[attr-defined]


def test_an_error_in_the_middle_is_the_last_event() -> None:
    script = Script(["abc"], error=WorkerError("the device is gone"))
    response = ask(application(script), "/v1/chat/completions", {"messages": HELLO, "stream": True})
    last = response.text.strip().split("\n")[-1]
    assert json.loads(last[6:])["error"]["code"] == "worker_error"
    whole = ask(application(Script(["abc"], error=WorkerError("x"))), "/v1/chat/completions", {"messages": HELLO})
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "server_error")


def test_a_request_with_a_key_is_the_same_when_it_comes_again() -> None:
    script = Script(["Hello, you"], step=2)
    body = {"messages": HELLO, "stream": True}
    first = ask(application(script), "/v1/chat/completions", body, {"idempotency-key": "k"})
    options = script.asked[0][2]
    assert options.idempotency_key == "k" and options.detached
    numbered = [line for line in first.text.split("\n") if line.startswith("id: ")]
    assert numbered == ["id: 0", "id: 2", "id: 4", "id: 6", "id: 8", "id: 10", "id: 11"]
    again = ask(application(script), "/v1/chat/completions", body, {"idempotency-key": "k", "last-event-id": "4"})
    assert put_together(chunks(again.text))["content"] == "o, you"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True, "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
        ("/v1/responses", {"input": "a", "stream": True}),
    ],
)
def test_where_to_go_on_is_refused_where_nobody_could(path: str, body: dict[str, Any]) -> None:
    script = Script()
    response = ask(application(script), path, body, {"idempotency-key": "k", "last-event-id": "4"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last-event-id")
    assert not script.asked


def test_where_to_go_on_needs_a_key() -> None:
    response = ask(application(Script()), "/v1/chat/completions", {"messages": HELLO}, {"last-event-id": "4"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "last-event-id")


def test_a_named_tool_is_called_once() -> None:
    script = Script([CALL])
    choice = {"type": "function", "function": {"name": "weather"}}
    chat(script, tools=TOOLS, tool_choice=choice)
    chat(script, tools=TOOLS, tool_choice="required")
    named, required = (str(options.sampling.grammar) for _, _, options in script.asked)
    assert ")*" not in named
    assert ")*" in required


def test_the_prompt_s_ids_are_answered_where_they_are_asked_for() -> None:
    script = Script(["hello"])
    body = {"messages": HELLO, "return_token_ids": True}
    whole = ask(application(script), "/v1/chat/completions", body).json()
    assert whole["prompt_token_ids"] == script.asked[0][0]
    lines = ask(application(script), "/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[0]["prompt_token_ids"] == script.asked[1][0]
    assert not any("prompt_token_ids" in event for event in events[1:])
