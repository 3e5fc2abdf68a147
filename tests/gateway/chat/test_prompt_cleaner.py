"""Lines that agents change with each call do not defeat the prefix cache."""

from __future__ import annotations

from kvforge.gateway.chat.prompt_cleaner import PromptCleaner
from kvforge.gateway.config import BILLING
from tests.gateway.scripted import Script, application, ask, prompt_text

DATE = r"^Today's date: .*$"


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}, {"role": "user", "content": "Hi"}]


def test_a_billing_line_is_left_out_and_the_rest_is_as_it_was() -> None:
    hygiene = PromptCleaner((BILLING,))
    first = hygiene.clean(system("x-anthropic-billing-header: cch=1f;\nYou are an agent."))
    second = hygiene.clean(system("x-anthropic-billing-header: cch=9a;\nYou are an agent."))
    assert first == second == system("You are an agent.")
    plain = system("You are x-anthropic-billing-header: an agent.")
    assert hygiene.clean(plain) is plain


def test_a_message_of_nothing_else_is_left_out() -> None:
    messages = system("x-anthropic-billing-header: cch=1f;")
    assert PromptCleaner((BILLING,)).clean(messages) == messages[1:]


def test_a_line_that_is_moved_stands_behind_what_stays() -> None:
    cleaned = PromptCleaner((), (DATE,)).clean(system("Today's date: 2026-11-23\nYou are an agent."))
    assert cleaned[0]["content"] == "\nYou are an agent.\nToday's date: 2026-11-23"


def test_only_the_system_prompt_is_touched() -> None:
    messages = [{"role": "user", "content": "x-anthropic-billing-header: a\n"}]
    assert PromptCleaner((BILLING,)).clean(messages) is messages


def test_through_the_api_two_calls_have_the_same_prompt() -> None:
    script = Script()
    app = application(script)
    for mark in ("1f", "9a"):
        blocks = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={mark};"},
            {"type": "text", "text": "You are an agent."},
        ]
        body = {"model": "scripted", "max_tokens": 9, "system": blocks, "messages": system("")[1:]}
        assert ask(app, "/v1/messages", body).status_code == 200
    assert prompt_text(script, 0) == prompt_text(script, 1)
    assert "You are an agent." in prompt_text(script)
