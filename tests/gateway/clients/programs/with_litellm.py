"""litellm over the APIs of OpenAI and Anthropic: whole and streamed."""

import json
import os

import litellm

litellm.telemetry = False
URL, HELLO = os.environ["URL"], "Say hello."
BASE = {"messages": [{"role": "user", "content": HELLO}], "temperature": 0, "max_tokens": 30, "api_key": "none"}
openai = {"model": "openai/scripted", "api_base": f"{URL}/v1", **BASE}
anthropic = {"model": "anthropic/scripted", "api_base": URL, **BASE}
whole = litellm.completion(**openai)
parts = litellm.completion(**openai, stream=True)
streamed = "".join(part.choices[0].delta.content or "" for part in parts)
message = litellm.completion(**anthropic)
print(json.dumps([whole.choices[0].message.content, streamed, message.choices[0].message.content]))
