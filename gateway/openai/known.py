"""Fields of OpenAI's references, and of vLLM's, SGLang's and llama.cpp's servers, that no structure here reads.

Each is harmless with the values that ask for what happens anyway, and refused by its name with any other.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvforge.gateway.http.fields import Known, Mine, Table, left_out, no_effect, only

from . import asked, responses_asked
from .fields import Common, StreamOptions
from .shapes import JsonSchema, StructuredOutputs

LOGPROBS_OF_PROMPT = "log-probabilities of a prompt are not kept"
MEDIA = "this service reads text alone"
ELSEWHERE = "KV caches are moved by the service itself"
BY_SDK = "OpenAI's SDK adds it to an answer"
BEAMS = "there is no beam search"


def _elsewhere(**names: str) -> Mapping[str, Known]:
    """Fields of other APIs, each with the one that this API has for it."""
    return {name: only(f"is a field of another API: use {own}") for name, own in names.items()}


_OPENAI: Mapping[str, Known] = {
    "store": left_out("answers are not stored here, and can not be asked for by their ids", False),
    "moderation": only("nothing is moderated here"),
    "prompt_cache_options": no_effect("prefixes are found by what they hold, wherever they come from"),
    "verbosity": no_effect("it is not given to the model"),
}
_VLLM: Mapping[str, Known] = {
    "allowed_token_ids": only("is not supported: use structured_outputs, or logit_bias"),
    "bad_words": only("is not supported: use logit_bias", []),
    "early_stopping": only(BEAMS, False),
    "guided_decoding_backend": no_effect("there is one"),
    "guided_whitespace_pattern": only("white space of JSON is chosen here"),
    "include_stop_str_in_output": only("a stop string is never part of the answer", False),
    "kv_transfer_params": only(ELSEWHERE),
    "length_penalty": no_effect(BEAMS),
    "logits_processors": only("no code of a request is run", []),
    "logprob_token_ids": only("is not supported: use top_logprobs", []),
    "media_io_kwargs": no_effect(MEDIA),
    "min_tokens": only("is not supported: use ignore_eos with max_tokens, or structured_outputs", 0),
    "mm_processor_kwargs": no_effect(MEDIA),
    "prompt_embeds": only("prompts are texts or token ids"),
    "prompt_logprobs": only(LOGPROBS_OF_PROMPT),
    "repetition_detection": only("is not supported: use max_tokens, or repetition_penalty"),
    "request_id": no_effect("a label of the caller's own; the answer's header x-request-id has the service's"),
    "return_tokens_as_token_ids": only("is not supported: use return_token_ids", False),
    "structural_tag": only("is not supported: use tools, or structured_outputs"),
    "thinking_token_budget": only("how long a model thinks is its own; max_tokens bounds it"),
    "truncate_prompt_tokens": only("a prompt is never cut: shorten it"),
    "truncation_side": no_effect("a prompt is never cut"),
    "use_beam_search": only(BEAMS, False),
    "vllm_xargs": only("there are no extensions", {}),
}
_SGLANG: Mapping[str, Known] = {
    "bootstrap_host": only(ELSEWHERE),
    "bootstrap_port": only(ELSEWHERE),
    "bootstrap_room": only(ELSEWHERE),
    "custom_logit_processor": only("no code of a request is run"),
    "custom_params": only("no code of a request is run", {}),
    "data_parallel_rank": no_effect("where a request runs is chosen here"),
    "extra_key": only("is not supported: use cache_salt"),
    "ebnf": only("is not supported: use structured_outputs.grammar, in Lark"),
    "lora_path": only("there is one model: name it in `model`"),
    "no_stop_trim": only("a stop string is never part of the answer", False),
    "return_cached_tokens_details": no_effect("usage has what came from the cache"),
    "return_meta_info": only("is not supported: use logprobs and usage", False),
    "return_routed_experts": only("is not given out", False),
    "return_hidden_states": only("hidden states are not given out", False),
    "rid": no_effect("a label of the caller's own; the answer's header x-request-id has the service's"),
    "session_params": only("is not supported: send the conversation so far", {}),
    "stop_regex": only("is not supported: use stop", []),
}
_SETTINGS_OF_SAMPLERS = (
    *("dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
    *("mirostat_eta", "mirostat_tau", "repeat_last_n", "xtc_threshold"),
)
_LLAMA_CPP: Mapping[str, Known] = {
    "cache_prompt": no_effect("prefixes are always looked for"),
    "dry_multiplier": only("is not supported: use repetition_penalty", 0),
    "dynatemp_range": only("is not supported: use temperature", 0),
    "grammar": only("is not supported: use structured_outputs.grammar, in Lark", ""),
    **{name: no_effect("it belongs to a sampler that is not supported") for name in _SETTINGS_OF_SAMPLERS},
    "lora": only("there is one model: name it in `model`", []),
    "n_probs": only("is not supported: use logprobs", 0),
    "samplers": only("the order of samplers is fixed", []),
    "typ_p": only("is not supported: use top_p", 1),
    "id_slot": no_effect("where a request runs is chosen here"),
    "mirostat": only("is not supported: use temperature and top_p", 0),
    "n_predict": only("is not supported: use max_tokens", -1),
    "repeat_penalty": only("is not supported: use repetition_penalty", 1),
    "tfs_z": only("is not supported: use top_p", 1),
    "top_a": only("is not supported: use min_p", 0),
    "typical_p": only("is not supported: use top_p", 1),
    "xtc_probability": only("is not supported: use min_p", 0),
}
OLDER = "is the older form of tools: use `tools` and `tool_choice`"
_CHAT: Mapping[str, Known] = {
    **_elsewhere(input="messages", max_output_tokens="max_completion_tokens", prompt="messages"),
    **_elsewhere(stop_sequences="stop", system="messages", instructions="messages"),
    "audio": only(MEDIA),
    "best_of": only("is not supported: use n", 1),
    "chat_template": only("the template is the model's own, or chat_template in gateway.toml"),
    "documents": only("are not supported: put them into a message", []),
    "echo": only("is not supported: the conversation is the caller's own", False),
    "function_call": only(OLDER, "none", "auto"),
    "functions": only(OLDER, []),
    "modalities": only(MEDIA, ["text"], []),
    "prediction": no_effect("it makes an answer come sooner, and no other"),
    "return_prompt_text": only("is not supported: use /tokenize", False),
    "separate_reasoning": only("reasoning is always given by itself", True),
    "stream_reasoning": only("reasoning is always streamed", True),
    "web_search_options": left_out("a search of the web is run by OpenAI itself"),
}
_COMPLETION: Mapping[str, Known] = {
    **_elsewhere(input="prompt", max_completion_tokens="max_tokens", max_output_tokens="max_tokens"),
    **_elsewhere(messages="prompt, or /v1/chat/completions", stop_sequences="stop"),
    "chat_template_kwargs": no_effect("a text is not put into a chat template"),
    "suffix_tokens": only("the model continues a prompt, it does not fill gaps"),
    "prediction": no_effect("it makes an answer come sooner, and no other"),
}
_RESPONSE: Mapping[str, Known] = {
    **_elsewhere(max_completion_tokens="max_output_tokens", max_tokens="max_output_tokens", messages="input"),
    **_elsewhere(reasoning_effort="reasoning.effort", response_format="text.format", system="instructions"),
    **_OPENAI,
    **{name: _VLLM[name] for name in _VLLM if not name.startswith("guided_")},
    "client_metadata": no_effect("a label of the caller's own"),
    "context_management": only("a conversation is never shortened here: send a shorter `input`", []),
    "conversation": only("conversations are not stored here: send the conversation so far as `input`"),
    "enable_response_messages": only("is not supported: use /tokenize", False),
    "frequency_penalty": only("is not read by this API: use /v1/chat/completions", 0),
    "ignore_eos": only("is not read by this API: use /v1/chat/completions", False),
    "logit_bias": only("is not read by this API: use /v1/chat/completions", {}),
    "max_tool_calls": no_effect("it bounds calls of tools that OpenAI runs itself, and there are none"),
    "presence_penalty": only("is not read by this API: use /v1/chat/completions", 0),
    "previous_input_messages": only("are not stored here: send the conversation so far as `input`", []),
    "prompt": only("prompt templates are not stored here: send `instructions` and `input`"),
    "skip_special_tokens": only("special tokens are never text", True),
    "stop": only("is not read by this API: use /v1/chat/completions", [], ""),
    "top_logprobs": only("is not supported here: use /v1/chat/completions", 0),
}
KNOWN: Table = {
    Common: {**_OPENAI, **_VLLM, **_SGLANG, **_LLAMA_CPP},
    asked.Completion: _COMPLETION,
    asked.Chat: _CHAT,
    responses_asked.Create: _RESPONSE,
    StreamOptions: {},
    JsonSchema: {},
    StructuredOutputs: {
        "disable_additional_properties": only("write additionalProperties into the schema", False),
        "disable_any_whitespace": only("white space of JSON is chosen here", False),
        "disable_fallback": no_effect("there is one backend"),
        "structural_tag": only("is not supported: use tools, or grammar"),
        "whitespace_pattern": only("white space of JSON is chosen here"),
    },
    asked.CalledFunction: {
        "parsed_arguments": no_effect(BY_SDK),
    },
    asked.Message: {
        "parsed": no_effect(BY_SDK),
        "function_call": only(OLDER),
        "audio": only(MEDIA),
    },
    asked.Part: {
        "annotations": no_effect("the text alone is given to the model"),
        "logprobs": no_effect("the text alone is given to the model"),
        "parsed": no_effect(BY_SDK),
        "prompt_cache_breakpoint": no_effect("prefixes are found by what they hold, wherever they end"),
    },
    responses_asked.Item: {
        "caller": no_effect("calls come from the model alone"),
        "created_by": no_effect("a label of the caller's own"),
        "parsed_arguments": no_effect(BY_SDK),
        "prompt_cache_breakpoint": no_effect("prefixes are found by what they hold, wherever they end"),
    },
    responses_asked.FunctionTool: {
        "allowed_callers": only("tools are called by the model alone", ["direct"]),
        "defer_loading": no_effect("all tools are offered from the beginning"),
        "output_schema": no_effect("it is not given to the model"),
    },
    responses_asked.Text: {},
    responses_asked.TextFormat: {},
    responses_asked.Reasoning: {
        "context": only("reasoning that is sent is given to the chat template", "auto"),
        "generate_summary": no_effect("reasoning is given as it is"),
        "mode": only("there is one", "standard"),
    },
}
FUNCTION_TYPES = (None, "function")


def is_function(tool: Mapping[str, object]) -> bool:
    """Return whether the fields of a tool are read; other tools are left out or refused by their type."""
    return tool.get("type") in (*FUNCTION_TYPES, "namespace")


MINE: Mine = {asked.Tool: is_function, responses_asked.FunctionTool: is_function}
