"""Fields of the references of OpenAI, vLLM, SGLang and llama.cpp that no structure here has.

A value that matches the default behaviour is accepted; any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvforge.gateway.http.fields import ReadPredicates, Table, UnimplementedField, left_out, no_effect, only

from . import request_body, responses_body
from .fields import Common, StreamOptions
from .shapes import JsonSchema, StructuredOutputs

MEDIA = "this service reads text only"
ELSEWHERE = "the service moves KV caches itself"
BY_SDK = "added by OpenAI's SDK to an answer"
BEAMS = "beam search is not supported"


def _elsewhere(**names: str) -> Mapping[str, UnimplementedField]:
    """Return fields of other APIs, each with the name that this API has for it."""
    return {name: only(f"belongs to another API: use {own}") for name, own in names.items()}


_OPENAI: Mapping[str, UnimplementedField] = {
    "store": left_out("only responses of /v1/responses are stored", False),
    "moderation": only("there is no moderation"),
    "prompt_cache_options": no_effect("prefix caching is automatic and based on content"),
    "verbosity": no_effect("not given to the model"),
}
_VLLM: Mapping[str, UnimplementedField] = {
    "allowed_token_ids": only("is not supported: use structured_outputs, or logit_bias"),
    "bad_words": only("is not supported: use logit_bias", []),
    "early_stopping": only(BEAMS, False),
    "guided_decoding_backend": no_effect("there is only one backend"),
    "guided_whitespace_pattern": only("the white space of JSON is fixed"),
    "include_stop_str_in_output": only("the answer never includes a stop string", False),
    "kv_transfer_params": only(ELSEWHERE),
    "length_penalty": no_effect(BEAMS),
    "logits_processors": only("code in requests is never run", []),
    "logprob_token_ids": only("is not supported: use top_logprobs", []),
    "media_io_kwargs": no_effect(MEDIA),
    "min_tokens": only("is not supported: use ignore_eos with max_tokens, or structured_outputs", 0),
    "mm_processor_kwargs": no_effect(MEDIA),
    "prompt_embeds": only("prompts must be text or token ids"),
    "repetition_detection": only("is not supported: use max_tokens, or repetition_penalty"),
    "request_id": no_effect("a label for the caller; the response header x-request-id has the service's id"),
    "return_tokens_as_token_ids": only("is not supported: use return_token_ids", False),
    "structural_tag": only("is not supported: use tools, or structured_outputs"),
    "thinking_token_budget": only("thinking has no budget of its own; max_tokens bounds it"),
    "truncate_prompt_tokens": only("prompts are never truncated: shorten it"),
    "truncation_side": no_effect("prompts are never truncated"),
    "use_beam_search": only(BEAMS, False),
    "vllm_xargs": only("no extensions exist", {}),
}
_SGLANG: Mapping[str, UnimplementedField] = {
    "bootstrap_host": only(ELSEWHERE),
    "bootstrap_port": only(ELSEWHERE),
    "bootstrap_room": only(ELSEWHERE),
    "custom_logit_processor": only("code in requests is never run"),
    "custom_params": only("code in requests is never run", {}),
    "data_parallel_rank": no_effect("the router chooses where a request runs"),
    "extra_key": only("is not supported: use cache_salt"),
    "ebnf": only("is not supported: use structured_outputs.grammar, in Lark"),
    "lora_path": only("there is only one model: name it in `model`"),
    "no_stop_trim": only("the answer never includes a stop string", False),
    "return_cached_tokens_details": no_effect("usage has the cached tokens"),
    "return_meta_info": only("is not supported: use logprobs and usage", False),
    "return_routed_experts": only("is not available", False),
    "return_hidden_states": only("hidden states are not available", False),
    "rid": no_effect("a label for the caller; the response header x-request-id has the service's id"),
    "session_params": only("is not supported: send the conversation so far", {}),
    "stop_regex": only("is not supported: use stop", []),
}
_SETTINGS_OF_SAMPLERS = (
    *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("mirostat_eta", "mirostat_tau", "repeat_last_n", "xtc_threshold"),
)
_LLAMA_CPP: Mapping[str, UnimplementedField] = {
    "cache_prompt": no_effect("prefix caching is always on"),
    "dry_multiplier": only("is not supported: use repetition_penalty", 0),
    "dynatemp_range": only("is not supported: use temperature", 0),
    "grammar": only("is not supported: use structured_outputs.grammar, in Lark", ""),
    **{name: no_effect("parameter of an unsupported sampler") for name in _SETTINGS_OF_SAMPLERS},
    "lora": only("there is only one model: name it in `model`", []),
    "n_probs": only("is not supported: use logprobs", 0),
    "samplers": only("the order of samplers is fixed", []),
    "typ_p": only("is not supported: use top_p", 1),
    "id_slot": no_effect("the router chooses where a request runs"),
    "mirostat": only("is not supported: use temperature and top_p", 0),
    "n_predict": only("is not supported: use max_tokens", -1),
    "repeat_penalty": only("is not supported: use repetition_penalty", 1),
    "tfs_z": only("is not supported: use top_p", 1),
    "top_a": only("is not supported: use min_p", 0),
    "typical_p": only("is not supported: use top_p", 1),
    "xtc_probability": only("is not supported: use min_p", 0),
}
OLDER = "is deprecated: use `tools` and `tool_choice`"
_CHAT: Mapping[str, UnimplementedField] = {
    **_elsewhere(input="messages", max_output_tokens="max_completion_tokens", prompt="messages"),
    **_elsewhere(stop_sequences="stop", system="messages", instructions="messages"),
    "audio": only(MEDIA),
    "best_of": only("is not supported: use n", 1),
    "chat_template": only("the template is set by the model or chat_template in gateway.toml"),
    "documents": only("are not supported: include them in a message", []),
    "echo": only("is not supported: the client has the conversation", False),
    "function_call": only(OLDER, "none", "auto"),
    "functions": only(OLDER, []),
    "modalities": only(MEDIA, ["text"], []),
    "prediction": no_effect("a prediction can only speed up an answer"),
    "return_prompt_text": only("is not supported: use /tokenize", False),
    "separate_reasoning": only("reasoning is always returned separately", True),
    "stream_reasoning": only("reasoning is always streamed", True),
    "web_search_options": left_out("only OpenAI runs web searches"),
}
_COMPLETION: Mapping[str, UnimplementedField] = {
    **_elsewhere(input="prompt", max_completion_tokens="max_tokens", max_output_tokens="max_tokens"),
    **_elsewhere(messages="prompt, or /v1/chat/completions", stop_sequences="stop"),
    "chat_template_kwargs": no_effect("completions use no chat template"),
    "suffix_tokens": only("the model only continues a prompt"),
    "prediction": no_effect("a prediction can only speed up an answer"),
}
_RESPONSE: Mapping[str, UnimplementedField] = {
    **_elsewhere(max_completion_tokens="max_output_tokens", max_tokens="max_output_tokens", messages="input"),
    **_elsewhere(reasoning_effort="reasoning.effort", response_format="text.format", system="instructions"),
    **{name: _OPENAI[name] for name in _OPENAI if name != "store"},
    **{name: _VLLM[name] for name in _VLLM if not name.startswith("guided_")},
    "client_metadata": no_effect("a label for the caller"),
    "context_management": only("conversations are never shortened: send a shorter `input`", []),
    "enable_response_messages": only("is not supported: use /tokenize", False),
    "frequency_penalty": only("is not supported by this API: use /v1/chat/completions", 0),
    "ignore_eos": only("is not supported by this API: use /v1/chat/completions", False),
    "logit_bias": only("is not supported by this API: use /v1/chat/completions", {}),
    "max_tool_calls": no_effect("it limits built-in tools of OpenAI, and there are none"),
    "prompt_logprobs": only("is not supported by this API: use /v1/chat/completions"),
    "presence_penalty": only("is not supported by this API: use /v1/chat/completions", 0),
    "previous_input_messages": only("are not stored: send the conversation so far as `input`", []),
    "prompt": only("prompt templates are not stored: send `instructions` and `input`"),
    "skip_special_tokens": only("special tokens never appear in text", True),
    "stop": only("is not supported by this API: use /v1/chat/completions", [], ""),
    "top_logprobs": only("is not supported here: use /v1/chat/completions", 0),
}
UNIMPLEMENTED: Table = {
    Common: {**_OPENAI, **_VLLM, **_SGLANG, **_LLAMA_CPP},
    request_body.Completion: _COMPLETION,
    request_body.Chat: _CHAT,
    responses_body.Create: _RESPONSE,
    StreamOptions: {},
    JsonSchema: {},
    StructuredOutputs: {
        "disable_additional_properties": only("write additionalProperties into the schema", False),
        "disable_any_whitespace": only("the white space of JSON is fixed", False),
        "disable_fallback": no_effect("there is only one backend"),
        "structural_tag": only("is not supported: use tools, or grammar"),
        "whitespace_pattern": only("the white space of JSON is fixed"),
    },
    request_body.CalledFunction: {
        "parsed_arguments": no_effect(BY_SDK),
    },
    request_body.Message: {
        "parsed": no_effect(BY_SDK),
        "function_call": only(OLDER),
        "audio": only(MEDIA),
    },
    request_body.Part: {
        "annotations": no_effect("only the text reaches the model"),
        "logprobs": no_effect("only the text reaches the model"),
        "parsed": no_effect(BY_SDK),
        "prompt_cache_breakpoint": no_effect("prefix caching is automatic and based on content"),
    },
    responses_body.Item: {
        "caller": no_effect("only the model makes calls"),
        "created_by": no_effect("a label for the caller"),
        "parsed_arguments": no_effect(BY_SDK),
        "prompt_cache_breakpoint": no_effect("prefix caching is automatic and based on content"),
    },
    responses_body.FunctionTool: {
        "allowed_callers": only("only the model calls tools", ["direct"]),
        "defer_loading": no_effect("all tools are offered from the start"),
        "output_schema": no_effect("not given to the model"),
    },
    responses_body.Text: {},
    responses_body.TextFormat: {},
    responses_body.Reasoning: {
        "context": only("returned reasoning is always given to the chat template", "auto"),
        "generate_summary": no_effect("reasoning is always returned in full"),
        "mode": only("there is only one mode", "standard"),
    },
}
FUNCTION_TYPES = (None, "function")


def is_function(tool: Mapping[str, object]) -> bool:
    """Return whether a tool is read; other tools are ignored or refused by their type."""
    return tool.get("type") in (*FUNCTION_TYPES, "namespace")


READ_IF: ReadPredicates = {request_body.Tool: is_function, responses_body.FunctionTool: is_function}
