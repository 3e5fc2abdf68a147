"""Fields of Anthropic's reference, betas included, that no structure here has.

A value that matches the default behaviour is accepted; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvforge.gateway.http.errors import ThreadsUnsupported
from kvforge.gateway.http.fields import ReadPredicates, Table, UnimplementedField, left_out, no_effect, only

from . import request_body

NOT_COUNTED = "does not change the count"
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
# Fields of OpenAI's and vLLM's APIs, with their values without effect.
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
_CONVERSATION: Mapping[str, UnimplementedField] = {
    **{name: no_effect(NOT_COUNTED) for name in _CREATE_ONLY},
    "betas": no_effect("everything that is served may be used without a beta flag"),
    "billing_policy": no_effect("there is no billing"),
    "compaction": only("conversations are never shortened: send a shorter one"),
    "diagnostics": no_effect("no further data exists"),
    "fallback_credit_token": no_effect("there is no billing"),
    "fallbacks": no_effect("there is only one model"),
    "mcp_servers": left_out("only Anthropic runs tools of MCP servers", []),
    "speed": no_effect("there is only one speed"),
    "thread": replace(only("conversations are not stored: send all messages"), refusal=ThreadsUnsupported),
    "user_profile_id": no_effect("a label for the caller"),
    "workspace_id": no_effect("a label for the caller"),
}
_CREATE: Mapping[str, UnimplementedField] = {
    **{name: only(f"belongs to another API: use {own}") for name, own in _ELSEWHERE.items()},
    **{name: only("is not supported by this API: use /v1/chat/completions", *none) for name, none in _OPENAI.items()},
    "container": only("there is no code execution"),
    "kv_transfer_params": only("the service moves KV caches itself"),
}
UNIMPLEMENTED: Table = {
    request_body.Conversation: _CONVERSATION,
    request_body.Create: _CREATE,
    request_body.Message: {
        "output_config": only("applies to the whole answer: set it at the top level", {}),
    },
    request_body.OutputConfig: {
        "task_budget": no_effect("a task has no budget of its own; max_tokens bounds it"),
    },
    request_body.Thinking: {
        "block_binding": no_effect("returned thinking is not verified"),
    },
    request_body.Block: {
        "parsed_output": no_effect("added by Anthropic's SDK to an answer"),
        "toolset_name": no_effect("tools are identified by their names"),
    },
    request_body.Tool: {
        "allowed_callers": only("only the model calls tools", ["direct"]),
        "defer_loading": no_effect("all tools are offered from the start"),
    },
}


def is_custom(tool: Mapping[str, object]) -> bool:
    """Return whether a tool is the caller's own; others are ignored by their type."""
    return tool.get("type") in (None, request_body.CUSTOM)


READ_IF: ReadPredicates = {request_body.Tool: is_custom}
