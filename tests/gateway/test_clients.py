"""Popular clients against a real server with a real model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from kvforge import Client
from tests.amount import thinned
from tests.gateway.served import Gateway
from tests.integration.test_conformance import CASES, SAMPLE
from tools.cluster.cluster import Cluster

pytestmark = pytest.mark.model

NAME = "smollm2"
CHATS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "smollm2_chat.json").read_text(encoding="utf-8")
)["cases"]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


class Served:
    """A cluster, its gateway, and its clients."""

    def __init__(self, cluster: Cluster, gateway: Gateway, kv: Client) -> None:
        self.cluster, self.gateway, self.kv = cluster, gateway, kv
        self.url = gateway.url

    def openai_async(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def anthropic_async(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", max_retries=0)

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def served(smollm2_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, settings = tmp_path_factory.mktemp("gateway"), f'names = ["{NAME}"]\n'
    with smollm2_cluster.client() as kv, Gateway(smollm2_cluster.runtime, folder, settings) as gateway:
        yield Served(smollm2_cluster, gateway, kv)


def test_openai_chat_whole_and_streamed(served: Served) -> None:
    with served.openai() as client:
        assert next(model.id for model in client.models.list()) == NAME
        whole = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=30)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (PARIS, "stop")
        with client.chat.completions.stream(model=NAME, messages=QUESTION, temperature=0, max_tokens=30) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == PARIS
        again = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0, max_tokens=30)
        assert again.usage is not None and again.usage.prompt_tokens_details is not None
        assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_openai_completions_responses_and_errors(served: Served) -> None:
    with served.openai() as client:
        text = client.completions.create(model=NAME, prompt="One, two, three,", temperature=0, max_tokens=4, n=2)
        assert [choice.text.startswith(" four") for choice in text.choices] == [True, True]
        response = client.responses.create(model=NAME, input="What is the capital of France?", temperature=0)
        assert response.output_text == PARIS
        with pytest.raises(openai.NotFoundError, match="model_not_found"):
            client.chat.completions.create(model="gpt-5", messages=QUESTION)
        with pytest.raises(openai.BadRequestError, match="maximum context length") as wrong:
            client.chat.completions.create(model=NAME, messages=QUESTION, max_tokens=100_000)
        assert wrong.value.param == "max_tokens"
        with pytest.raises(openai.BadRequestError, match="no place for tools"):
            client.chat.completions.create(
                model=NAME, messages=QUESTION, tools=[{"type": "function", "function": {"name": "f"}}]
            )


def test_openai_batch(served: Served) -> None:
    """The answer of a line is that of the same request over HTTP."""
    body = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 30}
    lines = [{"custom_id": str(at), "method": "POST", "url": "/v1/chat/completions", "body": body} for at in range(3)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with served.openai() as client:
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        deadline = time.monotonic() + 60
        while batch.status != "completed":
            assert time.monotonic() < deadline, batch
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        text = client.files.content(batch.output_file_id).text
        answers = [json.loads(line)["response"]["body"] for line in text.splitlines()]
        assert [answer["choices"][0]["message"]["content"] for answer in answers] == [PARIS] * 3
        for name in (file.id, batch.output_file_id):
            assert client.files.delete(name).deleted


def test_openai_sessions(served: Served) -> None:
    """A session by the client's raw requests, and its turns by `responses.create`."""
    turn: dict[str, Any] = {"model": NAME, "temperature": 0, "max_output_tokens": 12}
    with served.openai() as client:

        def post(path: str, **body: Any) -> dict[str, Any]:
            found: dict[str, Any] = client.post(f"/sessions{path}", cast_to=dict[str, Any], body=body)
            return found

        session = post("", metadata={"who": "me"})["id"]
        first = client.responses.create(input="What is the capital of France?", conversation=session, **turn)
        (fork,) = post(f"/{session}/fork", n=1)["data"]
        # Fields that the client does not know travel in `extra_body`.
        second = client.responses.create(
            input="And of Italy?", extra_body={"conversation": {"id": fork["id"]}, "seed": 1}, **turn
        )
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
        counts = [len(client.conversations.items.list(name).data) for name in (session, fork["id"])]
        assert counts == [2, 4]
        assert post(f"/{fork['id']}/pin", ttl_s=60)["pinned_s"] == 60
        explained: Any = client.get(f"/sessions/{fork['id']}/explain", cast_to=dict[str, Any])
        assert explained["sequence"]["sentences"]
        assert post(f"/{fork['id']}/rewind", tokens=first.usage.total_tokens)["removed_items"] == 2
        again = client.responses.create(input="And of Italy?", conversation=fork["id"], **turn)
        assert again.output_text == second.output_text
        for name in (session, fork["id"]):
            client.delete(f"/sessions/{name}", cast_to=dict[str, Any])
        with pytest.raises(openai.NotFoundError):
            post(f"/{session}/fork", n=1)
        for response in (first, second, again):
            client.responses.delete(response.id)


def test_anthropic_messages_whole_and_streamed(served: Served) -> None:
    with served.anthropic() as client:
        greedy: dict[str, Any] = {
            "model": NAME,
            "max_tokens": 30,
            "messages": QUESTION,
            "extra_body": {"temperature": 0},
        }
        whole = client.messages.create(**greedy)
        assert [block.text for block in whole.content if block.type == "text"] == [PARIS]
        with client.messages.stream(**greedy) as stream:
            assert "".join(stream.text_stream) == PARIS
        counted = client.messages.count_tokens(model=NAME, messages=QUESTION)
        assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**greedy, "model": "claude"})


def test_anthropic_pins_a_prompt_for_an_hour(served: Served) -> None:
    system: Any = [
        {
            "type": "text",
            "text": "Answer in one short sentence. " * 40,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ]
    with served.anthropic() as client:
        first = client.messages.create(model=NAME, max_tokens=2, system=system, messages=QUESTION)
        created = first.usage.cache_creation
        assert created is not None and created.ephemeral_1h_input_tokens > 100
        assert first.usage.cache_creation_input_tokens == created.ephemeral_1h_input_tokens
        usage = (
            first.usage.input_tokens + created.ephemeral_1h_input_tokens + (first.usage.cache_read_input_tokens or 0)
        )
        counted = client.messages.count_tokens(model=NAME, system=system, messages=QUESTION)
        assert counted.input_tokens == usage
        (pool,) = served.kv.stats().pools
        assert pool.referenced >= created.ephemeral_1h_input_tokens // 16, "held after the end of the request"
        other: Any = [{"role": "user", "content": "And of Italy?"}]
        again = client.messages.create(model=NAME, max_tokens=2, system=system, messages=other)
        assert (again.usage.cache_read_input_tokens or 0) >= created.ephemeral_1h_input_tokens
        assert again.usage.cache_creation is not None and not again.usage.cache_creation.ephemeral_1h_input_tokens
    metrics = httpx.get(f"{served.url}/metrics", timeout=30).text
    assert 'kvforge_http_pins_total{outcome="pinned"} 2.0' in metrics


def test_the_conformance_prompts_through_http(served: Served) -> None:
    """All at once, whole and streamed: the tokens of transformers up to the first near tie."""
    steps = 8  # tests/integration/test_conformance.py has all of them without HTTP
    asked: dict[str, Any] = {
        "model": NAME,
        "prompt": [case["prompt_tokens"] for case in CASES],
        "max_tokens": steps,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "return_token_ids": True},
    }
    with served.openai(timeout=120) as client:
        whole = {
            choice.index: choice.model_dump()["token_ids"] for choice in client.completions.create(**asked).choices
        }
        streamed: dict[int, list[int]] = {at: [] for at in range(len(CASES))}
        for part in client.completions.create(**asked, stream=True):
            for choice in part.choices:
                streamed[choice.index] += choice.model_dump()["token_ids"]
    for at, case in enumerate(CASES):
        margins = enumerate(case["margin"][:steps])
        sure = next((i for i, margin in margins if margin < SAMPLE["min_margin"]), steps)
        for tokens in (whole[at], streamed[at]):
            assert len(tokens) == steps and tokens[:sure] == case["tokens"][:sure], case["id"]


def test_conversations_get_the_text_that_transformers_gives(served: Served) -> None:
    """All at once, whole and streamed, over both APIs: prompt and answer of transformers' template and tokenizer, up to
    the first near tie."""
    names = list(CHATS) if thinned(2) == 1 else ["system", "four-turns", "combining"]
    cases = [CHATS[name] for name in names]
    greedy: dict[str, Any] = {"model": NAME, "max_tokens": 48, "extra_body": {"temperature": 0}}

    async def answers(case: dict[str, Any]) -> list[tuple[str, str | None, int, int]]:
        """Return text, finish reason, and token counts of prompt and answer: whole, streamed, and as Anthropic's
        message."""
        chat = {**greedy, "messages": case["messages"]}
        one = await openai_client.chat.completions.create(**chat)
        assert one.usage is not None
        counts = one.usage.prompt_tokens, one.usage.completion_tokens
        found = [(one.choices[0].message.content or "", one.choices[0].finish_reason, *counts)]
        parts = [
            part
            async for part in await openai_client.chat.completions.create(
                **chat, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        why = next(part.choices[0].finish_reason for part in reversed(parts) if part.choices)
        assert parts[-1].usage is not None
        found.append((text, why, parts[-1].usage.prompt_tokens, parts[-1].usage.completion_tokens))
        first, *rest = case["messages"]
        if first["role"] == "system":
            if not first["content"]:
                return found  # there it equals none
            chat |= {"system": first["content"], "messages": rest}
        message = await anthropic_client.messages.create(**chat)
        text = "".join(block.text for block in message.content if block.type == "text")
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        ends = {"end_turn": "stop", "max_tokens": "length"}
        found.append((text, ends.get(message.stop_reason or ""), read, message.usage.output_tokens))
        return found

    async def main() -> list[list[tuple[str, str | None, int, int]]]:
        async with openai_client, anthropic_client:
            return await asyncio.gather(*map(answers, cases))

    http: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 240}
    openai_client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", **http)
    anthropic_client = anthropic.AsyncAnthropic(base_url=served.url, **http)
    for name, case, ways in zip(names, cases, asyncio.run(main()), strict=True):
        asked = httpx.post(f"{served.url}/tokenize", json={"model": NAME, "messages": case["messages"]}).json()
        assert asked["tokens"] == case["prompt_tokens"], name
        for text, why, read, written in ways:
            assert read == len(case["prompt_tokens"]), name
            if min(case["margin"]) >= SAMPLE["min_margin"]:
                assert (text, why, written) == (case["text"], case["finish_reason"], len(case["tokens"])), name


def test_structured_output_is_what_was_asked_for(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 99}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    shape: Any = {"type": "json_schema", "json_schema": {"name": "capital", "schema": schema, "strict": True}}

    async def main() -> list[Any]:
        """All at once: a step reads the weights once for all rows."""
        async with served.openai_async() as client:
            ask = partial(client.chat.completions.create, model=NAME, messages=QUESTION)
            shaped = [ask(response_format=shape, temperature=1.5, seed=seed, max_tokens=100) for seed in range(3)]
            choice = {"structured_outputs": {"choice": ["Rome", "Paris"]}}
            return await asyncio.gather(*shaped, ask(temperature=0, max_tokens=20, extra_body=choice))

    *answers, one = asyncio.run(main())
    assert len(answers) == 3
    for said in answers:
        assert said.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(said.choices[0].message.content or ""), schema)
    assert one.choices[0].message.content == "Paris"


def test_tools_with_both_clients(served: Served, tmp_path: Path) -> None:
    """A template with tools on a model that was not trained for them, so calls are forced."""
    template = Path(__file__).parent / "hermes.jinja"
    settings = f'names = ["{NAME}"]\nchat_template = "{template}"\n'
    city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
    with Gateway(served.cluster.runtime, tmp_path, settings) as gateway:
        tools = Served(served.cluster, gateway, served.kv)

        def asked(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
            weather = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
            return {"model": NAME, "messages": QUESTION, "tools": [weather], "temperature": 0, **more}

        closed = {**city, "additionalProperties": False}
        shape: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": closed}}
        forced = asked(city, tool_choice="required", parallel_tool_calls=False)
        beside = {"temperature": 1.5, "response_format": shape, "parallel_tool_calls": False, "max_tokens": 100}

        tool: Any = {"name": "weather", "input_schema": city}

        async def streamed(client: openai.AsyncOpenAI) -> Any:
            async with client.chat.completions.stream(**forced) as stream:
                return await stream.get_final_completion()

        async def main() -> list[Any]:
            """All at once: a step reads the weights once for all rows."""
            async with tools.openai_async() as client, tools.anthropic_async() as other:
                message = other.messages.create(
                    model=NAME,
                    max_tokens=200,
                    messages=QUESTION,
                    tools=[tool],
                    tool_choice={"type": "any", "disable_parallel_tool_use": True},
                    extra_body={"temperature": 0},
                )
                create = client.chat.completions.create
                together = [create(**asked(closed, **beside, seed=seed)) for seed in range(2)]
                return await asyncio.gather(create(**forced), streamed(client), message, *together)

        whole, final, message, *together = asyncio.run(main())
        (call,) = whole.choices[0].message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), city)
        assert whole.choices[0].finish_reason == "tool_calls"
        (same,) = final.choices[0].message.tool_calls
        assert same.function.arguments == call.function.arguments
        assert len(together) == 2
        for answer in together:  # together with tools: a call, or a text of that format
            assert answer.choices[0].finish_reason in ("stop", "tool_calls")
            reply = answer.choices[0].message
            texts = [called.function.arguments for called in reply.tool_calls or () if called.type == "function"]
            for text in texts or [reply.content or ""]:
                jsonschema.validate(json.loads(text), closed)
        (block,) = message.content
        assert block.type == "tool_use" and message.stop_reason == "tool_use"
        jsonschema.validate(block.input, city)
        with tools.openai() as client:
            said = whole.choices[0].message.model_dump(exclude_none=True)
            result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
            answered = client.chat.completions.create(
                **asked(city, tool_choice="none", max_tokens=5, extra_body={"messages": [*QUESTION, said, result]})
            )
            assert answered.choices[0].message.content


def test_two_hundred_streams_at_once(served: Served) -> None:
    tokens = 30 if thinned(3) == 1 else 3  # in `make test` the first tokens of each answer

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120),
        ) as client:

            async def one(at: int) -> str:
                stream = await client.chat.completions.create(
                    model=NAME, messages=QUESTION, temperature=0, max_tokens=tokens, stream=True, seed=at
                )
                return "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])

            return list(await asyncio.gather(*(one(at) for at in range(200))))

    assert asyncio.run(main()) == [PARIS if tokens == 30 else "The capital of"] * 200


def test_who_hangs_up_or_gives_up_waiting_ends_the_request(served: Served) -> None:
    before = served.kv.stats().requests
    with served.openai() as client:
        stream = client.chat.completions.create(
            model=NAME, messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    assert wait_for(lambda: served.kv.stats().requests.cancelled_total - before.cancelled_total, 1) == 1
    waits_s = 0.5
    while served.kv.stats().requests.accepted_total < before.accepted_total + 2:  # a busy gateway needs longer
        with served.openai(timeout=waits_s) as client, pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(
                model=NAME, messages=QUESTION, max_tokens=4000, extra_body={"ignore_eos": True}
            )
        waits_s *= 2

    def left() -> int:
        now = served.kv.stats().requests
        return now.accepted_total - before.accepted_total - (now.cancelled_total - before.cancelled_total)

    assert wait_for(left, 0) == 0, "all are cancelled"


def test_a_killed_gateway_loses_nothing_of_a_request_with_a_key(served: Served, tmp_path: Path) -> None:
    """Killed in the middle of a stream; its successor continues after the last received event."""
    asked = {"messages": QUESTION, "max_tokens": 64, "ignore_eos": True, "stream": True, "temperature": 0.8, "seed": 5}
    answers, undisturbed = f"{served.url}/v1/chat/completions", {"idempotency-key": "undisturbed"}
    apart = {**asked, "cache_salt": "apart"}  # otherwise its tokens would be drafts of the other's, soon at an end
    with (
        Gateway(served.cluster.runtime, tmp_path, f'names = ["{NAME}"]\n') as gateway,
        httpx.stream("POST", answers, json=apart, headers=undisturbed, timeout=60) as whole,  # at the same time
    ):
        last, text, killed = 0, "", False
        headers = {"idempotency-key": "killed"}
        with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=asked, headers=headers) as stream:
            try:
                for last, piece in numbered(stream.iter_lines()):
                    text += piece
                    if last >= 12 and not killed:
                        gateway.kill()
                        killed = True
            except httpx.RemoteProtocolError:
                pass
        assert 12 <= last < 64
        gateway.start(gateway.port)
        rest = httpx.post(
            f"{gateway.url}/v1/chat/completions",
            json=asked,
            headers={**headers, "last-event-id": str(last)},
            timeout=60,
        )
        text += "".join(piece for _, piece in numbered(rest.text.split("\n")))
        assert text == "".join(piece for _, piece in numbered(whole.iter_lines()))
        assert rest.headers["x-request-id"] == stream.headers["x-request-id"]


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the events of a stream: number of tokens so far, and text."""
    at = 0
    for line in lines:
        if line.startswith("id: "):
            at = int(line[4:])
        elif line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                yield at, choice["delta"].get("content") or ""


def wait_for(look: Any, wanted: int) -> int:
    """Return the value of `look` as soon as it is `wanted`, or after twenty seconds."""
    import select
    import time

    deadline = time.monotonic() + 20
    while (found := look()) != wanted and time.monotonic() < deadline:
        select.select([], [], [], 0.05)
    return int(found)
