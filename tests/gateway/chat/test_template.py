"""Chat templates of every kind: each word of a conversation reaches the prompt, or the request is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvforge.gateway.chat.template import nine
from tests.gateway.scripted import Script, application, ask, prompt_text

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
OSLO, ROME = "call_AbCdEfGhIjKlMnOpQrStUvWx", "call-chatcmpl-0000000000000001-0-0"


def called(id_: str, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    return {"id": id_, "type": "function", "function": function}


def conversation(*, content: str | None = None, calls: int = 2, system: bool = True) -> list[dict[str, Any]]:
    ids = ((OSLO, "Oslo", "rain"), (ROME, "Rome", "sun"))[:calls]
    return [
        *([{"role": "system", "content": "SYSTEMWORD"}] if system else []),
        {"role": "user", "content": "USERWORD"},
        {"role": "assistant", "content": content, "tool_calls": [called(id_, city) for id_, city, _ in ids]},
        *({"role": "tool", "tool_call_id": id_, "content": result} for id_, _, result in ids),
    ]


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
ASSISTANT = "{% if add_generation_prompt %}<A>{% endif %}"
DEEPSEEK_V3 = (
    TOOLS + "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% if m.role == 'user' %}<U>{{ m.content }}{% endif %}{% if m.role == 'assistant' %}"
    "{% for t in m.tool_calls or [] %}"
    "<\uff5ctool\u2581call\u2581begin\uff5c>{{ t.type + '<\uff5ctool\u2581sep\uff5c>' + t.function.name + '\\n' "
    "+ t.function.arguments }}<\uff5ctool\u2581call\u2581end\uff5c>{% endfor %}{{ m.content or '' }}{% endif %}"
    "{% if m.role == 'tool' %}<R>{{ m.content }}{% endif %}{% endfor %}" + ASSISTANT
)
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
PARTS = (
    TOOLS + "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}" + CALLS + "{% endfor %}"
)
# Only messages of users and tools have parts.
SOME_PARTS = (
    TOOLS + "{% for m in messages %}<{{ m.role }}>{% if m.role in ('user', 'tool') %}{{ m.content[0].text }}{% else %}"
    "{{ m.content }}{% endif %}" + CALLS + "{% endfor %}"
)
NINE = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}[TOOL_CALLS][{% for t in m.tool_calls %}{% if t.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ t.function.name }}", "arguments": {{ t.function.arguments | tojson }}, '
    '"id": "{{ t.id }}"}{% endfor %}]'
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
SINGLE = (
    TOOLS + "{% for m in messages %}<|start_header_id|>{{ m.role }}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NAMED = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}{{ m.content }}"
    + CALLS
    + "{% endfor %}"
)
NO_SYSTEM = (
    TOOLS + "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('not supported') }}{% endif %}"
    "{{ m.content }}" + CALLS + "{% endfor %}"
)
# Content beside calls is dropped, and tools are read as functions only.
DROPS = (
    "{% for t in tools or [] %}{{ t.name }}{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# Calls are ignored, as in the first templates of LFM2 and Kimi K2.
LFM2 = (
    "{% if tools %}<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
KIMI = LFM2.replace("<|tool_list_start|>", "<|im_middle|>")
TEMPLATES = {
    "arguments as text": DEEPSEEK_V3,
    "parts": PARTS,
    "parts of some": SOME_PARTS,
    "ids of nine": NINE,
    "single calls": SINGLE,
    "names of results": NAMED,
    "no system": NO_SYSTEM,
    "content beside calls is dropped": DROPS + "<tool_call>",
    "calls not read": LFM2,
    "calls not read, Kimi": KIMI,
}


def prompt_of(template: str, messages: list[dict[str, Any]]) -> str:
    script = Script()
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 2}
    answer = ask(application(script, template=template), "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return prompt_text(script)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("calls", [1, 2])
def test_every_word_of_a_conversation_reaches_the_prompt(name: str, calls: int) -> None:
    text = prompt_of(TEMPLATES[name], conversation(calls=calls))
    words = ["SYSTEMWORD", "USERWORD", "get_weather", "Oslo", "rain", *(["Rome", "sun"] if calls == 2 else [])]
    missing = [word for word in words if word not in text]
    assert not missing, text
    assert "{'" not in text
    assert '\\"' not in text


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "single calls"])
def test_what_is_said_beside_calls_reaches_the_prompt(name: str) -> None:
    assert "BESIDEWORD" in prompt_of(TEMPLATES[name], conversation(content="BESIDEWORD"))


def test_arguments_are_json_where_a_template_wants_text() -> None:
    assert '{"city": "Oslo"}' in prompt_of(DEEPSEEK_V3, conversation())


def test_an_id_of_nine_is_the_same_for_a_call_and_its_result() -> None:
    text = prompt_of(NINE, conversation(calls=1))
    assert text.count(nine(OSLO)) == 2
    assert (nine("abcDEF123"), len(nine(ROME)), nine(ROME).isalnum()) == ("abcDEF123", 9, True)
    assert nine(ROME) != nine(OSLO)


def test_calls_that_a_template_ignores_are_written_as_the_model_does() -> None:
    call = "<|tool_call_start|>[get_weather(city='Oslo')]<|tool_call_end|>"
    assert call in prompt_of(LFM2, conversation(calls=1))
    assert "functions.get_weather:0" in prompt_of(KIMI, conversation(calls=1))


@pytest.mark.parametrize(
    ("template", "body", "param", "words"),
    [
        # Half a call is worse than none.
        (
            LFM2.replace(
                "{{ m.content }}",
                "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}(){% endfor %}",
            ),
            {"tools": [TOOL]},
            "tools",
            "loses the calls",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", {}, "messages", "loses the words of a user's message"),
        (
            "{% for m in messages %}{{ m.text | upper }}{% endfor %}",
            {},
            "messages",
            "loses the words of a user's message",
        ),
        ("{{ raise_exception('never') }}", {}, "messages", "never"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", {"tools": [TOOL]}, "tools", "no place for tools"),
        (
            "{% if tools %}no tools{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>",
            {"tools": [TOOL]},
            "tools",
            "loses the names of tools",
        ),
        # A family without known calls.
        (
            TOOLS + "{% for m in messages %}{{ m.content }}{{ (m.tool_calls or '') | tojson }}{% endfor %}",
            {"tools": [TOOL]},
            "tools",
            "tool_format",
        ),
        # Parts that would be lost in one request only.
        (
            "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "messages[1].content",
            "'assistant'",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"messages": conversation(system=False)},
            "messages[1].tool_calls",
            "no place for tools",
        ),
    ],
)
def test_what_a_template_would_lose_is_refused_by_name(
    template: str, body: dict[str, Any], param: str, words: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **body}
    answer = ask(application(Script(), template=template), "/v1/chat/completions", asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("content", ["SECRETWORD", [{"type": "text", "text": "SECRETWORD"}]])
@pytest.mark.parametrize("template", [PARTS, SOME_PARTS])
def test_tokenize_and_every_api_read_the_same_conversation(template: str, content: Any) -> None:
    app, script = application(script := Script(), template=template), script
    messages = [{"role": "user", "content": content}]
    ids = ask(app, "/tokenize", {"messages": messages}).json()["tokens"]
    assert "SECRETWORD" in ask(app, "/detokenize", {"tokens": ids}).json()["prompt"]
    counted = ask(app, "/v1/messages/count_tokens", {"model": "scripted", "messages": messages}).json()
    assert counted["input_tokens"] == len(ids)
    for path in ("/v1/messages", "/v1/chat/completions"):
        body = {"model": "scripted", "messages": messages, "max_tokens": 2}
        assert ask(app, path, body).status_code == 200
        assert "SECRETWORD" in prompt_text(script)
