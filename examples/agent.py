"""Agents on asyncio that call tools; a JSON schema enforces the shape of every call.

    kvforge up --model smollm2-135m
    python examples/agent.py "How much is 17 times 23?" "How many letters has the word banana?"

All questions are worked on at once. The system prompt is computed once: later prompts find it in the prefix cache.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvforge import AsyncClient, SamplingParams

STEPS = 4
SYSTEM = """Reply with one JSON object: {"tool": "multiply", "a": 2, "b": 3} to calculate,
{"tool": "letters", "word": "tree"} to count letters, {"tool": "answer", "text": "..."} to finish."""
NUMBER = {"type": "integer", "minimum": 0, "maximum": 1000}
TEXT = {"type": "string", "maxLength": 40}
TOOLS = {"multiply": {"a": NUMBER, "b": NUMBER}, "letters": {"word": TEXT}, "answer": {"text": TEXT}}


def call_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a call of one tool."""
    properties = {"tool": {"const": name}, **arguments}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


CALL = {"anyOf": [call_of(*tool) for tool in TOOLS.items()]}


async def work(kv: AsyncClient, question: str) -> str:
    """Let the model call tools until it answers."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(STEPS):
        completion = await kv.generate(messages, max_tokens=200, sampling=SamplingParams(json_schema=CALL))
        call: dict[str, Any] = json.loads(completion.text)
        if call["tool"] == "answer":
            return str(call["text"])
        result = call["a"] * call["b"] if call["tool"] == "multiply" else len(call["word"])
        print(f"{question} -> {call} = {result}")
        messages.append({"role": "assistant", "content": completion.text})
        messages.append({"role": "user", "content": f"Result: {result}"})
    return f"no answer within {STEPS} steps"


async def main() -> None:
    """Work on all questions at once, and print the answers."""
    questions = sys.argv[1:] or ["How much is 17 times 23?", "How many letters has banana?"]
    async with AsyncClient() as kv:
        await kv.wait_ready(timeout_s=120)
        answers = await asyncio.gather(*(work(kv, question) for question in questions))
    print(*(f"{question} => {answer}" for question, answer in zip(questions, answers, strict=True)), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
