"""Nine families with their models' real output: with reasoning and wrapping marks, truncated, and malformed."""

from __future__ import annotations

import pytest

from kvforge.gateway.parse import choose

from .test_rules import read

D = "\uff5cDSML\uff5c"
OSLO = [("weather", {"city": "Oslo"})]
JSON = '{"name": "weather", "arguments": {"city": "Oslo"}}'
INVOKE = '<{0}invoke name="weather">\n<{0}parameter name="city"{1}>Oslo</{0}parameter>\n</{0}invoke>\n'
SEED = "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>"
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>'
)
COMMAND = '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}\n]'
# Name: thinking, and a call.
WHOLE = {
    "lfm2": ("<think>hm</think>", "<|tool_call_start|>[weather(city='Oslo')]<|tool_call_end|>"),
    "kimi_k2": ("<think>hm</think>", KIMI),
    "granite": ("<think>hm</think><response>", f"<|tool_call|>[{JSON}]"),
    "minimax": ("<think>\nhm\n</think>\n\n", "<minimax:tool_call>\n" + INVOKE.format("", "") + "</minimax:tool_call>"),
    "nemotron": ("<think>\nhm\n</think>\n\n", f"<TOOLCALL>[{JSON}]</TOOLCALL>"),
    "command_a": ("<|START_THINKING|>hm<|END_THINKING|>", f"{COMMAND}<|END_ACTION|>"),
    "hunyuan": ("<think>\nhm\n</think>\n<answer>\n", f"<tool_calls>[{JSON}]</tool_calls>\n</answer>"),
    "deepseek_v32": (
        "<think>hm</think>\n\n",
        f"<{D}function_calls>\n" + INVOKE.format(D, ' string="true"') + f"</{D}function_calls>",
    ),
    "seed_oss": ("<seed:think>hm</seed:think>\n", SEED),
}


@pytest.mark.parametrize("name", WHOLE)
def test_thinking_and_a_call_are_neither_content(name: str) -> None:
    thought, call = WHOLE[name]
    found = read(name, thought + call)
    assert (found.reasoning, found.content, found.called) == ("hm", "", OSLO)


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_that_is_cut_off_loses_nothing_that_was_written(name: str) -> None:
    """It becomes a call with its partial arguments, or content, never half of either."""
    _, call = WHOLE[name]
    for end in range(call.index("weather"), call.index("Oslo") + 3):
        found = read(name, call[:end])
        written = found.content + "".join(part for one in found.calls for part in one)
        assert "weather"[: end - call.index("weather")] in written
        if end > call.index("Oslo"):
            assert call[call.index("Oslo") : end] in written


@pytest.mark.parametrize("name", WHOLE)
def test_a_mark_without_a_call_behind_it_is_content(name: str) -> None:
    mark = next(iter(choose("", name).calls))
    text = f"The mark {mark} opens it"
    assert read(name, text).content == text
    assert read(name, text).calls == []


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("granite", "<think>hm</think><response>Hello</response>", "Hello"),
        ("hunyuan", "<think>\nhm\n</think>\n<answer>\nHello\n</answer>", "Hello"),
        ("command_a", "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>", "Hello"),
        ("hunyuan", "<think>hm</think>a </answer> b", "a </answer> b"),
        ("hunyuan", "<think>hm</think>say <answer> twice", "say <answer> twice"),
    ],
)
def test_marks_around_an_answer_are_none_of_it(name: str, text: str, content: str) -> None:
    found = read(name, text, tools=None)
    assert (found.reasoning, found.content) == ("hm", content)


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("<|tool_call_start|>[", "lfm2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("<|start_of_role|>assistant <|tool_call|>", "granite"),
        ("<|start_of_role|>assistant <tool_call>", "hermes"),
        ("<minimax:tool_call><invoke name=", "minimax"),
        ("<TOOLCALL>[", "nemotron"),
        ("<function=a><tool_call>", "qwen3_coder"),
        ("<|START_ACTION|>[", "command_a"),
        ("<answer><tool_calls>", "hunyuan"),
        (f"<{D}function_calls>", "deepseek_v32"),
        ("<seed:tool_call><function=a>", "seed_oss"),
    ],
)
def test_a_family_is_known_by_its_template(sign: str, name: str) -> None:
    assert choose("{{ messages }}" + sign).name == name
