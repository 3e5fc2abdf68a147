"""Fields of Anthropic's reference, its betas too, that no structure here reads.

Each is harmless with the values that ask for what happens anyway, and refused by its name with any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvforge.gateway.http.errors import ThreadsUnsupported
from kvforge.gateway.http.fields import Known, Mine, Table, left_out, no_effect, only

from . import asked

NOT_COUNTED = "it does not change the count"
_CREATE_ONLY = (
    *("container", "inference_geo", "max_tokens", "metadata", "service_tier", "stop_sequences", "stream"),
    *("temperature", "top_k", "top_p"),
)
_ELSEWHERE = {
    "input": "messages",
    "instructions": "system",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
# Fields of OpenAI's API and vLLM's, with the values that change nothing.
_OPENAI: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "seed": (),
    "structured_outputs": (),
}
_CONVERSATION: Mapping[str, Known] = {
    **{name: no_effect(NOT_COUNTED) for name in _CREATE_ONLY},
    "betas": no_effect("they name what a request may use, and everything that is served may be used"),
    "billing_policy": no_effect("nothing is billed here"),
    "compaction": only("a conversation is never shortened here: send a shorter one"),
    "diagnostics": no_effect("nothing more is known than what is answered"),
    "fallback_credit_token": no_effect("nothing is billed here"),
    "fallbacks": no_effect("there is one model"),
    "mcp_servers": left_out("tools of MCP servers are run by Anthropic itself", []),
    "speed": no_effect("there is one"),
    "thread": replace(only("conversations are not stored here: send all messages"), refusal=ThreadsUnsupported),
    "user_profile_id": no_effect("a label of the caller's own"),
    "workspace_id": no_effect("a label of the caller's own"),
}
_CREATE: Mapping[str, Known] = {
    **{name: only(f"is a field of another API: use {own}") for name, own in _ELSEWHERE.items()},
    **{name: only("is not read by this API: use /v1/chat/completions", *none) for name, none in _OPENAI.items()},
    "container": only("code is not run here"),
    "kv_transfer_params": only("KV caches are moved by the service itself"),
}
KNOWN: Table = {
    asked.Conversation: _CONVERSATION,
    asked.Create: _CREATE,
    asked.Message: {
        "output_config": only("holds for all of an answer: give it at the top", {}),
    },
    asked.OutputConfig: {
        "task_budget": no_effect("how long a model works is its own; max_tokens bounds it"),
    },
    asked.Thinking: {
        "block_binding": no_effect("thinking that is sent back is not verified"),
    },
    asked.Block: {
        "parsed_output": no_effect("Anthropic's SDK adds it to an answer"),
        "toolset_name": no_effect("tools are known by their own names"),
    },
    asked.Tool: {
        "allowed_callers": only("tools are called by the model alone", ["direct"]),
        "defer_loading": no_effect("all tools are offered from the beginning"),
    },
}


def is_custom(tool: Mapping[str, object]) -> bool:
    """Whether a tool is the caller's own; any other is left out by its type."""
    return tool.get("type") in (None, asked.CUSTOM)


MINE: Mine = {asked.Tool: is_custom}
