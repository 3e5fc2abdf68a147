"""Output of each command, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvforge.commands import cli
from kvforge.protocol import exits
from tests.kvforge.commands.test_cli import one_sentence
from tests.kvforge.fake_coordinator import Running


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


def test_generate_reads_the_shape_of_an_answer(run: Any, shared: Running, tmp_path: Path) -> None:
    base = ("--endpoint", shared.endpoint, "generate", "--prompt-tokens", "1,2", "--max-tokens", "2")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "a"')
    for shape in (("--json-schema", schema), ("--grammar", grammar), ("--regex", "a+"), ("--json-object",)):
        assert run(*base, *map(str, shape))[0] == 0
    schema.write_text('{"not": {}}')
    for shape, words in (
        (("--json-schema", schema), "sampling.json_schema: not: cannot be enforced"),
        (("--grammar", tmp_path / "none"), "grammar: "),
        (("--regex", "a", "--ignore-eos"), "sampling.ignore_eos"),
    ):
        status, _, err = run(*base, *map(str, shape))
        assert status != 0 and words in err
    status, _, err = run(*base, "--regex", "a", "--json-object")
    assert status == 2 and "not allowed with" in err


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
        assert "tokenizer: no worker has reported its model yet" in err
        fake.expect("GetHealth")
        assert "Attach" not in fake.seen()


def test_health_for_probes(folder: Path, run: Any) -> None:
    with Running(folder, loads=True) as fake:
        base = ("--endpoint", fake.endpoint, "health")
        reason = "kvforge: not ready: no worker is ready: w0 is loading\n"
        assert run(*base, "--live") == (0, "live\n", "")
        assert run(*base, "--ready") == (exits.FAILED, "", reason)
        status, out, err = run(*base)  # the third query: ready from now on
        assert (status, err) == (0, "")
        assert out == (
            "live: yes\nready: yes\n  w0  pid 1  ready  17 steps, 2.5 s on the current one\n"
            "    device memory: weights 3 GiB, pool 5 MiB, other 1000 B\n"
            "    prefill: Triton, portable: this device is not a Hopper GPU\n"
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
    with Running(folder, loads=True) as fake:
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
        status, out, err = run("--endpoint", fake.endpoint, "status", "--wait", "1")
        assert status == exits.FAILED
        assert out.startswith("not ready: no worker is ready")
        assert "not ready after 1 s" in err


def test_drain(folder: Path, run: Any) -> None:
    with Running(folder) as fake:
        status, out, err = run("--endpoint", fake.endpoint, "drain")
        assert (status, out) == (0, "")
        assert err == "draining: no new requests; 0 running, 0 waiting\n"
        fake.expect("Drain")
        fake.expect("deadline_ms=0")
        assert run("--endpoint", fake.endpoint, "drain", "--deadline", "2.5")[0] == 0
        fake.expect("deadline_ms=2500")


# ------------------------------------------------------------------------------------------------------------ waiting


@pytest.mark.parametrize("arguments", [("generate", "--prompt-tokens", "1,2"), ("attach", "1"), ("chat",)])
def test_a_command_waits_while_a_worker_loads(folder: Path, run: Any, arguments: tuple[str, ...]) -> None:
    with Running(folder, loads=True) as fake:
        _, _, err = run("--endpoint", fake.endpoint, *arguments)
        assert err.startswith("w0: weights 50 %\nw0: ready\n")


def test_generate_waits_no_longer_than_it_may(folder: Path, run: Any) -> None:
    with Running(folder, ready=False) as fake:
        base = ("--endpoint", fake.endpoint, "generate", "--prompt-tokens", "1")
        status, out, err = run(*base, "--wait", "0.3")
        assert (status, out) == (exits.TIMED_OUT, "")
        assert "not ready to serve after 0.3 s: no worker is ready: w0 is loading (--wait 0.3)" in err
        status, out, err = run(*base, "--wait", "0", "--max-tokens", "1")
        assert (status, err) == (0, "")  # it waits in the queue
        fake.expect("Submit")
        assert run(*base, "--detach")[::2] == (0, "")


# ------------------------------------------------------------------------------------------------------------ explain


@pytest.mark.parametrize(
    ("subject", "name"), [("request", "4"), ("block", "17"), ("sequence", "9"), ("tenant", "ada"), ("tenant", "7")]
)
def test_explain_prints_the_sentences(run: Any, shared: Running, subject: str, name: str) -> None:
    base = ("--endpoint", shared.endpoint, "explain", subject, name)
    status, out, err = run(*base)
    assert (status, err) == (0, "")
    assert out == f"{subject} {name}:\n  it is the first in the queue\n  12 blocks are missing on w0\n"
    status, out, _ = run(*base, "--json")
    assert json.loads(out) == {
        "subject": f"{subject} {name}",
        "sentences": ["it is the first in the queue", "12 blocks are missing on w0"],
        "facts": {"blocks_short": 12},
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["request", "x"], "request: 'x' is not a number of a request, like 17"),
        (["block", "-1"], "block: '-1' is not a number of a block"),
        (["request", "4242"], "there is no request 4242"),
        (["requests", "1"], "did you mean request?"),
        (["request"], "the following arguments are required: ID"),
    ],
)
def test_what_cannot_be_explained_is_named(run: Any, shared: Running, arguments: list[str], words: str) -> None:
    status, out, err = run("--endpoint", shared.endpoint, "explain", *arguments)
    assert (status, out) == (exits.USAGE, "")
    assert words in err


def test_every_command_that_documents_and_alerts_name_exists() -> None:
    """`kvforge WORD` in a page, an alert, a unit or an error names an existing command, subcommands and options."""
    commands = cli.parser().commands()
    named = re.compile(r"`kvforge ([a-z]+)((?: [^`]*)?)`")
    root = Path(__file__).parents[3]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("deploy/**/*.*")]
    sources = [path for room in ("coordinator", "worker", "gateway", "kvforge") for path in (root / room).rglob("*.py")]
    found = 0
    for path in [*pages, *sources, *(root / "protocol").rglob("*.py")]:
        if not path.is_file() or path.suffix in (".png", ".json"):
            continue
        for command, rest in named.findall(path.read_text(encoding="utf-8")):
            found += 1
            assert command in commands, f"{path.name} names `kvforge {command}`"
            parser = commands[command]
            for inner in parser.commands():
                if rest.strip().partition(" ")[0] == inner:
                    parser = parser.commands()[inner]
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest):
                known = command == "loadtest" or option in parser.options()
                assert known, f"{path.name} names `kvforge {command}{rest}`"
    assert found > 50
