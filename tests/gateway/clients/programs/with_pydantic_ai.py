"""pydantic-ai over OpenAI's two APIs: whole and streamed, a tool, a second turn, typed output in each of its ways."""

import asyncio
import json
import os
from typing import Any

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

HELLO, RAIN, TOMORROW, CITY = "Say hello.", "Is it wet in Oslo?", "And tomorrow?", "Name a city."
CITY_BY_TOOL = "Name a city by a call."


class City(BaseModel):
    """A city."""

    city: str
    people: int


async def talk(model: Any) -> dict[str, Any]:
    """Run all cases with one model."""
    asked: list[str] = []
    agent = Agent(model, instructions="Be short.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather."""
        asked.append(city)
        return "rain"

    whole = await agent.run(HELLO)
    async with agent.run_stream(HELLO) as streaming:
        text = "".join([part async for part in streaming.stream_text(delta=True)])
    called = await agent.run(RAIN)
    async with agent.run_stream(RAIN) as streaming:
        called_streamed = await streaming.get_output()
    following = await agent.run(TOMORROW, message_history=called.all_messages())
    native = await Agent(model, output_type=NativeOutput(City)).run(CITY)
    prompted = await Agent(model, output_type=PromptedOutput(City)).run(CITY)
    by_tool = await Agent(model, output_type=ToolOutput(City, name="final")).run(CITY_BY_TOOL)
    return {
        "whole": whole.output,
        "tokens": whole.usage.output_tokens > 0,
        "streamed": text,
        "tool": called.output,
        "toolStreamed": called_streamed,
        "next": following.output,
        "parsed": native.output.model_dump(),
        "prompted": prompted.output.model_dump(),
        "byTool": by_tool.output.model_dump(),
        "asked": asked,
    }


async def main() -> None:
    """All APIs."""
    url = os.environ["URL"]
    openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    models = {
        "chat": OpenAIChatModel("scripted", provider=openai),
        "responses": OpenAIResponsesModel("scripted", provider=openai),
    }
    print(json.dumps({name: await talk(model) for name, model in models.items()}))


asyncio.run(main())
