"""The command line: what it prints, and each exit status that `kvforge --help` documents."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvforge.commands import cli, printing
from kvforge.commands.progress import Progress
from kvforge.commands.screen import Columns, InTurn, printable, screen
from kvforge.launch.settings import Settings, toml
from kvforge.protocol import errors, exits
from kvforge.protocol.configuration import convert
from tests.kvforge.fake_coordinator import Running

Output = tuple[int, str, str]


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """One fake coordinator for the tests that do it no harm."""
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as folder, Running(Path(folder)) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvf", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Output:
        status = cli.main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


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


@pytest.mark.parametrize("where", ["--endpoint", "--runtime-dir"])
def test_a_global_option_may_stand_before_or_after(run: Any, shared: Running, where: str) -> None:
    value = shared.endpoint
    if where == "--runtime-dir":
        value = value.removeprefix("ipc://").removesuffix("/clients.sock")
    for arguments in ([where, value, "stats"], ["stats", where, value]):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        assert "w0" in out


def test_the_endpoint_of_the_environment(run: Any, shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFORGE_ENDPOINT", shared.endpoint)
    status, out, _ = run("stats", "--json")
    assert status == 0
    stats = json.loads(out)
    assert stats["pools"][0]["blocks"] == 64
    assert "rid" not in stats


def test_stats_for_people(run: Any, shared: Running) -> None:
    _, out, _ = run("--endpoint", shared.endpoint, "stats")
    lines = out.splitlines()
    assert lines[0].split()[:6] == ["pool", "state", "blocks", "free", "cached", "used"]
    assert lines[1].split()[:6] == ["w0", "ready", "64", "60", "1", "3"]
    assert "16 of 32 tokens (50 %)" in out
    assert "2 preemptions; recomputed 3.8 % of computed tokens" in out
    assert out.split("tenant ")[1].splitlines()[1].split()[:4] == ["default", "2.5", "4", "3"]
    assert all(line == line.rstrip() for line in lines)


def test_generate_with_token_ids(run: Any, shared: Running) -> None:
    base = ("--endpoint", shared.endpoint, "generate", "--prompt-tokens", "1,2,3", "--max-tokens", "3")
    status, out, err = run(*base, "--json", "--temperature", "0", "--seed", "5")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert (document["tokens"], document["reason"], document["seed"]) == ([6, 7, 8], "length", 5)
    assert (document["prompt_tokens"], document["timings"]["ended_us"]) == (3, 30)
    assert document["logprobs"] == [-0.5] * 3
    assert run(*base) == (0, "6 7 8\n", "")
    assert run(*base, "--stream") == (0, "6 7 8 \n", "")


def test_samples_are_headed_or_a_list(run: Any, shared: Running) -> None:
    base = ("--endpoint", shared.endpoint, "generate", "--prompt-tokens", "1,2", "--max-tokens", "2", "--seed", "5")
    status, out, err = run(*base, "--samples", "2", "--json")
    assert (status, err) == (0, "")
    assert [(one["tokens"], one["seed"]) for one in json.loads(out)] == [([3, 4], 5), ([3, 4], 6)]
    for stream in ([], ["--stream"]):
        _, out, _ = run(*base, "--samples", "2", *stream)
        heads = [line.rpartition("request ")[2].split(", ") for line in out.splitlines() if line.startswith("[")]
        assert [seed for _, seed in heads] == ["seed 5", "seed 6"]
        assert int(heads[1][0]) == int(heads[0][0]) + 1
        assert [line.strip() for line in out.splitlines() if line[:1] == "3"] == ["3 4", "3 4"]
    _, out, _ = run(*base, "--samples", "1", "--json")
    assert isinstance(json.loads(out), list)


def test_generate_sends_what_it_was_told_about_time(run: Any, folder: Path) -> None:
    with Running(folder) as fake:
        base = ("--endpoint", fake.endpoint, "generate", "--prompt-tokens", "1", "--max-tokens", "1")
        assert run(*base, "--priority", "-2", "--deadline", "1.5", "--first-token", "0.2", "--key", "k") == (
            0,
            "1\n",
            "",
        )
        fake.expect("asked count=1 priority=-2 deadline_ms=1500 first_token_ms=200 detached=False key=k")
        assert run(*base, "--tenant", "busy", "--retry", "20") == (0, "1\n", "")


def test_a_detached_request_is_read_later(run: Any, folder: Path) -> None:
    with Running(folder) as fake:
        base = ("--endpoint", fake.endpoint)
        prompt = ("generate", "--prompt-tokens", "5", "--max-tokens", "3", "--detach")
        status, out, err = run(*base, *prompt)
        assert (status, err) == (0, "")
        request_id = out.strip()
        fake.expect("Goodbye")
        assert run(*base, "attach", request_id, "--ids") == (0, "5 6 7 \n", "")
        assert run(*base, "attach", request_id, "--ids", "--offset", "2") == (0, "7 \n", "")
        fake.expect("offset=2")
        _, out, _ = run(*base, "attach", request_id, "--ids", "--offset", "1", "--json")
        assert (json.loads(out)["tokens"], json.loads(out)["request_id"]) == ([6, 7], int(request_id))
        _, out, _ = run(*base, *prompt, "--samples", "2")
        assert out.split() == [str(int(request_id) + 1), str(int(request_id) + 2)]
        _, out, _ = run(*base, *prompt, "--json")
        assert json.loads(out) == {"request_id": int(request_id) + 3, "seed": 7}


def test_without_a_tokenizer_a_request_stays_with_whoever_reads_it(run: Any, folder: Path) -> None:
    with Running(folder) as fake:
        base = ("--endpoint", fake.endpoint)
        _, out, _ = run(*base, "generate", "--prompt-tokens", "5", "--detach")
        status, out, err = run(*base, "attach", out.strip())
        assert (status, out) == (exits.USAGE, "")
        one_sentence(err)
        assert "tokenizer: no worker has said which model it serves" in err
        fake.expect("GetHealth")
        assert "Attach" not in fake.seen()


def test_health_for_probes(folder: Path, run: Any) -> None:
    with Running(folder) as fake:
        base = ("--endpoint", fake.endpoint, "health")
        reason = "kvforge: not ready: no worker is ready: w0 is loading\n"
        assert run(*base, "--live") == (0, "live\n", "")
        assert run(*base, "--ready") == (exits.FAILED, "", reason)
        status, out, err = run(*base)  # the third question: from now on it is ready
        assert (status, err) == (0, "")
        assert out == (
            "live: yes\nready: yes\n  w0  pid 1  ready  17 steps, 2.5 s on the one it works on\n"
            "    device memory: weights 3 GiB, pool 5 MiB, other 1000 B\n"
            "    prefill: Triton, portable: this device is no Hopper\n"
        )
        assert run(*base, "--ready") == (0, "ready\n", "")
        status, out, _ = run(*base, "--ready", "--json")
        (worker,) = json.loads(out)["workers"]
        assert (status, worker["steps"]) == (0, 17)
        assert worker["device_bytes"] == {"weights": 3 << 30, "pool": 5 << 20, "other": 1000}


def test_health_of_a_service_that_is_not_ready(folder: Path, run: Any) -> None:
    with Running(folder, ready=False) as fake:
        base = ("--endpoint", fake.endpoint, "health")
        status, out, err = run(*base)
        assert status == exits.FAILED
        assert out == "live: yes\nready: no\n  w0  pid 1  loading  weights 50 %\n"
        one_sentence(err)
        status, out, err = run(*base, "--ready", "--json")
        assert (status, json.loads(out)["ready"]) == (exits.FAILED, False)
        one_sentence(err)


def test_requests_and_cancel(run: Any, shared: Running) -> None:
    base = ("--endpoint", shared.endpoint)
    run(*base, "generate", "--prompt-tokens", "1", "--max-tokens", "1")
    _, out, _ = run(*base, "requests", "--json")
    listed = json.loads(out)
    newest = listed["requests"][0]
    assert newest["state"] == "finished"
    status, out, _ = run(*base, "requests", "--count", "1")
    assert status == 0
    assert out.splitlines()[0].split()[:3] == ["id", "state", "reason"]
    assert out.splitlines()[1].split()[:3] == [str(newest["request_id"]), "finished", "length"]
    status, out, err = run(*base, "cancel", str(newest["request_id"]))
    assert (status, out) == (1, "")
    one_sentence(err)
    assert "already ended" in err


def test_status_until_ready(folder: Path, run: Any) -> None:
    with Running(folder) as fake:
        base = ("--endpoint", fake.endpoint, "status")
        assert run(*base) == (
            1,
            "not ready: no worker is ready: w0 is loading\n  w0  pid 1  loading  weights 50 %\n",
            "",
        )
        status, out, err = run(*base, "--wait", "20", "--json")
        assert status == 0
        assert json.loads(out)["ready"] is True
        assert "w0: ready" in err
        ready = "  w0  pid 1  ready\n    device memory: weights 3 GiB, pool 5 MiB, other 1000 B\n"
        assert run(*base) == (0, f"ready\n{ready}", "")


def test_status_that_never_gets_ready(folder: Path, run: Any) -> None:
    with Running(folder, ready=False) as fake:
        status, out, err = run("--endpoint", fake.endpoint, "status", "--wait", "0.2")
        assert status == exits.FAILED
        assert out.startswith("not ready: no worker is ready")
        assert "not ready after 0.2 s" in err


def test_drain(folder: Path, run: Any) -> None:
    with Running(folder) as fake:
        status, out, err = run("--endpoint", fake.endpoint, "drain")
        assert (status, out) == (0, "")
        assert err == "draining: no new requests; 0 running, 0 waiting\n"
        fake.expect("Drain")
        fake.expect("deadline_ms=0")
        assert run("--endpoint", fake.endpoint, "drain", "--deadline", "2.5")[0] == 0
        fake.expect("deadline_ms=2500")


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
        (2, ["generate", "--prompt-tokens", "1", "--samples", "0"], "count: is 0"),
        (2, ["generate", "--prompt-tokens", "1", "--key", "a\tb"], "key: must be a text"),
        (2, ["generate", "--prompt-tokens", "1", "--detach", "--stream"], "stream: with --detach nothing is read"),
        (2, ["generate", "text", "--detach", "--stop", "x"], "stop: is looked for by whoever reads"),
        (2, ["drain", "--deadline", "-1"], "deadline_s: is -1.0"),
        (2, ["attach", "4242", "--ids"], "there is no request 4242"),
        (2, ["attach", "0", "--ids"], "request_id: is 0"),
        (2, ["attach", "1", "--offset", "1"], "offset: text is read from the first token on"),
        (2, ["attach", "1", "--ids", "--stop", "x"], "stop: is looked for in text"),
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
    got, out, err = run("--endpoint", shared.endpoint, *arguments)
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
            continue  # it is told at the next token, which never comes here
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
    # Python imports sitecustomize first: it sends the signal in the middle of the imports of the command.
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
        assert (command.returncode, out, err) == (status, "\n", "")  # the line is ended
        fake.expect("Goodbye")


def test_the_coordinator_dies_during_a_stream(folder: Path) -> None:
    with Running(folder) as fake:
        arguments = ("generate", "--prompt-tokens", "1", "--tenant", "hang", "--stream")
        command = start("--endpoint", fake.endpoint, *arguments)
        assert command.stdout is not None
        assert command.stdout.read(4) == "1 2 "
        fake.kill()
        out, err = command.communicate(timeout=20)
        assert (command.returncode, out) == (exits.UNAVAILABLE, "\n")
        one_sentence(err)
        assert "is gone" in err


def test_a_reader_that_leaves_is_no_error(shared: Running) -> None:
    read, write = os.pipe()
    os.close(read)
    command = subprocess.Popen(
        [sys.executable, "-m", "kvforge", "--endpoint", shared.endpoint, "stats"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    _, err = command.communicate(timeout=20)
    assert (command.returncode, err) == (0, b"")


# ------------------------------------------------------------------------------------------- what the commands use


def test_toml_survives_any_text() -> None:
    nasty = 'quote " back \\ tab \t line \n nul-ish \x01 del \x7f snow ☃ clef 𝄞 [x] # y'
    text = toml({"a": nasty, "n": 3, "f": 0.5}, {"empty": {}, "t": {"k": "v"}})
    assert tomllib.loads(text) == {"a": nasty, "n": 3, "f": 0.5, "t": {"k": "v"}}
    with pytest.raises(errors.InvalidConfiguration):
        toml({"a": "\udc80"}, {})


def test_the_children_accept_what_is_written_for_them() -> None:
    from coordinator.config import CoordinatorConfig
    from worker.config import WorkerConfig

    settings = Settings(
        model=Path('/a "model"'),
        runtime_dir=Path("/run/x"),
        workers=2,
        threads=3,
        devices=(4, 5),
        worker={"blocks": 64, "load_format": "dummy", "dtype": "float32", "kv_dtype": "float32", "device": "cpu"},
        limits={"queue_max": 7, "sequences_max": 8},
        cache={"block_size": 4},
    )
    coordinator = convert(tomllib.loads(settings.coordinator_file()), CoordinatorConfig)
    assert str(coordinator.runtime_path) == "/run/x"
    assert (coordinator.limits.queue_max, coordinator.limits.sequences_max, coordinator.cache.block_size) == (7, 8, 4)
    worker = convert(tomllib.loads(settings.worker_file(1)), WorkerConfig)
    assert (worker.name, worker.model, worker.threads, worker.device_index) == ("worker-1", '/a "model"', 3, 5)
    assert (worker.blocks, worker.load_format, str(worker.runtime_path)) == (64, "dummy", "/run/x")


def test_progress_without_a_terminal_is_a_line_a_step() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for percent in range(0, 101, 5):
        progress.step("m", "downloading", percent / 100)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "m: downloading",
        "m: downloading 25 %",
        "m: downloading 50 %",
        "m: downloading 75 %",
        "m: downloading 100 %",
    ]


def test_texts_in_turn_come_out_whole_and_in_order() -> None:
    stream = io.StringIO()
    shown = screen(["one", "two", "three"], stream)
    assert isinstance(shown, InTurn)
    for index, text in ((1, "B"), (0, "A"), (2, "C"), (0, "a"), (2, "c")):
        shown.add(index, text)
    shown.end(2)
    shown.end(0)
    shown.add(1, "b\x1b[2J")
    shown.end(1)
    shown.close()
    assert stream.getvalue() == "[1] one\nAa\n\n[2] two\nBb[2J\n\n[3] three\nCc\n"


def test_columns_keep_their_width_and_height() -> None:
    stream = io.StringIO()
    shown = Columns(["one", "two"], stream, 10, 6)
    for _ in range(40):
        shown.add(0, "words and ")
        shown.add(1, "日本語")
    shown.close()
    last = stream.getvalue().rpartition("A\r")[2].replace("\x1b[2K", "").splitlines()
    assert len(last) == 6
    assert last[0].split() == ["one", "two"]
    assert last[2].startswith("...")
    assert all(len(line) <= 22 for line in last)


def test_a_model_does_not_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\r\x07b\n\tc") == "a[31mb\n\tc"


def test_a_table_lines_numbers_up(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table(("name", "n"), [("a", 5), ("long", 10)])
    assert capsys.readouterr().out == "name   n\na      5\nlong  10\n"


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
