"""Coding agents, headless: the scripted model calls for a file and for a shell command, and the agent does both.

A second process of the agent continues the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.gateway.clients.installs import Python, node, platform_package
from tests.gateway.clients.running import Ended, Home
from tests.gateway.clients.stage import THOUGHT, Answer, Play, Stage, call

pytestmark = [pytest.mark.clients, pytest.mark.usefixtures("recorded")]

TASK, DONE = "Put a greeting into hello.txt, then read the file.", "The greeting is written."
NEXT, SAID = "Which words did you write?", "They were: good morning."
FILE, WORDS = "hello.txt", "good morning\n"


def scenes(*calls: str) -> dict[str, Sequence[Answer]]:
    """Return the calls in turn with a closing answer, and another answer to the second turn."""
    return {TASK: [*calls, DONE], NEXT: [SAID]}


def check(stage: Stage, play: Play, home: Home, turns: Sequence[Ended]) -> None:
    """Check that both turns ended, the file exists, and no request was refused."""
    first, second = turns
    assert first.code == 0 and DONE in first.out, f"{first}\n{stage.refused()}"
    assert (home.work / FILE).read_text() == WORDS, first
    assert second.code == 0 and SAID in second.out, f"{second}\n{stage.refused()}"
    continued = [prompt for prompt in play.prompts if NEXT in prompt]
    assert continued and all(TASK in prompt and DONE in prompt for prompt in continued)
    assert stage.refused() == []
    assert stage.outside == [], "it connects to no other server"
    assert all(exchange.streamed for exchange in stage.exchanges if exchange.method == "POST")


def test_claude_code(stage: Stage, home: Home, modules: Path) -> None:
    play = stage.play(
        scenes(
            call("Write", file_path=str(home.work / FILE), content=WORDS),
            call("Bash", command=f"cat {FILE}", description="Read the file"),
        )
    )
    env = {
        "ANTHROPIC_BASE_URL": stage.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }
    claude = platform_package(modules, "@anthropic-ai/claude-code-linux") / "claude"
    options = ["-p", "--output-format", "stream-json", "--verbose", "--allowedTools", "Write,Bash(cat:*)"]
    turns = [
        home.run([claude, *options, "--", TASK], env),
        home.run([claude, *options, "--continue", "--", NEXT], env),
    ]
    check(stage, play, home, turns)
    assert play.results(WORDS.strip())
    assert {exchange.path for exchange in stage.exchanges} == {"/v1/messages"}
    assert f"<think>{THOUGHT}" in play.prompts[-1], "the agent must send back the model's reasoning"


def test_codex(stage: Stage, home: Home, modules: Path) -> None:
    play = stage.play(
        scenes(call("exec_command", cmd=f"echo good morning > {FILE}"), call("exec_command", cmd=f"cat {FILE}"))
    )
    home.write(
        ".codex/config.toml",
        f"""
model = "scripted"
model_provider = "kvforge"
check_for_update_on_startup = false
[analytics]
enabled = false
[features]
plugins = false
[model_providers.kvforge]
name = "kvforge"
base_url = "{stage.url}/v1"
wire_api = "responses"
env_key = "KVFORGE_KEY"
request_max_retries = 0
stream_max_retries = 0
""",
    )
    (codex,) = platform_package(modules, "@openai/codex-linux").glob("vendor/*/bin/codex")
    # The agent's sandbox needs privileges that a container lacks; it works in an empty folder.
    options = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    env = {"KVFORGE_KEY": "none"}
    turns = [home.run([codex, *options, TASK], env), home.run([codex, *options, "resume", "--last", NEXT], env)]
    check(stage, play, home, turns)
    assert play.results(WORDS.strip())
    assert {exchange.path for exchange in stage.exchanges} == {"/v1/responses"}


def test_opencode(stage: Stage, home: Home, modules: Path) -> None:
    play = stage.play(
        scenes(
            call("write", filePath=str(home.work / FILE), content=WORDS),
            call("bash", command=f"cat {FILE}", description="Read the file"),
        )
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{stage.url}/v1", "apiKey": "none"},
        "models": {"scripted": {"tool_call": True, "limit": {"context": 1_000_000, "output": 8_000}}},
    }
    config = {"provider": {"kvforge": provider}, "autoupdate": False, "share": "disabled", "permission": "allow"}
    model = "kvforge/scripted"
    home.write(".config/opencode/opencode.json", json.dumps({**config, "model": model, "small_model": model}))
    # Mark its plugin package as installed, or the agent would fetch it from npm.
    lock = {"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}}
    home.write(".config/opencode/package-lock.json", json.dumps(lock))
    home.write(".config/opencode/node_modules/.keep", "")
    env = {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    opencode = platform_package(modules, "opencode-linux") / "bin" / "opencode"
    options = ["run", "--format", "json"]
    turns = [home.run([opencode, *options, TASK], env), home.run([opencode, *options, "--continue", NEXT], env)]
    check(stage, play, home, turns)
    assert play.results(WORDS.strip())


def test_qwen_code(stage: Stage, home: Home, modules: Path) -> None:
    play = stage.play(
        scenes(
            call("write_file", file_path=str(home.work / FILE), content=WORDS),
            call("run_shell_command", command=f"cat {FILE}", is_background=False),
        )
    )
    settings = {
        "general": {"disableAutoUpdate": True, "disableUpdateNag": True, "enableAutoUpdate": False},
        "memory": {"enableManagedAutoDream": False, "enableManagedAutoMemory": False},
        "privacy": {"usageStatisticsEnabled": False},
        "security": {"auth": {"selectedType": "openai"}},
        "telemetry": {"enabled": False},
    }
    home.write(".qwen/settings.json", json.dumps(settings))
    env = {"OPENAI_BASE_URL": f"{stage.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}
    qwen = [node(modules), modules / "@qwen-code" / "qwen-code" / "cli-entry.js", "--yolo", "--output-format", "json"]
    turns = [home.run([*qwen, TASK], env), home.run([*qwen, "--continue", NEXT], env)]
    check(stage, play, home, turns)
    assert play.results(WORDS.strip())


def test_aider(stage: Stage, home: Home, python: Python) -> None:
    """Its edits are text blocks, not calls, so the file is edited twice."""
    edit = "{}\n```\n<<<<<<< SEARCH\n{}=======\n{}>>>>>>> REPLACE\n```\n{}"
    play = stage.play(
        {
            TASK: [edit.format(FILE, "", "good evening\n", DONE)],
            NEXT: [edit.format(FILE, "good evening\n", WORDS, SAID)],
        }
    )
    # The price list that it would fetch otherwise.
    prices = {"openai/scripted": {"max_tokens": 8_000, "litellm_provider": "openai", "mode": "chat"}}
    home.write(".aider/caches/model_prices_and_context_window.json", json.dumps(prices))
    env = {
        "OPENAI_API_BASE": f"{stage.url}/v1",
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    off = ["--no-git", "--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-detect-urls"]
    options = [
        "--model",
        "openai/scripted",
        "--edit-format",
        "diff",
        "--yes-always",
        "--map-tokens",
        "0",
        "--no-pretty",
    ]
    aider = [python("aider"), "-m", "aider", *off, *options, "--no-show-model-warnings", "--restore-chat-history"]
    (home.work / FILE).touch()
    turns = [home.run([*aider, "--message", task, FILE], env) for task in (TASK, NEXT)]
    check(stage, play, home, turns)
