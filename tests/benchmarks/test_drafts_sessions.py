"""Recorded sessions become the requests that `benchmarks.drafts_sessions` describes."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafts_replay import replay
from benchmarks.drafts_sessions import (
    ANSWER_MIN,
    SessionError,
    add_options,
    answers_of,
    last_tokens,
    make_asked,
    make_task,
    prompt_texts,
    read_sessions,
    sizes,
    spread,
)
from benchmarks.drafts_tasks import FIRST_TOKEN, Task, Vocabulary

VOCABULARY = 4000
LONG = "let us open the file and change the line that adds one to the counter"  # 16 words or more in pieces


def answer(text: str = LONG, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def write(path: Path, *messages: Any, name: str = "history") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: messages}))
    return path


def made(folder: Path, requests: int = 8, prompt: int = 1000, tokens: int = 256, vocabulary: int = VOCABULARY) -> Task:
    return make_task(folder, requests, prompt, tokens, vocabulary)


def test_an_answer_is_a_long_message_of_the_assistant_and_its_prompt_all_before_it(tmp_path: Path) -> None:
    write(tmp_path / "a.traj", user("count up"), answer("too short"), user("go on"), answer(), user("thanks"))
    ((first, *prompt),), (written,) = (task := made(tmp_path)).prompts, task.answers
    numbers = Vocabulary()
    texts = ["user:\n", "count up", "\n", "assistant:\n", "too short", "\n", "user:\n", "go on", "\n", "assistant:\n"]
    for text in reversed(texts):  # the order in which pieces get their numbers
        numbers.encode(text)
    assert first == FIRST_TOKEN
    assert prompt == [token for text in texts for token in numbers.encode(text)]
    assert written == numbers.encode(LONG)
    assert len(written) >= ANSWER_MIN


def test_a_tokenizer_splits_the_text(tmp_path: Path) -> None:
    write(tmp_path / "a.traj", user("count up"), answer())
    task = make_task(tmp_path, 1, 100, 256, VOCABULARY, str.split)
    assert len(task.prompts[0]) == 1 + len(["user:", "count", "up", "assistant:"])
    assert len(task.answers[0]) == len(LONG.split())
    repeated = [at for at, word in enumerate(LONG.split()) if word == "the"]
    assert len({task.answers[0][at] for at in repeated}) == 1 < len(repeated)


def test_prompts_keep_their_last_tokens_and_answers_their_first(tmp_path: Path) -> None:
    write(tmp_path / "a.traj", user("one " * 50), answer(), user("two"), answer(LONG + " again"))
    whole, cut = made(tmp_path), made(tmp_path, prompt=20, tokens=17)
    for number in range(2):
        numbers, short = Vocabulary(), Vocabulary()
        messages = read_sessions(tmp_path)[0][: 1 + 2 * number]
        texts = prompt_texts(messages)
        assert len(cut.prompts[number]) == 20 < len(whole.prompts[number])
        assert len(cut.answers[number]) == 17 < len(whole.answers[number])
        assert last_tokens(texts, 10_000, numbers)[-19:] == last_tokens(texts, 19, short)
    # The same text has the same tokens, cut or not.
    assert cut.prompts[0][-4:] == cut.prompts[1][-4:]
    prompts = {"prompt_median": 20, "prompt_max": 20, "prompts_sum": 40}
    answers = {"answer_median": 17, "answer_max": 17, "answers_sum": 34}
    assert sizes(cut) == {"requests": 2} | prompts | answers


def test_tool_calls_are_part_of_the_answer_and_of_later_prompts(tmp_path: Path) -> None:
    calls = [call("edit", '{"search": "+ 1", "replace": "+ 2"}'), call("run", {"command": "make größer"})]
    write(tmp_path / "a.json", user("count up"), answer(LONG, tool_calls=calls), name="messages")
    (session,) = read_sessions(tmp_path)
    lines = (
        '{"name": "edit", "arguments": {"search": "+ 1", "replace": "+ 2"}}',
        '{"name": "run", "arguments": {"command": "make größer"}}',
    )
    assert session[1].text == "\n".join((LONG, *lines))
    silent = {"role": "assistant", "content": None, "tool_calls": calls}  # a call without a thought
    write(tmp_path / "a.json", user("count up"), silent, name="messages")
    assert read_sessions(tmp_path)[0][1].text == "\n".join(lines)
    assert len(made(tmp_path).answers) == 1


def test_content_may_be_parts_and_parts_without_text_are_nothing(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "look at "}, {"type": "image_url", "image_url": {}}, {"text": "this"}]
    write(tmp_path / "a.json", {"role": "user", "content": parts}, answer(), name="messages")
    assert read_sessions(tmp_path)[0][0].text == "look at this"


@pytest.mark.parametrize("mark", [{"is_demo": True}, {"message_type": "demonstration"}])
def test_demonstrations_are_in_prompts_and_are_no_answers(tmp_path: Path, mark: dict[str, Any]) -> None:
    write(tmp_path / "a.traj", user("count up"), answer("shown: " + LONG, **mark), user("now you"), answer())
    sessions = read_sessions(tmp_path)
    assert answers_of(sessions) == [(0, 3)]
    assert "shown: " + LONG in prompt_texts(sessions[0][:3])


def test_equal_sessions_and_equal_answers_of_two_sessions_count_once(tmp_path: Path) -> None:
    messages = [user("count up"), answer(), user("once more"), answer()]  # an agent may repeat itself
    write(tmp_path / "a" / "x.traj", *messages)
    write(tmp_path / "b" / "x.traj", *messages)
    write(tmp_path / "c.traj", user("count down"), answer(), user("go on"), answer("then " + LONG))
    assert answers_of(read_sessions(tmp_path)) == [(0, 1), (0, 3), (2, 3)]
    assert len(made(tmp_path).prompts) == 3


def test_requests_are_spread_over_all_sessions_and_the_same_each_time(tmp_path: Path) -> None:
    for number in range(6):
        turns = [answer(f"{LONG} {number} {turn}") for turn in range(5)]
        write(tmp_path / f"{number}.traj", user("go"), *turns)
    places = answers_of(read_sessions(tmp_path))
    assert [session for session, _ in spread(places, 6)] == [0, 1, 2, 3, 4, 5]
    assert [session for session, _ in spread(places, 3)] == [1, 3, 5]
    assert spread(places, 100) == places
    assert len(set(spread(places, 29))) == 29
    assert made(tmp_path, requests=6) == made(tmp_path, requests=6)
    prompts = made(tmp_path, requests=30).prompts
    assert len({prompt[0] for prompt in prompts}) == 30, "two prompts share a prefix"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.traj", "{", "not a session: {} (not JSON"),
        ("a.json", "[1,", "not a session: {} (not JSON"),
        ("a.traj", "[]", "not a session: {} (no list `history` or `messages`)"),
        ("a.traj", '{"history": {}}', "not a session: {} (no list `history` or `messages`)"),
        ("a.traj", '{"history": [3]}', "invalid session: {} (history[0]: not a JSON object)"),
        ("a.traj", '{"history": [{"content": "x"}]}', "invalid session: {} (history[0]: no `role`)"),
        ("a.json", '{"messages": [{"role": "user"}]}', "invalid session: {} (messages[0]: no `content`"),
        ("a.json", '{"messages": [{"role": "user", "content": 3}]}', "invalid session: {} (messages[0]: no `content`"),
        (
            "a.json",
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}',
            "invalid session: {} (messages[0]: a tool call has no `function` with a `name`)",
        ),
    ],
)
def test_a_broken_file_is_refused_with_its_name(tmp_path: Path, name: str, text: str, problem: str) -> None:
    write(tmp_path / "good.traj", user("count up"), answer())
    (tmp_path / name).write_text(text)
    with pytest.raises(SessionError, match=re.escape(problem.format(tmp_path / name))):
        made(tmp_path)


def test_json_of_another_kind_is_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.traj", user("count up"), answer())
    (tmp_path / "results.json").write_text('{"resolved": 3}')
    (tmp_path / "patch.diff").write_text("no JSON")
    assert len(made(tmp_path).prompts) == 1
    assert capsys.readouterr().err == f"skipped: {tmp_path / 'results.json'} (no list `history` or `messages`)\n"


def test_folders_without_answers_and_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="no sessions below"):
        made(tmp_path)
    with pytest.raises(SessionError, match="no sessions below"):
        made(tmp_path / "absent")
    write(tmp_path / "a.traj", user("count up"), answer("too short"))
    with pytest.raises(SessionError, match=f"no assistant message of at least {ANSWER_MIN} tokens"):
        made(tmp_path)
    write(tmp_path / "a.traj", user("count up"), answer())
    with pytest.raises(SessionError, match="0 requests"):
        made(tmp_path, requests=0)
    task = made(tmp_path)
    most = max(max(text) for text in (*task.prompts, *task.answers))
    assert made(tmp_path, vocabulary=most + 1) == task
    with pytest.raises(SessionError, match="distinct pieces of text, and ids for"):
        made(tmp_path, vocabulary=most)


def options(*arguments: str) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    return parser, parser.parse_args(arguments)


def test_options_and_errors_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.traj", user("one " * 500), answer(), user("go on"), answer("then " + LONG))
    task = make_asked(*options("--sessions", str(tmp_path), "--requests", "1"), VOCABULARY, 200)
    assert len(task.prompts) == 1
    assert len(task.prompts[0]) == 200 - 32, "the prompt leaves no room for the answer"
    for arguments, problem in (
        ([], "needs --sessions FOLDER"),
        (["--sessions", str(tmp_path / "absent")], "no sessions below"),
        (["--sessions", str(tmp_path), "--batch", "3"], "--batch 3: the round has 2 requests"),
    ):
        with pytest.raises(SystemExit):
            make_asked(*options(*arguments), VOCABULARY, 200)
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("batch", [1, 2])
def test_a_replay_runs_all_requests_and_drafts_save_steps(tmp_path: Path, batch: int) -> None:
    code = " ".join(f"name_{number} = value[{number}]" for number in range(30))
    for number in range(3):
        write(tmp_path / f"{number}.traj", user(f"file {number}: {code}"), answer(f"edit({number}, {code})"))
    task = made(tmp_path, prompt=600, tokens=200)
    costs = argparse.Namespace(step_us=4000, row_us=30, way_us=2000)
    without, drafted = (replay(task, drafts, costs, batch, is_cached=True) for drafts in (0, 8))
    assert without["drafted"] == 0
    assert drafted["steps"] < without["steps"] / 1.5
    assert 0 < drafted["accepted"] <= drafted["drafted"]
