"""kvforge chat: its commands, its messages and its exit."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.client.results import Completion, Finished
from kvforge.commands.chat import Chat
from kvforge.process.ending import Interrupted
from kvforge.protocol import exits
from kvforge.protocol.errors import CapacityExceeded
from kvforge.protocol.messages import Timings


class Answer:
    def __init__(self, pieces: list[Any]) -> None:
        self.pieces, self.cancelled = pieces, False

    def __iter__(self) -> Iterator[str]:
        for piece in self.pieces:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def result(self) -> Completion:
        return Completion("".join(self.pieces), Finished(1, (5, 6), "stop", 10, 4, Timings(), (0.0, 0.0)))

    def cancel(self) -> None:
        self.cancelled = True


class Model:
    """Gives scripted answers and records the questions."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers, self.asked = [Answer(pieces) for pieces in answers], []
        self.sampling: list[Any] = []

    def generate_stream(self, messages: list[dict[str, str]], **options: Any) -> Answer:
        self.sampling.append(options["sampling"].temperature)
        self.asked.append([f"{said['role']}: {said['content']}" for said in messages])
        return self.answers[len(self.asked) - 1]


def talk(model: Model, monkeypatch: pytest.MonkeyPatch, text: str, *, interactive: bool = False, **options: Any) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    given = {"tenant": "default", "max_tokens": 8, "temperature": None, "system": "", **options}
    kv: Any = model
    return Chat(kv, argparse.Namespace(**given), interactive=interactive).run()


def test_each_line_of_a_pipe_is_a_prompt_of_one_conversation(monkeypatch: Any, capsys: Any) -> None:
    model = Model(["Hel", "lo"], ["two"])
    assert talk(model, monkeypatch, "hi\n\nand\\\nthen\n", system="be kind") == 0
    assert capsys.readouterr() == ("Hello\ntwo\n", "")
    first = ["system: be kind", "user: hi"]
    assert model.asked == [first, [*first, "assistant: Hello", "user: and\nthen"]]


def test_the_commands(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    model = Model(["a"], ["b"], ["c"])
    file = tmp_path / "said.txt"
    script = ["/stats", '"""one', 'two"""', "/stats", f"/save {file}", "/system short", "x", "/reset"]
    script += ["/temperature 0", "y", "/quit", "never"]
    assert talk(model, monkeypatch, "\n".join(script)) == 0
    out, err = capsys.readouterr()
    assert out == "a\nb\nc\n"
    assert "no answer yet" in err
    assert "4 of 10 prompt tokens cached" in err
    assert model.asked == [["user: one\ntwo"], ["system: short", "user: x"], ["system: short", "user: y"]]
    assert model.sampling == [None, None, 0.0]
    assert file.read_text() == "user: one\ntwo\n\nassistant: a\n"


@pytest.mark.parametrize("line", ["/nonsense", "/temperature x", "/temperature -1", "/save", "/save /"])
def test_a_wrong_command_is_said_and_the_chat_goes_on(monkeypatch: Any, capsys: Any, line: str) -> None:
    model = Model(["a"])
    assert talk(model, monkeypatch, f"{line}\nhi\n", interactive=True) == 0
    out = capsys.readouterr().out
    assert any(word in out for word in ("/help", "temperature: ", "file: "))
    assert model.asked == [["user: hi"]]
    assert model.sampling == [None]


def test_ctrl_c_stops_the_answer_alone(monkeypatch: Any, capsys: Any) -> None:
    model = Model(["be", KeyboardInterrupt()], ["again"])
    assert talk(model, monkeypatch, "hi\nmore\n", interactive=True) == 0
    assert model.answers[0].cancelled
    assert model.asked[1] == ["user: hi", "assistant: be", "user: more"]
    with pytest.raises(KeyboardInterrupt):
        talk(Model([KeyboardInterrupt()]), monkeypatch, "hi\n")


def test_being_told_to_end_ends_it(monkeypatch: Any) -> None:
    model = Model(["be", Interrupted(15)])
    with pytest.raises(Interrupted):
        talk(model, monkeypatch, "hi\nmore\n", interactive=True)
    assert model.answers[0].cancelled


def test_a_refused_prompt_is_no_part_of_the_conversation(monkeypatch: Any, capsys: Any) -> None:
    model = Model([CapacityExceeded("blocks", 9, 1)], ["ok"])
    assert talk(model, monkeypatch, "long\nshort\n", interactive=True) == 0
    assert model.asked[1] == ["user: short"]
    assert "9 needed" in capsys.readouterr().out
    with pytest.raises(CapacityExceeded):
        talk(Model([CapacityExceeded("blocks", 9, 1)]), monkeypatch, "long\n")


def test_a_model_cannot_steer_the_terminal(monkeypatch: Any, capsys: Any) -> None:
    talk(Model(["a\x1b[2Jb"]), monkeypatch, "hi\n", interactive=True)
    assert "\x1b" not in capsys.readouterr().out


def test_nobody_is_there(run: Any, tmp_path: Path) -> None:
    status, out, err = run("--runtime-dir", str(tmp_path), "--timeout", "1", "--reconnect", "0", "chat")
    assert (status, out) == (exits.UNAVAILABLE, "")
    assert err.count("\n") == 1


def test_a_model_without_a_chat_template_is_named(run: Any, monkeypatch: Any) -> None:
    kv = SimpleNamespace(
        health=lambda: SimpleNamespace(model=SimpleNamespace(name="base-7b"), ready=True),
        has_chat_template=lambda: False,
    )

    class Opened:
        def __enter__(self) -> Any:
            return kv

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("kvforge.commands.parsing.open_client", lambda *_: Opened())
    status, out, err = run("chat")
    assert (status, out) == (exits.UNAVAILABLE, "")
    assert "base-7b" in err
    assert "no chat template" in err
