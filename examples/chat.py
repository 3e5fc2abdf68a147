"""A conversation over HTTP with OpenAI's client, streamed.

    kvforge up --model smollm2-135m --http 8000
    python examples/chat.py                         # or: echo "Why is the sky blue?" | python examples/chat.py

Every line of standard input is the user's next message. The service finds the earlier messages in its prefix cache.
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    """Read questions and print the answers as they arrive."""
    parser = argparse.ArgumentParser(description="Talk to a model over HTTP.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    client = OpenAI(base_url=options.url, api_key=options.api_key)
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = []
    for question in sys.stdin:
        messages.append({"role": "user", "content": question.strip()})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=options.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer = ""
        for chunk in stream:
            for choice in chunk.choices:
                piece = choice.delta.content or ""
                answer += piece
                print(piece, end="", flush=True)
            if chunk.usage and chunk.usage.prompt_tokens_details:
                cached = chunk.usage.prompt_tokens_details.cached_tokens
                print(f"\n[{cached} of {chunk.usage.prompt_tokens} prompt tokens were cached]")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
