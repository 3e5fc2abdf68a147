"""Application libraries: a program for each holds a conversation and prints the values that it found."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.clients.installs import Python, node
from tests.gateway.clients.running import Home
from tests.gateway.clients.scenes import CITY, FOUND, HELLO, RAIN, SCENES, SNOW, call
from tests.gateway.clients.stage import Stage

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("recorded")]

PROGRAMS = Path(__file__).parent / "programs"
HERE = Path(sys.executable)  # with the clients of the extra `dev`


def in_node(program: str, home: Home, stage: Stage, modules: Path) -> Any:
    """Return the output of a program. Node searches modules beside its file."""
    copy = home.work / program
    copy.write_bytes((PROGRAMS / program).read_bytes())
    (home.work / "node_modules").symlink_to(modules)
    ended = home.run([node(modules), copy], {"URL": stage.url, "AI_SDK_LOG_WARNINGS": "false"})
    assert ended.code == 0, f"{ended}\n{stage.refused()}"
    assert stage.outside == [], "it connects to no other server"
    return json.loads(ended.out.splitlines()[-1])


def in_python(program: str, home: Home, stage: Stage, python: Path, **env: str) -> Any:
    """Return the output of a program."""
    ended = home.run([python, "-W", "ignore", PROGRAMS / program], {"URL": stage.url, **env})
    assert ended.code == 0, f"{ended}\n{stage.refused()}"
    assert stage.outside == [], "it connects to no other server"
    return json.loads(ended.out.splitlines()[-1])


def asked_streams(stage: Stage, *paths: str) -> bool:
    """Return whether each path was requested both whole and as events."""
    seen = {(exchange.path, exchange.streamed) for exchange in stage.exchanges}
    return all({(path, False), (path, True)} <= seen for path in paths)


def test_openai_node(stage: Stage, home: Home, modules: Path) -> None:
    stage.play(SCENES)
    found = in_node("with_openai_node.mjs", home, stage, modules)
    assert found == {
        "models": ["scripted", "other"],
        "whole": HELLO,
        "deltas": HELLO,
        "streamed": HELLO,
        "usage": len(HELLO) + 1,
        "tool": RAIN,
        "toolStreamed": RAIN,
        "next": SNOW,
        "parsed": CITY,
        "response": HELLO,
        "responseStreamed": HELLO,
        "lastEvent": "response.completed",
        "responseTool": RAIN,
        "responseNext": SNOW,
        "responseParsed": CITY,
        "cut": ["length", 1],
        "afterCut": SNOW,
        "responseCut": "incomplete",
        "responseAfterCut": SNOW,
        "quiet": HELLO,
        "completion": HELLO,
        "asked": ["Oslo", "Oslo", "Oslo"],
        "error": "NotFoundError",
    }
    assert [line.split(":")[1].split()[0] for line in stage.refused()] == ["404"], stage.refused()
    assert asked_streams(stage, "/v1/chat/completions", "/v1/responses")


def test_anthropic_node(stage: Stage, home: Home, modules: Path) -> None:
    """Its tool loop requests a stored thread first, and continues without one."""
    stage.play(SCENES)
    found = in_node("with_anthropic_node.mjs", home, stage, modules)
    assert found == {
        "models": [[name, "model", name, "string"] for name in ("scripted", "other")],
        "model": "scripted",
        "whole": HELLO,
        "tokens": True,
        "counted": True,
        "streamed": HELLO,
        "thinking": ["thinking", "text"],
        "tool": RAIN,
        "toolStreamed": RAIN,
        "next": SNOW,
        "cut": "max_tokens",
        "afterCut": SNOW,
        "asked": ["Oslo", "Oslo"],
        "error": "NotFoundError",
    }
    refused = stage.refused()
    assert [line for line in refused if "thread_unsupported_request" not in line] == refused[-1:], refused
    assert ": 404 " in refused[-1]
    assert asked_streams(stage, "/v1/messages")


def test_vercel_ai(stage: Stage, home: Home, modules: Path) -> None:
    stage.play(SCENES)
    found = in_node("with_vercel_ai.mjs", home, stage, modules)
    assert found == dict.fromkeys(("compatible", "chat", "responses", "anthropic"), FOUND)
    assert stage.refused() == []
    inputs = [exchange.asked["input"] for exchange in stage.exchanges if exchange.path == "/v1/responses"]
    assert any(item.get("type") == "item_reference" for items in inputs for item in items), "it names stored items"
    assert asked_streams(stage, "/v1/chat/completions", "/v1/responses", "/v1/messages")


def test_langchain_js(stage: Stage, home: Home, modules: Path) -> None:
    stage.play(SCENES)
    found = in_node("with_langchain_js.mjs", home, stage, modules)
    assert found == dict.fromkeys(("chat", "responses", "anthropic"), FOUND)
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions", "/v1/responses", "/v1/messages")


def test_openai_agents(stage: Stage, home: Home, python: Python) -> None:
    stage.play(SCENES)
    found = in_python("with_openai_agents.py", home, stage, python("agents"))
    stored = found.pop("stored")
    assert stored["following"] == FOUND["next"] and stored["session"] == [FOUND["tool"], FOUND["next"]]
    assert stored["kinds"].count("function_call") == stored["kinds"].count("function_call_output") == 1
    assert (stored["last"], stored["background"]) == ("assistant", FOUND["whole"])
    assert stored["forked"] == FOUND["next"], "a fork of the session knows the turn before"
    trunk, branch = stored["sizes"]
    assert branch == trunk + 2 and stored["removed"] == trunk
    passed = {"passed": ["The colleague answers.", "colleague"]}
    assert found == dict.fromkeys(("chat", "responses"), FOUND | passed)
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions", "/v1/responses")


def test_pydantic_ai(stage: Stage, home: Home, python: Python) -> None:
    stage.play(SCENES)
    found = in_python("with_pydantic_ai.py", home, stage, python("agents"))
    assert found == dict.fromkeys(("chat", "responses"), FOUND | {"prompted": CITY, "byTool": CITY})
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions", "/v1/responses")


def test_instructor(stage: Stage, home: Home, python: Python) -> None:
    stage.play(SCENES)
    found = in_python("with_instructor.py", home, stage, python("instructor"))
    large = {"city": "Lagos", "people": 17_000_000}
    modes = ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")
    expected: dict[str, Any] = {mode: [CITY, CITY] for mode in modes}
    assert found == expected | {"repaired_TOOLS": large, "repaired_RESPONSES_TOOLS": large}
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions")


def test_smolagents(stage: Stage, home: Home, python: Python) -> None:
    """The library sends tool results as user messages."""
    code = "Thought: I add.\n<code>\nfinal_answer(2 + 3)\n</code>"
    scenes = {
        "Say hello.": [HELLO],
        "Is it wet in Oslo?": [call("weather", city="Oslo"), call("final_answer", answer=RAIN)],
        "And tomorrow?": [call("final_answer", answer=SNOW)],
        "Add two and three.": [code],
    }
    stage.play(scenes, result="Observation:\n")
    found = in_python("with_smolagents.py", home, stage, python("instructor"))
    expected = {"tool": RAIN, "toolStreamed": RAIN, "next": SNOW, "code": 5, "streamed": HELLO}
    assert found == expected | {"asked": ["Oslo", "Oslo"]}
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions")


def test_litellm(stage: Stage, home: Home) -> None:
    stage.play(SCENES)
    found = in_python("with_litellm.py", home, stage, HERE, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert found == [HELLO, HELLO, HELLO]
    assert stage.refused() == []
    assert {exchange.path for exchange in stage.exchanges} == {"/v1/chat/completions", "/v1/messages"}


def test_langchain(stage: Stage, home: Home) -> None:
    stage.play(SCENES)
    assert in_python("with_langchain.py", home, stage, HERE) == [HELLO, HELLO]
    assert stage.refused() == []
    assert asked_streams(stage, "/v1/chat/completions")


def test_lm_eval(stage: Stage, home: Home) -> None:
    stage.play(SCENES)
    found = in_python("with_lm_eval.py", home, stage, HERE, OPENAI_API_KEY="none", HF_HUB_OFFLINE="1")
    assert found == 1.0
    assert stage.refused() == []
    assert len([exchange for exchange in stage.exchanges if exchange.method == "POST"]) == 4
