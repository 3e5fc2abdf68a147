"""smolagents: an agent that calls tools, one that writes code, and a streamed answer."""

import json
import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

RAIN, TOMORROW, SUM, HELLO = "Is it wet in Oslo?", "And tomorrow?", "Add two and three.", "Say hello."
asked: list[str] = []


@tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    asked.append(city)
    return "rain"


def model() -> OpenAIServerModel:
    """The client's own."""
    return OpenAIServerModel(model_id="scripted", api_base=f"{os.environ['URL']}/v1", api_key="none")


agent = ToolCallingAgent(tools=[weather], model=model(), verbosity_level=0, max_steps=4)
streaming = ToolCallingAgent(tools=[weather], model=model(), verbosity_level=0, max_steps=4, stream_outputs=True)
code = CodeAgent(tools=[], model=model(), verbosity_level=0, max_steps=2)
found = {
    "tool": agent.run(RAIN),
    "next": agent.run(TOMORROW, reset=False),
    "toolStreamed": streaming.run(RAIN),
    "code": code.run(SUM),
    "streamed": "".join(
        part.content or ""
        for part in model().generate_stream([{"role": "user", "content": [{"type": "text", "text": HELLO}]}])
    ),
    "asked": asked,
}
print()  # a streaming agent prints, and leaves its line open
print(json.dumps(found))
