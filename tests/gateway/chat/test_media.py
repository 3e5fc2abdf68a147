"""Content that is not text is refused by a sentence that names the model, in every API."""

from __future__ import annotations

import msgspec
import pytest

from kvforge.gateway.anthropic.conversation import messages_of as anthropic_messages
from kvforge.gateway.anthropic.request_body import Conversation
from kvforge.gateway.openai.chat import messages_of as chat_messages
from kvforge.gateway.openai.request_body import Chat
from kvforge.gateway.openai.responses_body import Create
from kvforge.gateway.openai.responses_body import messages_of as response_messages
from kvforge.protocol.errors import InvalidRequest

WORDS = {"type": "text", "text": "see"}


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_chat(kind: str) -> None:
    content = [WORDS, {"type": kind, kind: {"url": "x"}}]
    asked = msgspec.convert({"model": "org/vision", "messages": [{"role": "user", "content": content}]}, Chat)
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(asked.messages, asked.model)
    assert str(caught.value) == f"messages[0].content[1].type: is {kind!r}; the model 'org/vision' reads text only"


def test_responses() -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    asked = msgspec.convert({"model": "org/vision", "input": [{"role": "user", "content": content}]}, Create)
    with pytest.raises(InvalidRequest, match=r"'input_image'; the model 'org/vision' reads text only"):
        response_messages(asked, lambda _namespace, name: name)


@pytest.mark.parametrize("within", ["message", "result"])
@pytest.mark.parametrize("kind", ["image", "document"])
def test_anthropic(kind: str, within: str) -> None:
    part = {"type": kind, "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [part]}
    content = [part if within == "message" else result]
    asked = msgspec.convert({"model": "org/vision", "messages": [{"role": "user", "content": content}]}, Conversation)
    with pytest.raises(InvalidRequest, match=f"'{kind}'; the model 'org/vision' reads text only"):
        anthropic_messages(asked)
