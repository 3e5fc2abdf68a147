"""kvforge up: a coordinator and workers in the foreground."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from kvforge.launch.host import check_device, check_installed, check_threads
from kvforge.launch.settings import DRAIN_S, STOP_S, WORKERS_MAX, Http, Settings, Value
from kvforge.launch.supervisor import run_up
from kvforge.launch.up_file import UpFile, load_up_file
from kvforge.launch.voice import Voice
from kvforge.models.store import find, pull
from kvforge.process.installation import install_command
from kvforge.process.signals import Signals
from kvforge.protocol import choices, logs
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

from . import parsing
from .progress import Progress

MODEL = "smollm2-135m"
UP_OPTIONS = (
    "model",
    "model_config",
    "workers",
    "tensor_parallel",
    "devices",
    "threads",
    "drain_s",
    "stop_s",
    "log_dir",
    "log_level",
    "log_format",
)
WORKER_OPTIONS = (
    "device",
    "dtype",
    "weight_dtype",
    "kv_dtype",
    "kv_bytes",
    "blocks",
    "load_format",
    "attention",
    "kernels",
    "graphs",
    "context_tokens_max",
)
NAMES = {
    "device": choices.DEVICES,
    "dtype": choices.DTYPES,
    "weight_dtype": choices.WEIGHT_DTYPES,
    "kv_dtype": choices.KV_DTYPES,
    "load_format": choices.LOAD_FORMATS,
}
COUNTS = ("blocks", "kv_bytes", "block_size", "sequences_max", "queue_max", "context_tokens_max")


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = parsing.add(
        subparsers, "up", run, "Run a coordinator and workers in the foreground; Ctrl-C drains, twice stops at once."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML: these options by name, [worker], [limits], [schedule], ..."
    )
    parser.add_argument("--model", help=f"{MODEL}, a file, a folder or a Hugging Face name [{MODEL}]")
    parser.add_argument("--workers", type=int, metavar="N", help="[1]")
    parser.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="processes that compute the model together, of each worker [1]"
    )
    parser.add_argument("--device", choices=choices.DEVICES, help="[auto]")
    parser.add_argument("--devices", metavar="LIST", help="device index of each process, like 0,1 [0,1,2,...]")
    parser.add_argument("--dtype", choices=choices.DTYPES, help="of weights and activations [auto]")
    parser.add_argument(
        "--weight-dtype",
        choices=choices.WEIGHT_DTYPES,
        help="of weights on a CPU; auto: as a GGUF file has them [dtype]",
    )
    parser.add_argument("--kv-dtype", choices=choices.KV_DTYPES, help="of the KV cache [auto]")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--kv-bytes", type=int, metavar="N", help="size of each worker's KV pool in bytes")
    size.add_argument("--blocks", type=int, metavar="N", help="size of each worker's KV pool in blocks")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens in a block [16]")
    parser.add_argument("--load-format", choices=choices.LOAD_FORMATS, help="dummy: random weights [auto]")
    parser.add_argument(
        "--model-config", metavar="NAME", help="a known shape for random weights, like llama-3.1-8b; instead of --model"
    )
    parser.add_argument("--context-tokens-max", type=int, metavar="N", help="longest sequence [what the model has]")
    parser.add_argument("--attention", choices=("auto", "triton", "reference"), help="its kernels [auto]")
    parser.add_argument("--kernels", choices=("auto", "reference"), help="reference: plain torch throughout [auto]")
    parser.add_argument("--graphs", choices=("auto", "on", "off"), help="decode steps from captured graphs [auto]")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each worker [cores / workers]")
    parser.add_argument("--sequences-max", type=int, metavar="N", help="requests that may run at once [256]")
    parser.add_argument("--queue-max", type=int, metavar="N", help="requests that may wait [1024]")
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="OpenAI's and Anthropic's APIs, metrics and a live page there; 0: any port",
    )
    parser.add_argument("--http-processes", type=int, metavar="N", help="that serve it [1]")
    parser.add_argument("--gateway", type=Path, metavar="FILE", help="gateway.toml: keys, limits, ...; with --http")
    parser.add_argument("--drain-s", type=parsing.seconds, metavar="S", help=f"to drain [{DRAIN_S:g}]")
    parser.add_argument("--stop-s", type=parsing.seconds, metavar="S", help=f"then to end [{STOP_S:g}]")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="logs of the processes; else on standard error")
    parser.add_argument("--log-level", choices=logs.LEVELS, help="[info]")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="of standard error and logs [text]")


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    file = load_up_file(options.config)
    _fill_in(options, file)
    check(options, file)
    progress = Progress(say=Voice("json").say if options.log_format == "json" else None)
    with Signals() as signals:
        try:
            with signals.interrupting():
                model = _shape(options) or model_path(options.model or MODEL, options.load_format, progress)
            return run_up(settings_of(options, file, model), signals, progress.health, _hint(options))
        finally:
            progress.close()


def _fill_in(options: argparse.Namespace, file: UpFile) -> None:
    """What the options do not say, the file does, else the defaults."""
    if options.model is not None or options.model_config is not None:
        file = msgspec.structs.replace(file, model=None, model_config=None)
    defaults: dict[str, Value] = {"workers": 1, "tensor_parallel": 1, "drain_s": DRAIN_S, "stop_s": STOP_S}
    defaults |= {"log_level": "info", "log_format": "text"}
    for name in UP_OPTIONS:
        if getattr(options, name) is None:
            said = getattr(file, name)
            setattr(options, name, defaults.get(name) if said is None else said)
    if options.load_format is None:
        options.load_format = file.worker.get("load_format")
    if isinstance(options.devices, str):
        options.devices = tuple(parsing.token_ids(options.devices, "--devices"))
    options.log_dir = None if options.log_dir is None else Path(options.log_dir)


def check(options: argparse.Namespace, file: UpFile) -> None:
    """Refuses what cannot work, in the option's own words, before anything is fetched or started.

    Raises InvalidConfiguration, or Unavailable where the extra `worker` is not installed.
    """
    for option in COUNTS:
        value = getattr(options, option)
        if value is not None and value < 1:
            raise InvalidConfiguration(f"--{option.replace('_', '-')}", f"is {value}; it must be at least 1")
    if not 1 <= options.workers <= WORKERS_MAX:
        raise InvalidConfiguration("--workers", f"is {options.workers}; it must be 1 to {WORKERS_MAX}")
    if not 1 <= options.tensor_parallel <= WORKERS_MAX // options.workers:
        problem = f"is {options.tensor_parallel}; it must be 1 to {WORKERS_MAX}, all workers' processes together"
        raise InvalidConfiguration("--tensor-parallel", problem)
    if any(device < 0 for device in options.devices or ()):
        raise InvalidConfiguration("--devices", "are indices from 0")
    if options.threads is not None:
        check_threads("--threads", options.threads)
    if options.model is not None and options.model_config is not None:
        problem = "names a shape to be filled with random weights, and --model names weights: give one of them"
        raise InvalidConfiguration("--model-config", problem)
    if options.model_config is not None and options.load_format not in (None, "dummy"):
        problem = f"a shape has no weights: use --load-format dummy, not {options.load_format}, or give --model"
        raise InvalidConfiguration("--model-config", problem)
    for name, known in NAMES.items():
        if (said := file.worker.get(name, known[0])) not in known:
            raise InvalidConfiguration(f"worker.{name}", f"is {said!r}; it must be one of {', '.join(known)}")
    logs.check(options.log_level, options.log_format)
    http_of(options)
    check_device("--device", options.device or str(file.worker.get("device", "auto")))
    check_installed()


def _shape(options: argparse.Namespace) -> Path | None:
    """What --model-config names, for the worker to find: shapes come with it. None where it is not given."""
    if options.model_config is None:
        return None
    options.load_format = "dummy"
    return Path(options.model_config)


def model_path(name: str, load_format: str | None, progress: Progress) -> Path:
    """The model on this machine, fetched if need be. Weights made up at random need only a configuration."""
    if load_format == "dummy":
        return find(name, weights=False)
    try:
        return pull(name, progress=lambda phase, fraction: progress.step(name, phase, fraction))
    finally:
        progress.close()


def http_of(options: argparse.Namespace) -> Http | None:
    """The gateway that the options ask for. Raises InvalidConfiguration, or Unavailable without the extra `gateway`."""
    if options.http is None:
        for name in ("http_processes", "gateway"):
            if getattr(options, name) is not None:
                raise InvalidConfiguration(f"--{name.replace('_', '-')}", "comes with --http")
        return None
    host, _, port = options.http.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise InvalidConfiguration("--http", f"is {options.http!r}; it is PORT or HOST:PORT, like 8000")
    processes = options.http_processes if options.http_processes is not None else 1
    if not 1 <= processes <= WORKERS_MAX:
        raise InvalidConfiguration("--http-processes", f"is {processes}; it must be 1 to {WORKERS_MAX}")
    if any(find_spec(name) is None for name in ("uvicorn", "starlette", "httptools")):
        raise Unavailable(f"--http needs the extra `gateway`: {install_command('gateway')}")
    name = str(options.model or options.model_config or MODEL)
    config = options.gateway.absolute() if options.gateway is not None else None
    return Http(host or "127.0.0.1", int(port), processes, (name,), config)


def settings_of(options: argparse.Namespace, file: UpFile, model: Path) -> Settings:
    """The settings that the options and the file name. Raises InvalidConfiguration."""
    given = vars(options)

    def chosen(said: Mapping[str, Value], *names: str) -> dict[str, Value]:
        return {**said, **{name: given[name] for name in names if given[name] is not None}}

    # The size of the pool has two names: an option of either replaces both of the file's.
    sized = options.blocks is not None or options.kv_bytes is not None
    worker = {name: value for name, value in file.worker.items() if not (sized and name in ("blocks", "kv_bytes"))}

    return Settings(
        model=model,
        runtime_dir=parsing.runtime_dir(options),
        workers=options.workers,
        tensor_parallel=options.tensor_parallel,
        threads=options.threads,
        http=http_of(options),
        devices=tuple(options.devices or ()),
        worker=chosen(worker, *WORKER_OPTIONS),
        limits=chosen(file.limits, "sequences_max", "queue_max"),
        cache=chosen(file.cache, "block_size"),
        schedule=file.schedule,
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
