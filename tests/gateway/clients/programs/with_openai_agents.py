"""openai-agents over both of OpenAI's APIs: whole and streamed, a tool, a handoff, a second turn, typed output."""

import asyncio
import json
import os
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

HELLO, RAIN, TOMORROW, CITY = "Say hello.", "Is it wet in Oslo?", "And tomorrow?", "Name a city."
PASS_ON = "Ask the colleague."
asked: list[str] = []


class City(BaseModel):
    """A city."""

    city: str
    people: int


@function_tool
def weather(city: str) -> str:
    """The weather."""
    asked.append(city)
    return "rain"


async def talk(model: Any) -> dict[str, Any]:
    """Run all cases with one model."""
    asked.clear()
    plain = Agent(name="plain", model=model, instructions="Be short.")
    agent = Agent(name="agent", model=model, instructions="Be short.", tools=[weather])
    whole = await Runner.run(plain, HELLO)
    streaming = Runner.run_streamed(plain, HELLO)
    text = ""
    async for event in streaming.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    called = await Runner.run(agent, RAIN)
    called_streamed = Runner.run_streamed(agent, RAIN)
    async for _ in called_streamed.stream_events():
        pass
    history = [*called.to_input_list(), {"role": "user", "content": TOMORROW}]
    following = await Runner.run(agent, history)
    colleague = Agent(name="colleague", model=model, instructions="Be short.")
    passed = await Runner.run(Agent(name="first", model=model, handoffs=[colleague]), PASS_ON)
    parsed = await Runner.run(Agent(name="parsing", model=model, output_type=City), CITY)
    return {
        "whole": whole.final_output,
        "tokens": whole.context_wrapper.usage.output_tokens > 0,
        "streamed": text,
        "tool": called.final_output,
        "toolStreamed": called_streamed.final_output,
        "next": following.final_output,
        "passed": [passed.final_output, passed.last_agent.name],
        "parsed": parsed.final_output.model_dump(),
        "asked": list(asked),
    }


async def stored(client: AsyncOpenAI) -> dict[str, Any]:
    """Run turns that name stored ones: by the response before, and in a session that the service keeps."""
    model = OpenAIResponsesModel("scripted", client)
    agent = Agent(name="agent", model=model, instructions="Be short.", tools=[weather])
    called = await Runner.run(agent, RAIN)
    following = await Runner.run(agent, TOMORROW, previous_response_id=called.last_response_id)
    session = OpenAIConversationsSession(openai_client=client)
    in_session = [(await Runner.run(agent, text, session=session)).final_output for text in (RAIN, TOMORROW)]
    kinds = [item.get("type", "message") for item in await session.get_items()]
    last = await session.pop_item()
    await session.clear_session()
    # A session of the service is a conversation too, which can be forked and taken back.
    tree = await client.post("/sessions", cast_to=dict[str, Any], body={"metadata": {"agent": "one"}})
    trunk = OpenAIConversationsSession(conversation_id=tree["id"], openai_client=client)
    await Runner.run(agent, RAIN, session=trunk)
    forks = await client.post(f"/sessions/{tree['id']}/fork", cast_to=dict[str, Any], body={"n": 1})
    branch = OpenAIConversationsSession(conversation_id=forks["data"][0]["id"], openai_client=client)
    forked = await Runner.run(agent, TOMORROW, session=branch)
    sizes = [len(await each.get_items()) for each in (trunk, branch)]
    rewound = await client.post(f"/sessions/{tree['id']}/rewind", cast_to=dict[str, Any], body={"item": ""})
    for each in (trunk, branch):
        await client.delete(f"/sessions/{await each._get_session_id()}", cast_to=dict[str, Any])
    background = await client.responses.create(model="scripted", input=HELLO, background=True)
    while background.status in ("queued", "in_progress"):
        background = await client.responses.retrieve(background.id)
    return {
        "following": following.final_output,
        "session": in_session,
        "kinds": kinds,
        "last": last["role"] if last else None,
        "forked": forked.final_output,
        "sizes": sizes,
        "removed": rewound["removed_items"],
        "background": background.output_text,
    }


async def main() -> None:
    """Both APIs."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{os.environ['URL']}/v1", api_key="none", max_retries=0)
    models = {
        "chat": OpenAIChatCompletionsModel("scripted", client),
        "responses": OpenAIResponsesModel("scripted", client),
    }
    found = {name: await talk(model) for name, model in models.items()}
    print(json.dumps({**found, "stored": await stored(client)}))


asyncio.run(main())
