"""LangChain for Python over OpenAI's API: whole and streamed."""

import json
import os

from langchain_openai import ChatOpenAI

HELLO = "Say hello."
model = ChatOpenAI(model="scripted", base_url=f"{os.environ['URL']}/v1", api_key="none", temperature=0, max_tokens=30)
print(json.dumps([model.invoke(HELLO).content, "".join(part.content for part in model.stream(HELLO))]))
