"""`kvforge up`: a coordinator and workers in the foreground."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvforge.launch.console import ConsoleReporter
from kvforge.launch.host import check_device, check_installed, check_threads
from kvforge.launch.settings import DRAIN_S, STOP_S, WORKERS_MAX, Http, Settings, Value
from kvforge.launch.supervisor import run_up
from kvforge.launch.up_file import IN_SECTIONS, UpFile, load_up_file
from kvforge.models.store import find, pull
from kvforge.process.installation import install_command
from kvforge.process.signals import Signals
from kvforge.protocol import choices, logs
from kvforge.protocol.configuration import expand
from kvforge.protocol.errors import InvalidConfiguration, Unavailable
from kvforge.protocol.platforms import check_linux

from . import parsing
from .progress import Progress
from .up_options import MODEL, declare

HTTP_PORT = 8000
API_KEY = "KVFORGE_API_KEY"
DEFAULTS: Mapping[str, Value] = {
    "workers": 1,
    "tensor_parallel": 1,
    "drain_s": DRAIN_S,
    "stop_s": STOP_S,
    "log_level": "info",
    "log_format": "text",
}
NAMES = {
    "device": choices.DEVICES,
    "dtype": choices.DTYPES,
    "weight_dtype": choices.WEIGHT_DTYPES,
    "kv_dtype": choices.KV_DTYPES,
    "load_format": choices.LOAD_FORMATS,
}
COUNTS = ("blocks", "kv_bytes", "block_size", "sequences_max", "queue_max", "context_tokens_max")
POOL_SIZES = ("blocks", "kv_bytes", "memory_share")


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(
        subparsers,
        "up",
        run,
        "Run a coordinator and workers in the foreground; Ctrl-C drains, twice stops at once.",
        connects=False,
        aliases=["serve", "run"],
    )
    declare(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal stops it."""
    check_linux("`kvforge up`")
    file = load_up_file(options.config)
    _fill_in(options, file)
    check(options, file)
    progress = Progress(say=ConsoleReporter("json").print_line if options.log_format == "json" else None)
    with Signals() as signals:
        try:
            with signals.interrupting():
                model = _shape(options) or model_path(options.model or MODEL, options.load_format, progress)
            return run_up(settings_of(options, file, model), signals, progress.health, _hint(options))
        finally:
            progress.close()


def _fill_in(options: argparse.Namespace, file: UpFile) -> None:
    """Fill in missing options from the file, then from the defaults."""
    _one_model(options)
    if options.model is not None or options.model_config is not None:
        file = msgspec.structs.replace(file, model=None, model_config=None)
    options.host, options.port = _address(options.http, options.host, options.port, "--http", "--port and --host")
    host, port = _address(file.http, file.host, file.port, "http", "port and host")
    options.host = options.host if options.host is not None else host
    options.port = options.port if options.port is not None else port
    for name in file.__struct_fields__:
        if name not in ("http", "host", "port") and getattr(options, name, False) is None:
            given = getattr(file, name)
            setattr(options, name, DEFAULTS.get(name) if given is None else given)
    if options.load_format is None:
        options.load_format = file.worker.get("load_format")
    if isinstance(options.devices, str):
        options.devices = tuple(parsing.token_ids(options.devices, "--devices"))
    for name in ("log_dir", "gateway", "runtime_dir"):
        setattr(options, name, None if getattr(options, name) is None else expand(str(getattr(options, name))))
    for name in ("name", "api_key"):
        given = getattr(options, name)
        setattr(options, name, (given,) if isinstance(given, str) else tuple(given or ()))


def _one_model(options: argparse.Namespace) -> None:
    """Read `kvforge up MODEL` as --model. Raises InvalidConfiguration if both are given."""
    if options.model_name is not None:
        if options.model is not None:
            raise InvalidConfiguration("--model", f"is {options.model}, and MODEL is {options.model_name}: give one")
        options.model = options.model_name


def _address(
    http: str | int | None, host: str | None, port: int | None, name: str, others: str
) -> tuple[str | None, int | None]:
    """Return the host and the port of HTTP, each None if it is not given.

    Args:
        http: PORT or HOST:PORT.
        host: The host alone.
        port: The port alone.
        name: The name of `http` in errors.
        others: The names of the two parts in errors.

    Raises:
        InvalidConfiguration: It is not an address, or given twice.
    """
    if http is None:
        if port is not None and not 0 <= port < 1 << 16:
            raise InvalidConfiguration(name.replace("http", "port"), f"is {port}; it must be 0 to 65535")
        return host, port
    if host is not None or port is not None:
        raise InvalidConfiguration(name, f"sets the same as {others}: give only one")
    before, _, text = str(http).rpartition(":")
    if not text.isdecimal() or int(text) >= 1 << 16:
        raise InvalidConfiguration(name, f"is {http!r}; it is PORT or HOST:PORT, like 8000")
    return before or None, int(text)


def check(options: argparse.Namespace, file: UpFile) -> None:
    """Check the options before anything is fetched or started.

    Raises:
        InvalidConfiguration: Names the option that cannot work.
        Unavailable: The extra `worker` is not installed.
    """
    if options.endpoint is not None:
        problem = "names an existing coordinator; `kvforge up` starts its own: use --runtime-dir"
        raise InvalidConfiguration("--endpoint", problem)
    if options.memory_share is not None and not 0 < options.memory_share <= 1:
        problem = f"is {options.memory_share:g}; it must be more than 0 and at most 1"
        raise InvalidConfiguration("--memory-share", problem)
    for option in COUNTS:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise InvalidConfiguration(f"--{option.replace('_', '-')}", f"is {value}; it must be at least 1")
    if not 1 <= options.workers <= WORKERS_MAX:
        raise InvalidConfiguration("--workers", f"is {options.workers}; it must be 1 to {WORKERS_MAX}")
    if not 1 <= options.tensor_parallel <= WORKERS_MAX // options.workers:
        problem = f"is {options.tensor_parallel}; it must be 1 to {WORKERS_MAX}, all workers' processes together"
        raise InvalidConfiguration("--tensor-parallel", problem)
    negative = [device for device in options.devices or () if device < 0]
    if negative:
        problem = f"must be indices from 0, such as 0,1, not {negative[0]}"
        raise InvalidConfiguration("--devices", problem)
    if options.threads is not None:
        check_threads("--threads", options.threads)
    if options.model is not None and options.model_config is not None:
        problem = "names a shape for random weights, and --model names weights: give only one"
        raise InvalidConfiguration("--model-config", problem)
    if options.model_config is not None and options.load_format not in (None, "dummy"):
        problem = f"a shape has no weights: use --load-format dummy, not {options.load_format}, or give --model"
        raise InvalidConfiguration("--model-config", problem)
    for name, known in NAMES.items():
        if (value := file.worker.get(name, known[0])) not in known:
            raise InvalidConfiguration(f"worker.{name}", f"is {value!r}; it must be one of {', '.join(known)}")
    logs.check(options.log_level, options.log_format)
    http_of(options)
    device = options.device or str(file.worker.get("device", "auto"))
    check_device("--device", device)
    if device == "cpu" and "memory_share" in _pool_size(options, file):
        raise InvalidConfiguration("--memory-share", "applies to a GPU's memory; with --device cpu use --kv-bytes")
    check_installed()


def _shape(options: argparse.Namespace) -> Path | None:
    """Return the path in --model-config, for the worker to find (shapes come with it). None if it is not given."""
    if options.model_config is None:
        return None
    options.load_format = "dummy"
    return Path(options.model_config)


def model_path(name: str, load_format: str | None, progress: Progress) -> Path:
    """Return the model's path on this machine, fetching it if needed. Random weights need only a configuration."""
    if load_format == "dummy":
        return find(name, weights=False)
    try:
        return pull(name, progress=lambda phase, fraction: progress.step(name, phase, fraction))
    finally:
        progress.close()


def http_of(options: argparse.Namespace) -> Http | None:
    """Return the gateway that the options ask for, or None.

    Raises:
        InvalidConfiguration: Names a wrong option.
        Unavailable: The extra `gateway` is not installed.
    """
    if options.host is None and options.port is None:
        given = [name for name in ("http_processes", "gateway", "name", "api_key") if getattr(options, name)]
        if given:
            raise InvalidConfiguration(f"--{given[0].replace('_', '-')}", "needs --http or --port")
        return None
    processes = options.http_processes if options.http_processes is not None else 1
    if not 1 <= processes <= WORKERS_MAX:
        raise InvalidConfiguration("--http-processes", f"is {processes}; it must be 1 to {WORKERS_MAX}")
    if any(find_spec(name) is None for name in ("uvicorn", "starlette", "httptools")):
        raise Unavailable(f"--http needs the extra `gateway`: {install_command('gateway')}")
    keys = options.api_key or tuple(os.environ.get(API_KEY, "").split())
    return Http(
        options.host or "127.0.0.1",
        HTTP_PORT if options.port is None else options.port,
        processes,
        options.name or (),
        options.gateway,
        named=bool(options.name),
        key_hashes=tuple(f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in keys),
    )


def _pool_size(options: argparse.Namespace, file: UpFile) -> dict[str, Value]:
    """Return the size of the pool. It has several names; an option of one replaces all in the file."""
    given = {name: getattr(options, name) for name in POOL_SIZES if getattr(options, name) is not None}
    return given or {name: value for name, value in file.worker.items() if name in POOL_SIZES}


def settings_of(options: argparse.Namespace, file: UpFile, model: Path) -> Settings:
    """Return the settings that the options and the file name.

    Raises:
        InvalidConfiguration: Names a wrong setting.
    """
    given = vars(options)

    def chosen(section: str, in_file: Mapping[str, Value]) -> dict[str, Value]:
        return {**in_file, **{name: given[name] for name in IN_SECTIONS[section] if given[name] is not None}}

    worker = {name: value for name, value in file.worker.items() if name not in POOL_SIZES}
    state = {name: given[name] for name in ("state_dir", "durability") if given[name] is not None}

    return Settings(
        model=model,
        runtime_dir=parsing.runtime_dir(options),
        workers=options.workers,
        tensor_parallel=options.tensor_parallel,
        threads=options.threads,
        http=http_of(options),
        devices=tuple(options.devices or ()),
        worker={**chosen("worker", worker), **_pool_size(options, file)},
        limits=chosen("limits", file.limits),
        cache=chosen("cache", file.cache),
        schedule=file.schedule,
        journal=file.journal,
        kv_events=file.kv_events,
        state=state,
        fresh=bool(options.fresh),
        quotas=file.quotas,
        tcp=file.tcp,
        access=file.access,
        log_level=options.log_level,
        log_format=options.log_format,
        log_dir=options.log_dir,
        drain_s=options.drain_s,
        stop_s=options.stop_s,
    )


def _hint(options: argparse.Namespace) -> str:
    where = f"--runtime-dir {shlex.quote(str(options.runtime_dir))} " if options.runtime_dir is not None else ""
    return f'kvforge {where}generate "Why is the sky blue?" --stream'
