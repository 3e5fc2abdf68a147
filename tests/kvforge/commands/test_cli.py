"""Exit of a command: each status that `kvforge --help` documents, one sentence, signals, a closed pipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvforge.commands import cli
from kvforge.process.parser import Parser
from kvforge.protocol import errors, exits
from tests.kvforge.fake_coordinator import Running


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kvforge", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def one_sentence(err: str) -> None:
    assert err.startswith("kvforge: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_help_documents_every_status_and_command(run: Any) -> None:
    status, out, _ = run("--help")
    assert status == exits.OK
    for number, meaning in exits.MEANINGS.items():
        assert f"{number:<4} {meaning}" in out
    for command in cli.COMMANDS:
        assert command.__name__.rpartition(".")[2] in out


def test_every_error_class_has_the_documented_status() -> None:
    expected = {
        errors.InvalidRequest: 2,
        errors.InvalidConfiguration: 2,
        errors.RequestNotFound: 2,
        errors.ModelNotFound: 2,
        errors.CoordinatorUnavailable: 3,
        errors.CoordinatorInUse: 3,
        errors.Draining: 3,
        errors.NotReady: 3,
        errors.WorkerError: 1,
        errors.GpuError: 1,
        errors.UnsupportedModel: 3,
        errors.DeadlineExceeded: 4,
        errors.QueueFull: 1,
        errors.AlreadyFinished: 1,
        errors.ProtocolError: 1,
        errors.InternalError: 1,
    }
    for cls, status in expected.items():
        assert exits.status_of(errors.restore(cls.code, "text", {})) == status, cls
    for cls in errors.BY_CODE.values():
        assert exits.status_of(errors.restore(cls.code, "text", {})) in exits.MEANINGS


def test_version(run: Any) -> None:
    assert run("version") == (0, "kvforge 0.1.0 (protocol 1 to 1)\n", "")


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, ["generate", "--prompt-tokens", "1,x"], "prompt: '1,x' is not a list of token ids"),
        (2, ["generate", "--prompt-tokens", "1,-2"], "prompt: item 1 is -2"),
        (2, ["generate", "--prompt-tokens", ""], "prompt: is empty"),
        (2, ["generate"], "give either a text or --prompt-tokens"),
        (2, ["generate", "hello", "--prompt-tokens", "1"], "give either a text or --prompt-tokens"),
        (2, ["generate", "--prompt-tokens", "1", "--temperature", "-1"], "sampling.temperature"),
        (2, ["generate", "--prompt-tokens", "1", "--max-tokens", "0"], "max_tokens: is 0"),
        (2, ["generate", "--prompt-tokens", "1", "--priority", "101"], "priority: is 101"),
        (2, ["generate", "--prompt-tokens", "1", "--deadline", "0"], "deadline_s: is 0.0"),
        (2, ["generate", "--prompt-tokens", "1", "--first-token", "nan"], "first_token_s: is nan"),
        (2, ["generate", "--prompt-tokens", "1", "--samples", "0"], "n: is 0"),
        (2, ["generate", "--prompt-tokens", "1", "--key", "a\tb"], "key: must be a text"),
        (2, ["generate", "--prompt-tokens", "1", "--detach", "--stream"], "stream: does not apply to --detach"),
        (2, ["generate", "text", "--detach", "--stop", "x"], "stop: does not apply to --detach"),
        (2, ["drain", "--deadline", "-1"], "deadline_s: is -1.0"),
        (2, ["attach", "4242", "--ids"], "there is no request 4242"),
        (2, ["attach", "0", "--ids"], "request_id: is 0"),
        (2, ["attach", "1", "--offset", "1"], "offset: must be 0 for text"),
        (2, ["attach", "1", "--ids", "--stop", "x"], "stop: applies to text only"),
        (2, ["cancel", "4242"], "there is no request 4242"),
        (2, ["pull", "no-such-model"], "no-such-model"),
        (2, ["up", "--model", "no-such-model"], "no-such-model"),
        (
            2,
            ["up", "--model-config", "llama-3.1-8b", "--load-format", "gguf"],
            "--model-config: a shape has no weights",
        ),
        (1, ["generate", "--prompt-tokens", "1", "--tenant", "refused"], "the queue holds its limit of 4 requests"),
        (4, ["generate", "--prompt-tokens", "1", "--tenant", "silent", "--timeout", "0.2"], "did not answer Submit"),
    ],
)
def test_errors_are_one_sentence_and_a_status(
    run: Any, shared: Running, status: int, arguments: list[str], words: str
) -> None:
    where = () if arguments[0] == "up" else ("--endpoint", shared.endpoint)
    got, out, err = run(*where, *arguments)
    assert (got, out) == (status, "")
    assert words in err
    if not err.startswith("no-such-model: checking"):
        one_sentence(err)


CANCELLED = "has not ended within 0.2 s (--generate-timeout); it is cancelled"


@pytest.mark.parametrize(
    ("status", "tenant", "arguments", "words"),
    [
        (4, "expires", [], "ran out of time"),
        (1, "fails", ["--max-tokens", "2"], "the worker broke"),
        (4, "hang", ["--generate-timeout", "0.2"], CANCELLED),
    ],
)
def test_what_there_is_of_an_answer_is_printed_though_it_ended_badly(
    run: Any, shared: Running, status: int, tenant: str, arguments: list[str], words: str
) -> None:
    command = ("--endpoint", shared.endpoint, "generate", "--prompt-tokens", "1", "--tenant", tenant, *arguments)
    for shown in ([], ["--stream"], ["--json"]):
        if shown == ["--stream"] and tenant == "hang":
            continue  # noticed at the next token, which never comes here
        got, out, err = run(*command, *shown)
        assert (got, words in err) == (status, True)
        one_sentence(err)
        if shown == ["--json"]:
            document = json.loads(out)
            assert document["tokens"] == [1, 2]
            assert document["error"] in ("deadline_exceeded", "worker_error")
        else:
            assert out.split() == ["1", "2"]


def test_leaving_a_detached_request_says_that_it_goes_on(run: Any, shared: Running) -> None:
    options = ("--endpoint", shared.endpoint)
    _, out, _ = run(*options, "generate", "--prompt-tokens", "1", "--tenant", "hang", "--detach")
    status, out, err = run(*options, "attach", out.strip(), "--ids", "--json", "--generate-timeout", "0.2")
    assert (status, json.loads(out)["tokens"]) == (4, [1, 2])
    assert "has not ended within 0.2 s (--generate-timeout); it goes on: attach again" in err


@pytest.mark.parametrize(
    "entry", [["-m", "kvforge"], ["-c", "import kvforge.__main__ as m; raise SystemExit(m.main())"]]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["kvforge.commands.cli", "zmq", "numpy", "kvforge.commands.up"])
def test_a_signal_while_it_is_imported_ends_it_without_a_word(
    tmp_path: Path, entry: list[str], number: signal.Signals, when: str
) -> None:
    # Python imports sitecustomize first, which sends the signal during the imports of the command.
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Interrupts())
""")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, *entry, "version"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + number, "", "")


def test_version_is_an_option_too(run: Any) -> None:
    assert run("--version") == run("-V") == run("version")


def parsers(parser: Parser, *names: str) -> list[tuple[tuple[str, ...], Parser]]:
    """Yield every command and subcommand with its names."""
    inner = [found for name, one in parser.commands().items() for found in parsers(one, *names, name)]
    return [*([(names, parser)] if names else []), *inner]


COMMANDS = parsers(cli.parser())
WITH_OPTIONS = [(names, parser) for names, parser in COMMANDS if not parser.commands() and names != ("loadtest",)]


@pytest.mark.parametrize(("names", "parser"), WITH_OPTIONS, ids=["-".join(names) for names, _ in WITH_OPTIONS])
def test_a_misspelt_option_is_answered_with_the_nearest_one_and_the_usage_of_its_command(
    capsys: pytest.CaptureFixture[str], names: tuple[str, ...], parser: Parser
) -> None:
    places = [action for action in parser._actions if not action.option_strings and action.nargs != "?"]
    values = [str(next(iter(action.choices or ["1"]))) for action in places]
    for option in parser.options():
        if len(option) > len("--key"):
            with pytest.raises(SystemExit) as ended:
                parser.parse_args([*values, f"{option}{option[-1]}"])
            err = capsys.readouterr().err
            assert ended.value.code == exits.USAGE
            assert err.startswith(f"usage: {parser.prog} [-h]") and parser.prog.startswith("kvforge ")
            assert f"did you mean {option}?" in err


@pytest.mark.parametrize("names", [names for names, _ in COMMANDS], ids="-".join)
def test_a_misspelt_command_is_answered_with_the_nearest_one(run: Any, names: tuple[str, ...]) -> None:
    *outer, name = names
    status, out, err = run(*outer, f"{name}{name[-1]}")
    assert (status, out) == (exits.USAGE, "")
    assert f"did you mean {name}?" in err
    assert err.startswith("usage: " + " ".join(["kvforge", *outer]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--versoin"], "COMMAND; did you mean --version?"),
        (["up", "--thread", "x", "--kv-bites", "4G"], "--threads"),
        (["explain", "--jsn", "request"], "ID; did you mean --json?"),
        (["explain", "--js", "request"], "arguments are required: ID\n"),
    ],
)
def test_a_misspelt_option_is_found_where_it_makes_the_rest_wrong(run: Any, arguments: list[str], words: str) -> None:
    status, _, err = run(*arguments)
    assert status == exits.USAGE and words in err


@pytest.mark.parametrize("arguments", [["--workers", "2", "up"], ["--workers=2", "version"], ["--worker", "2"]])
def test_an_option_before_its_command_is_answered_with_the_command(run: Any, arguments: list[str]) -> None:
    assert "did you mean `kvforge up --workers`?" in run(*arguments)[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_every_command_and_option(run: Any, shell: str) -> None:
    status, out, err = run("completion", shell)
    assert (status, err) == (0, "")
    for name in ("generate", "explain", "max-tokens", "model-config"):
        assert name in out
    path = shutil.which(shell)
    if path is not None:
        checked = subprocess.run([path, "-n"], input=out, capture_output=True, text=True, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_bash_completes_a_command_and_an_option(run: Any) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    script = run("completion", "bash")[1]
    for words, expected in (("kvforge gene", "generate"), ("kvforge generate --max-t", "--max-tokens")):
        asked = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _shtab_kvforge; echo ${{COMPREPLY[@]}}"
        ran = subprocess.run([bash, "-c", f"{script}\n{asked}"], capture_output=True, text=True, timeout=60)
        assert ran.stdout.split() == [expected]


def test_completion_without_its_library_says_what_to_install(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvforge.commands.completion.find_spec", lambda _: None)
    status, out, err = run("completion", "bash")
    assert (status, out) == (exits.UNAVAILABLE, "")
    one_sentence(err)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["stats", "--nonsense"], ["--timeout", "0", "stats"]])
def test_wrong_usage(run: Any, arguments: list[str]) -> None:
    status, out, err = run(*arguments)
    assert (status, out) == (exits.USAGE, "")
    assert "usage: kvforge" in err


@pytest.mark.parametrize(
    "command",
    [
        ["stats"],
        ["status"],
        ["health", "--live"],
        ["requests"],
        ["drain"],
        ["generate", "hello"],
        ["attach", "1"],
    ],
)
def test_nobody_is_there(run: Any, folder: Path, command: list[str]) -> None:
    status, out, err = run("--runtime-dir", str(folder), "--timeout", "0.2", *command)
    assert (status, out) == (exits.UNAVAILABLE, "")
    one_sentence(err)
    assert "kvforge up" in err
    assert str(folder) in err


def test_a_runtime_folder_too_long_for_sockets(run: Any, tmp_path: Path) -> None:
    status, _, err = run("--runtime-dir", str(tmp_path / ("x" * 120)), "stats")
    assert status == exits.USAGE
    one_sentence(err)
    assert "shorter" in err


def test_a_fault_of_our_own_is_one_sentence_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_options: object) -> int:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("kvforge.commands.version.run", broken)
    status, _, err = run("version")
    assert status == exits.FAILED
    one_sentence(err)
    assert "internal error: ZeroDivisionError: oops" in err
    monkeypatch.setenv(cli.DEBUG, "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["version"])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_request(folder: Path, number: signal.Signals, status: int) -> None:
    with Running(folder) as fake:
        arguments = ("generate", "--prompt-tokens", "1", "--tenant", "hang", "--stream")
        command = start("--endpoint", fake.endpoint, *arguments)
        fake.expect("Submit")
        assert command.stdout is not None
        assert command.stdout.read(4) == "1 2 "
        command.send_signal(number)
        out, err = command.communicate(timeout=20)
        assert (command.returncode, out, err) == (status, "\n", "")  # the line is terminated
        fake.expect("Goodbye")


def test_the_coordinator_dies_during_a_stream(folder: Path) -> None:
    with Running(folder) as fake:
        arguments = ("generate", "--prompt-tokens", "1", "--tenant", "hang", "--stream")
        command = start("--endpoint", fake.endpoint, "--reconnect", "0", *arguments)
        assert command.stdout is not None
        assert command.stdout.read(4) == "1 2 "
        fake.kill()
        out, err = command.communicate(timeout=20)
        assert (command.returncode, out) == (exits.UNAVAILABLE, "\n")
        one_sentence(err)
        assert "is gone" in err


def test_the_coordinator_comes_back_during_a_stream(folder: Path) -> None:
    with Running(folder) as fake:
        arguments = ("generate", "--prompt-tokens", "1", "--tenant", "waits", "--stream", "--max-tokens", "9")
        command = start("--endpoint", fake.endpoint, *arguments)
        assert command.stdout is not None
        assert command.stdout.read(4) == "1 2 "
        fake.signal(signal.SIGUSR1, "back")
        out, err = command.communicate(timeout=20)
        assert (command.returncode, out, err) == (0, "3 4 5 6 7 8 9 \n", "")


def test_a_reader_that_leaves_is_no_error(shared: Running) -> None:
    read, write = os.pipe()
    os.close(read)
    command = subprocess.Popen(
        [sys.executable, "-m", "kvforge", "--endpoint", shared.endpoint, "stats"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    _, err = command.communicate(timeout=20)
    assert (command.returncode, err) == (0, b"")


@pytest.mark.parametrize("words", [["version"], ["--help"], ["generate", "--help"]], ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "at once"])
def test_output_that_cannot_be_written_is_said_in_one_line(unbuffered: str, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvforge", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            text=True,
            timeout=60,
        )
    assert done.stderr == "kvforge: the output cannot be written: No space left on device\n"
    assert done.returncode == exits.FAILED
