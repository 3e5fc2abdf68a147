"""The options of `kvforge up`, including the spellings of other servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvforge.launch.settings import DRAIN_S, STOP_S
from kvforge.protocol import choices, logs

from . import parsing

MODEL = "smollm2-135m"
DURABILITIES = ("process", "power", "none")


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare all options. The default is None, so that a file may set the option."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML: these options by name, [worker], [limits], [schedule], ..."
    )
    _model(parser)
    _memory(parser)
    _http(parser)
    _state(parser)
    parser.add_argument("--drain-s", type=parsing.seconds, metavar="S", help=f"limit for draining [{DRAIN_S:g}]")
    parser.add_argument(
        "--stop-s", type=parsing.seconds, metavar="S", help=f"limit for stopping after that [{STOP_S:g}]"
    )
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="folder for the processes' logs [standard error]")
    parser.add_argument("--log-level", choices=logs.LEVELS, help="[info]")
    parser.add_argument("--log-format", choices=logs.FORMATS, help="format of standard error and logs [text]")


def _model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=f"{MODEL}, a file, a folder or a Hugging Face name [{MODEL}]")
    parser.add_argument("--workers", type=int, metavar="N", help="[1]")
    parser.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        "-tp",
        type=int,
        metavar="N",
        help="processes per worker that compute the model together [1]",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        default=None,
        help="divide the experts of a mixture among these processes, instead of each expert",
    )
    parser.add_argument("--device", choices=choices.DEVICES, help="[auto]")
    parser.add_argument("--devices", metavar="LIST", help="device index of each process, like 0,1 [0,1,2,...]")
    parser.add_argument("--dtype", choices=choices.DTYPES, help="type of weights and activations [auto]")
    parser.add_argument(
        "--weight-dtype",
        choices=choices.WEIGHT_DTYPES,
        help="type of the multiplied weights; fp8: on a GPU; auto: on a CPU, as stored in a quantised file [dtype]",
    )
    parser.add_argument("--load-format", choices=choices.LOAD_FORMATS, help="dummy: random weights [auto]")
    parser.add_argument(
        "--model-config", metavar="NAME", help="a known shape for random weights, like llama-3.1-8b; instead of --model"
    )
    parser.add_argument("--attention", choices=("auto", "triton", "reference"), help="attention kernels [auto]")
    parser.add_argument("--kernels", choices=("auto", "reference"), help="reference: plain torch throughout [auto]")
    parser.add_argument(
        "--graphs",
        choices=("auto", "on", "off"),
        help="run steps of decodes and few prompt tokens from captured graphs [auto]",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of each worker [cores / workers]")


def _memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kv-dtype", "--kv-cache-dtype", choices=choices.KV_DTYPES, help="type of the KV cache [auto]")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--kv-bytes", type=parsing.size, metavar="SIZE", help="size of each worker's KV pool, like 4G or 512MiB"
    )
    size.add_argument("--blocks", type=int, metavar="N", help="size of each worker's KV pool in blocks")
    size.add_argument(
        "--memory-share",
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        help="share of a GPU's memory for weights, steps and KV pool, 0 to 1 [all free memory]",
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens in a block [16]")
    parser.add_argument(
        "--context-tokens-max",
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest sequence [the model's limit, at most 512 blocks]",
    )
    parser.add_argument(
        "--sequences-max", "--max-num-seqs", type=int, metavar="N", help="requests that may run at once [256]"
    )
    parser.add_argument("--queue-max", type=int, metavar="N", help="requests that may wait [1024]")


def _http(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--http",
        metavar="[HOST:]PORT",
        help="serve OpenAI's and Anthropic's APIs, metrics and a live page; 0: any port",
    )
    parser.add_argument("--port", type=int, metavar="PORT", help="the same as --http PORT")
    parser.add_argument("--host", help="address for --port; alone: port 8000 [127.0.0.1]")
    parser.add_argument("--http-processes", type=int, metavar="N", help="processes that serve HTTP [1]")
    parser.add_argument(
        "--name",
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's names in HTTP requests [the worker's name]",
    )
    parser.add_argument(
        "--api-key", nargs="+", metavar="KEY", help="HTTP requests must send one of these [KVFORGE_API_KEY]"
    )
    parser.add_argument(
        "--gateway", type=Path, metavar="FILE", help="gateway.toml with keys, limits, ...; requires HTTP"
    )


def _state(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="folder of the journal")
    parser.add_argument(
        "--durability", choices=DURABILITIES, help="accepted requests survive a crash or a power cut [process]"
    )
    parser.add_argument(
        "--fresh", action="store_true", default=None, help="discard requests and sequences of an earlier run"
    )
