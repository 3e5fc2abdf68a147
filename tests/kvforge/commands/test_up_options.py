"""Options that `kvforge up` refuses before it starts a process, named in the errors; and the settings of its file."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvforge.commands import cli, parsing, up, up_options
from kvforge.launch import host
from kvforge.launch.settings import Settings
from kvforge.launch.up_file import load_up_file
from kvforge.process.installation import install_command
from kvforge.protocol import choices, keys
from kvforge.protocol.configuration import convert
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

MANY = str(10 * (os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: Any) -> int:
        pytest.fail("something was fetched or started")

    monkeypatch.setattr(up, "run_up", started)
    monkeypatch.setattr(up, "pull", started)
    monkeypatch.setattr(host, "DEVICE_FILES", {"cuda": ("no-such-device",), "hip": ("no-such-device",)})
    monkeypatch.delenv(up.API_KEY, raising=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks", "0"], "--blocks: is 0; it must be at least 1"),
        (["--kv-bytes", "-5"], "argument --kv-bytes: '-5' is not a number of bytes like 4G, 512MiB"),
        (["--kv-bytes", "0G"], "--kv-bytes: is 0; it must be at least 1"),
        (["--memory-share", "1.5"], "--memory-share: is 1.5; it must be more than 0 and at most 1"),
        (["--gpu-memory-utilization", "0.9", "--device", "cpu"], "--memory-share: applies to a GPU's memory"),
        (["--endpoint", "ipc:///x"], "unrecognized arguments: --endpoint"),
        (["--model", "a", "b"], "--model: is a, and MODEL is b: give one"),
        (["--http", "8000", "--port", "8001"], "--http: sets the same as --port and --host: give only one"),
        (["--port", "70000"], "--port: is 70000; it must be 0 to 65535"),
        (["--api-key", "x"], "--api-key: needs --http or --port"),
        (["--served-model-name", "x"], "--name: needs --http or --port"),
        (["--block-size", "0"], "--block-size: is 0"),
        (["--sequences-max", "0"], "--sequences-max: is 0"),
        (["--queue-max", "0"], "--queue-max: is 0"),
        (["--context-tokens-max", "0"], "--context-tokens-max: is 0"),
        (["--workers", "0"], "--workers: is 0"),
        (["--http", "eighty"], "--http: is 'eighty'; it is PORT or HOST:PORT"),
        (["--http", "localhost:70000"], "--http: "),
        (["--http-processes", "2"], "--http-processes: needs --http or --port"),
        (["--gateway", "gateway.toml"], "--gateway: needs --http or --port"),
        (["--http", "8000", "--http-processes", "0"], "--http-processes: is 0; it must be 1 to"),
        (["--workers", "65"], "--workers: is 65"),
        (["--threads", "0"], "--threads: is 0"),
        (["--threads", MANY], f"--threads: is {MANY}; it must be 1 to"),
        (["--model", "smollm2-135m", "--model-config", "llama-3.1-8b"], "--model-config: names a shape"),
        (["--model-config", "llama-3.1-8b", "--load-format", "gguf"], "--model-config: a shape has no weights"),
        (["--dtype", "float99"], "argument --dtype: invalid choice: 'float99'"),
        (["--kv-dtype", "int7"], "argument --kv-dtype/--kv-cache-dtype: invalid choice: 'int7'"),
        (["--load-format", "zip"], "argument --load-format: invalid choice: 'zip'"),
        (["--device", "cuda"], "--device: is cuda, but this machine has no NVIDIA GPU"),
        (["--device", "hip"], "--device: is hip, but this machine has no AMD GPU"),
        (["--devices", "0,x"], "--devices: '0,x' is not a list"),
        (["--devices", "-1"], "--devices: must be indices from 0"),
        (["--blocks", "5", "--kv-bytes", "5"], "argument --kv-bytes: not allowed with argument --blocks"),
        (["--config", "/no/such/file"], "/no/such/file: cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_in_the_options_own_words(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.main(["up", *arguments]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("missing", host.NEEDED)
def test_without_what_workers_need_it_says_once_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None if name == missing else object())
    assert cli.main(["up"]) == 3
    expected = f"kvforge: workers need {missing}, not installed here: {install_command('worker')}\n"
    assert capsys.readouterr().err == expected
    with pytest.raises(Unavailable):
        host.check_installed()


def test_a_device_is_seen_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DEVICE_FILES", {"cuda": ("nvidia[0-9]*",)})
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(InvalidConfiguration, match="no NVIDIA GPU"):
        host.check_device("--device", "cuda", tmp_path)
    (tmp_path / "nvidia3").touch()
    host.check_device("--device", "cuda", tmp_path)
    for always in ("cpu", "auto"):
        host.check_device("--device", always, tmp_path)


def test_the_names_are_those_that_workers_know() -> None:
    from kvforge.worker.attention.pool import KV_DTYPES
    from kvforge.worker.loading import LOAD_FORMATS
    from kvforge.worker.loading.configuration import MODEL_DTYPES

    assert ("auto", *MODEL_DTYPES) == choices.DTYPES
    assert ("auto", *KV_DTYPES) == choices.KV_DTYPES
    assert choices.LOAD_FORMATS == LOAD_FORMATS


# --------------------------------------------------------------------------------------------------------------- file


def settings(
    folder: Path, text: str, *arguments: str, runtime: tuple[str, ...] | None = None
) -> tuple[argparse.Namespace, Settings]:
    """Return the settings of `up` from a file and options."""
    path = folder / "up.toml"
    path.write_text(text)
    where = ("--runtime-dir", str(folder)) if runtime is None else runtime
    options = cli.parser().parse_args(["up", *where, "--config", str(path), *arguments])
    file = load_up_file(options.config)
    up._fill_in(options, file)
    up.check(options, file)
    return options, up.settings_of(options, file, Path("/model"))


def test_every_setting_of_coordinator_and_worker_is_reached(tmp_path: Path) -> None:
    """The settings come from the structures, so that new settings are covered too."""
    from kvforge.coordinator.config import CoordinatorConfig
    from kvforge.worker.config import WorkerConfig

    whole = CoordinatorConfig()
    sections = {
        name: getattr(whole, name)
        for name in CoordinatorConfig.__struct_fields__
        if isinstance(getattr(whole, name), msgspec.Struct) and name not in ("tcp", "access")
    }
    assert {*sections} >= {"limits", "cache", "schedule", "journal", "kv_events"}
    ours = (
        "name",
        "model",
        "runtime_dir",
        "endpoint",
        "server_key",
        "key_file",
        "ranks",
        "rank",
        "log_level",
        "log_format",
    )
    tables = {name: {key: getattr(value, key) for key in value.__struct_fields__} for name, value in sections.items()}
    worker = WorkerConfig(name="w", model="m")
    tables["worker"] = {key: getattr(worker, key) for key in worker.__struct_fields__ if key not in ours}
    tables['quotas."a b"'] = {"floor": 1, "ceiling": 9, "weight": 2.5}
    key = keys.make().public
    tables["tcp"] = {"listen": "tcp://*:5570", "key_file": "/etc/k"}
    tables['access.clients."a b"'] = {"key": key, "tenant": "*", "rights": ["submit", "read"], "requests_max": 3}
    tables["access.local"] = {"tenant": "l", "rights": ["read"]}
    tables["limits"]["queue_max"], tables["worker"]["watch_us"] = 77, 123
    lines = [f"[{name}]\n" + "\n".join(f"{k} = {_toml(v)}" for k, v in table.items()) for name, table in tables.items()]
    _, made = settings(tmp_path, "\n".join(lines))
    coordinator = convert(tomllib.loads(made.coordinator_file()), CoordinatorConfig)
    assert coordinator.limits.queue_max == 77
    assert coordinator.core_limits().quotas["a b"].weight == 2.5
    assert (coordinator.tcp.listen, coordinator.access.clients["a b"].key) == ("tcp://*:5570", key)
    assert coordinator.access.clients["a b"].rights == ("submit", "read")
    assert coordinator.access.local.rights == ("read",)
    read = convert(tomllib.loads(made.worker_file(0)), WorkerConfig)
    assert read.watch_us == 123
    for name in ("cache", "schedule", "journal", "kv_events"):
        assert getattr(coordinator, name) == sections[name]


# For each option with a value: a value other than its default, as on the command line.
VALUES: dict[str, str] = {
    "runtime_dir": "/tmp/elsewhere",
    "state_dir": "/tmp/state",
    "durability": "power",
    "model": "other",
    "model_config": "llama-3.1-8b",
    "devices": "2,3",
    "device": "cpu",
    "dtype": "float32",
    "weight_dtype": "int8",
    "kv_dtype": "int8",
    "kv_bytes": "4M",
    "memory_share": "0.5",
    "load_format": "dummy",
    "attention": "reference",
    "kernels": "reference",
    "graphs": "off",
    "http": "0.0.0.0:8123",
    "host": "::1",
    "port": "8124",
    "gateway": "/tmp/gateway.toml",
    "name": "short",
    "api_key": "secret",
    "log_dir": "/tmp/logs",
    "log_level": "debug",
    "log_format": "json",
}
WITH_HTTP = ("http_processes", "gateway", "name", "api_key")


def up_actions() -> list[argparse.Action]:
    """Return every option of `kvforge up`, except help and the paths of the file and the model."""
    chosen = argparse.ArgumentParser()
    up_options.declare(chosen)
    parsing.global_options(chosen, top=False, connects=False)
    return [action for action in chosen._actions if action.dest not in ("help", "config", "model_name")]


@pytest.mark.parametrize("action", up_actions(), ids=lambda action: action.dest)
@pytest.mark.parametrize("hyphens", [False, True])
def test_the_file_takes_every_option_by_its_name(tmp_path: Path, action: argparse.Action, hyphens: bool) -> None:
    """A setting in the file has the same effect as the option of the same name."""
    value = VALUES.get(action.dest, "2")
    given = [action.option_strings[0], *([] if action.nargs == 0 else [value])]
    more = "port = 8000" if action.dest in WITH_HTTP else ""
    options, expected = settings(tmp_path, more, *given)
    wanted = (options.model, options.model_config, expected)
    plain = _plain(value) if action.nargs != 0 else "true"
    name = action.dest.replace("_", "-") if hyphens else action.dest
    where = () if action.dest == "runtime_dir" else ("--runtime-dir", str(tmp_path))
    options, made = settings(tmp_path, f"{name} = {plain}\n{more}", runtime=where)
    assert (options.model, options.model_config, made) == wanted
    options, without = settings(tmp_path, more)
    assert (options.model, options.model_config, without) != wanted


def _plain(value: str) -> str:
    """Format a value as TOML: bare numbers, lists in brackets."""
    if value == "2,3":
        return "[2, 3]"
    return value if value.replace(".", "", 1).isdecimal() else f'"{value}"'


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        ("--tensor-parallel-size", "tensor_parallel", "2"),
        ("-tp", "tensor_parallel", "2"),
        ("--max-model-len", "context_tokens_max", "64"),
        ("--max-num-seqs", "sequences_max", "3"),
        ("--kv-cache-dtype", "kv_dtype", "int8"),
        ("--gpu-memory-utilization", "memory_share", "0.5"),
        ("--served-model-name", "name", "short"),
    ],
)
def test_options_of_other_servers_mean_the_same(tmp_path: Path, theirs: str, ours: str, value: str) -> None:
    http = ("--port", "8000")
    _, expected = settings(tmp_path, "", f"--{ours.replace('_', '-')}", value, *http)
    assert settings(tmp_path, "", theirs, value, *http)[1] == expected
    if theirs.startswith("--"):
        text = f"{theirs.removeprefix('--')} = {_plain(value)}\nport = 8000"
        assert settings(tmp_path, text)[1] == expected


@pytest.mark.parametrize("command", ["up", "serve", "run"])
def test_the_command_has_the_names_that_people_type(command: str) -> None:
    options = cli.parser().parse_args([command, "some/model", "--port", "8000"])
    assert (options.run, options.model_name, options.port) == (up.run, "some/model", 8000)


def test_http_is_named_in_one_piece_or_two(tmp_path: Path) -> None:
    def http(text: str, *arguments: str) -> tuple[str, int] | None:
        made = settings(tmp_path, text, *arguments)[1].http
        return None if made is None else (made.host, made.port)

    assert http("") is None
    assert http("", "--http", "8000") == http("", "--port", "8000") == http("http = 8000") == ("127.0.0.1", 8000)
    assert http("", "--host", "10.0.0.1") == ("10.0.0.1", up.HTTP_PORT)
    assert http("http = '10.0.0.1:81'", "--port", "82") == ("10.0.0.1", 82)  # the option takes precedence over the file


def test_api_keys_reach_the_gateway_as_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = f"sha256:{hashlib.sha256(b'secret').hexdigest()}"
    _, made = settings(tmp_path, "", "--port", "0", "--api-key", "secret", "other")
    assert made.http is not None and made.http.key_hashes[0] == expected and len(made.http.key_hashes) == 2
    monkeypatch.setenv(up.API_KEY, "secret")
    _, made = settings(tmp_path, "", "--port", "0")
    assert made.http is not None and made.http.key_hashes == (expected,)
    assert "secret" not in repr(made)


def test_an_option_given_twice_in_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"kv_bytes: is given at the top of the file and in \[worker\]"):
        settings(tmp_path, "kv_bytes = 1\n[worker]\nkv_bytes = 2")
    with pytest.raises(InvalidConfiguration, match="max-model-len: is given twice, as context_tokens_max too"):
        settings(tmp_path, "context_tokens_max = 1\nmax-model-len = 2")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


FILE = """
model = "here"
workers = 3
devices = [2, 3]
drain_s = 7.0
log_level = "debug"
log_format = "json"
log_dir = "/tmp/logs"
[worker]
kv_bytes = 4096
dtype = "float32"
[limits]
queue_max = 7
"""


def test_an_option_goes_before_the_file(tmp_path: Path) -> None:
    options, made = settings(tmp_path, FILE)
    assert (options.model, made.workers, made.devices, made.drain_s, made.stop_s) == ("here", 3, (2, 3), 7.0, 10.0)
    assert (made.log_level, made.log_format, made.log_dir) == ("debug", "json", Path("/tmp/logs"))
    assert made.worker == {"kv_bytes": 4096, "dtype": "float32"}
    arguments = ("--model-config", "llama-3.1-8b", "--workers", "1", "--blocks", "8", "--queue-max", "9")
    options, made = settings(tmp_path, FILE, *arguments, "--log-level", "error", "--devices", "0")
    assert (options.model, options.model_config) == (None, "llama-3.1-8b")
    assert (made.workers, made.devices, made.log_level, made.limits) == (1, (0,), "error", {"queue_max": 9})
    assert made.worker == {"blocks": 8, "dtype": "float32"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("colour = 1", "colour"),
        ("[worker]\nname = 'x'", "worker.name"),
        ("[worker]\ndtype = 'float99'", "worker.dtype"),
        ("workers = 'two'", "workers"),
        ("log_level = 'loud'", "log_level"),
        ("[quotas]\na = 1", "quotas"),
    ],
)
def test_a_wrong_key_of_the_file_is_named(tmp_path: Path, text: str, field: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        settings(tmp_path, text)
    assert raised.value.field.startswith(field)


@pytest.mark.parametrize(
    ("name", "words"), [("weight_dtype", "as stored in a quantised file"), ("graphs", "few prompt tokens")]
)
def test_the_help_says_what_the_worker_does(name: str, words: str) -> None:
    """The help of an option has the words with which the worker's setting is described."""
    helped = {action.dest: action.help for action in up_actions()}
    assert words in described(name)
    assert words in str(helped[name])


@pytest.mark.parametrize("name", ["device", "dtype", "weight_dtype", "kv_dtype", "state_dtype", "load_format"])
def test_a_setting_of_the_worker_is_described_with_every_choice(name: str) -> None:
    missing = [choice for choice in getattr(choices, f"{name}s".upper()) if choice not in described(name)]
    assert not missing


def described(name: str) -> str:
    """Return the description of a setting of the worker."""
    from kvforge.worker.config import WorkerConfig

    (found,) = re.findall(rf"\n {{8}}{name}: (.*?)(?=\n {{8}}\w+: |\n\s*$)", str(WorkerConfig.__doc__), re.DOTALL)
    return " ".join(found.split())
