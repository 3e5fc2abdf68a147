"""/tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvforge.client.arguments import token_array
from kvforge.gateway.generate.service import Model
from kvforge.gateway.http.body import decoded
from kvforge.gateway.http.fields import Reader
from kvforge.gateway.http.ignored import Ignored
from kvforge.protocol.errors import InvalidRequest

from .chat import messages_of, tools_of
from .request_body import Message, Tool
from .unimplemented_fields import READ_IF, UNIMPLEMENTED


class Tokenize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a text or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str = ""


TOKENIZE, DETOKENIZE = Reader(Tokenize, UNIMPLEMENTED, READ_IF), Reader(Detokenize)


async def tokenize(model: Model, content: bytes, ignored: Ignored) -> dict[str, Any]:
    """Return the token ids of a prompt.

    Raises:
        InvalidRequest: Names the field.
    """
    asked = decoded(TOKENIZE, content, ignored)
    _check_model(model, asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidRequest("prompt", "give exactly one of prompt and messages")
    if asked.prompt is not None:
        ids = (await model.prompts.text(asked.prompt, special=asked.add_special_tokens)).tolist()
    else:
        tools = [tool.plain() for tool in tools_of(asked.tools or (), ignored)]
        variables = {**(asked.chat_template_kwargs or {})}
        messages = messages_of(asked.messages or [], asked.model)
        rendered = await model.prompts.chat(
            messages,
            tools=tools,
            continued=asked.continue_final_message,
            opened=asked.add_generation_prompt,
            variables=variables,
        )
        ids = rendered.ids.tolist()
    names = [model.prompts.name_of(token) for token in ids] if asked.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": model.info.context_tokens_max,
        "tokens": ids,
        "token_strs": names,
    }


async def detokenize(model: Model, content: bytes, ignored: Ignored) -> dict[str, Any]:
    """Return the text of token ids.

    Raises:
        InvalidRequest: Names the field.
    """
    asked = decoded(DETOKENIZE, content, ignored)
    _check_model(model, asked.model)
    ids = token_array("tokens", asked.tokens, empty=True)
    vocabulary = model.info.vocab_size
    if (outside := np.flatnonzero(ids >= vocabulary)).size:
        at = int(outside[0])
        raise InvalidRequest(f"tokens[{at}]", f"is {ids[at]}; token ids are 0 to {vocabulary - 1}")
    return {"prompt": await model.prompts.decode(ids)}


def _check_model(model: Model, name: str) -> None:
    if name:
        model.check(name)
