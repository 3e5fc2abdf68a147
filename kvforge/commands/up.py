"""kvforge up: a coordinator and workers in the foreground."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from protocol import logs
from protocol.errors import InvalidConfiguration

from ..models import find, pull
from ..progress import Progress
from ..settings import DRAIN_S, STOP_S, Settings
from ..signals import Signals
from ..up import run_up
from ..voice import Voice
from . import common


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = common.add(
        subparsers, "up", run, "Run a coordinator and workers in the foreground; Ctrl-C drains, twice stops at once."
    )
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m, a file, a folder or a Hugging Face name")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="[1]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "hip"), help="[auto]")
    parser.add_argument(
        "--devices", default="", metavar="LIST", help="device index of each worker, like 0,1 [0,1,2,...]"
    )
    parser.add_argument("--dtype", help="of weights and activations: float32, bfloat16, ... [auto]")
    parser.add_argument("--kv-dtype", help="of the KV cache [auto]")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--kv-bytes", type=int, metavar="N", help="size of each worker's KV pool in bytes")
    size.add_argument("--blocks", type=int, metavar="N", help="size of each worker's KV pool in blocks")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens in a block [16]")
    parser.add_argument("--load-format", help="auto, or dummy for random weights from a config.json [auto]")
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
    parser.add_argument("--drain-s", type=common.seconds, default=DRAIN_S, metavar="S", help=f"to drain [{DRAIN_S:g}]")
    parser.add_argument("--stop-s", type=common.seconds, default=STOP_S, metavar="S", help=f"then to end [{STOP_S:g}]")
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="logs of the processes; else on standard error")
    parser.add_argument("--log-level", default="info", choices=logs.LEVELS)
    parser.add_argument("--log-format", default="text", choices=logs.FORMATS, help="of standard error and logs [text]")


def run(options: argparse.Namespace) -> int:
    """Serves until it is told to stop."""
    progress = Progress(say=Voice("json").say if options.log_format == "json" else None)
    with Signals() as signals:
        try:
            with signals.interrupting():
                model = known_shape(options) or model_path(options.model, options.load_format, progress)
            return run_up(settings_of(options, model), signals, progress.health, _hint(options))
        finally:
            progress.close()


def known_shape(options: argparse.Namespace) -> Path | None:
    """What --model-config names, for the worker to find: shapes come with it. None where it is not given.

    Raises InvalidConfiguration where weights are asked for, which a shape has none of.
    """
    if options.model_config is None:
        return None
    if options.load_format not in (None, "dummy"):
        problem = f"a shape has no weights: use --load-format dummy, not {options.load_format}, or give --model"
        raise InvalidConfiguration("model_config", problem)
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


def settings_of(options: argparse.Namespace, model: Path) -> Settings:
    """The settings that the options name. Raises InvalidConfiguration."""
    given = vars(options)

    def chosen(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if given[name] is not None}

    return Settings(
        model=model,
        runtime_dir=common.runtime_dir(options),
        workers=options.workers,
        threads=options.threads,
        devices=tuple(common.token_ids(options.devices, "devices")),
        worker=chosen(
            "device",
            "dtype",
            "kv_dtype",
            "kv_bytes",
            "blocks",
            "load_format",
            "attention",
            "kernels",
            "graphs",
            "context_tokens_max",
        ),
        limits=chosen("sequences_max", "queue_max"),
        cache=chosen("block_size"),
        log_level=options.log_level,
        log_format=options.log_format,
        log_dir=options.log_dir,
        drain_s=options.drain_s,
        stop_s=options.stop_s,
    )


def _hint(options: argparse.Namespace) -> str:
    where = f"--runtime-dir {shlex.quote(str(options.runtime_dir))} " if options.runtime_dir is not None else ""
    return f'kvforge {where}generate "Why is the sky blue?" --stream'
