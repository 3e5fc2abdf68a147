"""The command line options, in the groups of the help text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvforge.loadtest.load.arrivals import FORMS
from kvforge.loadtest.load.options import PROMPTS, RANDOM
from kvforge.loadtest.load.traces import NAMES
from kvforge.process.parser import Parser
from kvforge.protocol.errors import InvalidRequest
from kvforge.routing import POLICIES, PREFIX

DAY_S = 86_400.0
TABLE = "h200-8b"
CLIENTS_MAX = 4096
PROCESSES_MAX = 64
CONCURRENCY_MAX = 100_000
STATUS = """exit status: 0 valid result; 1 invalid result (the driver was late, requests failed or timed out, or an
answer changed: see the report); 2 usage error; 3 server unavailable; 4 no answer in time; 130 interrupted (the report
covers what was measured so far). Refused requests do not count as failed."""
EXAMPLES = """
  kvforge loadtest --trace conversation --rate-scale 0.5 --duration 60 --out report/
  kvforge loadtest --arrivals poisson:20 --input lognormal:512,0.8 --output 128 --clients 50
  kvforge loadtest --closed 64 --prompts sonnet --compare baseline.json
  kvforge loadtest --url http://host:8000/v1 --model NAME --rate 10
  kvforge loadtest --no-model h200-8b --workers 4 --sweep rate=50,100,200
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = Parser(
        prog="kvforge loadtest",
        description="Drive a server with a load and report what its users would have measured.",
        epilog=f"examples:{EXAMPLES}\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _when(top.add_argument_group("arrivals"))
    _what(top.add_argument_group("requests"))
    _where(top.add_argument_group("server"))
    _driver(top.add_argument_group("driver"))
    _report(top.add_argument_group("report"))
    return top


def _when(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rate", type=float, metavar="R", help="requests per second with exponential gaps: --arrivals poisson:R")
    add("--arrivals", metavar="SPEC", help=f"{FORMS}: R requests per second")
    add("--trace", metavar="NAME", help=f"replay {', '.join(NAMES)}; or a file, or FORMAT:FILE")
    add("--closed", type=_count, metavar="N", help="closed loop: N sessions at a time")
    add(
        "--requests",
        type=_count,
        metavar="N",
        help="number of sessions (one request each, unless the trace has several turns)",
    )
    add("--duration", type=_seconds, metavar="S", help="drop requests due later than this, also within sessions")
    add("--rate-scale", type=float, default=1.0, metavar="F", help="replay a trace's arrivals F times as fast [1]")
    add("--think-scale", type=float, default=1.0, metavar="F", help="scale a trace's think times by F [1]")
    add("--sweep", metavar="NAME=V,V", help="one run for each value of rate, rate-scale or closed; finds the knee")


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--input", metavar="TOKENS", help="prompt length: N, LOW:HIGH or lognormal:MEDIAN,SIGMA [128]")
    add("--output", metavar="TOKENS", help="output length, as for --input [64]")
    add("--prompts", default=RANDOM, metavar="NAME", help=f"{', '.join(PROMPTS)} [{RANDOM}]")
    add("--prefix", type=int, default=0, metavar="TOKENS", help="length of the prefix that all prompts share [0]")
    add("--length-scale", type=float, default=1.0, metavar="F", help="scale all lengths of a trace by F [1]")
    add("--context-max", type=_count, metavar="TOKENS", help="shorten longer requests [the model's context]")
    add("--vocab", type=_count, metavar="N", help="token ids are below this [the model's vocabulary]")
    add("--tokenizer", metavar="MODEL", help="tokenizer of text prompts [the model's, if it is on this machine]")
    add("--tenant", default="default", metavar="NAME", help="the tenant, or shares of several: a:0.7,b:0.3 [default]")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy [0]")
    add("--seed", type=int, default=0, metavar="N", help="seed of arrivals, prompts and sampling [0]")


def _where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--endpoint", metavar="URL", help="the coordinator, as ipc://PATH or tcp://HOST:PORT [KVFORGE_ENDPOINT]")
    add("--runtime-dir", type=Path, metavar="DIR", help="the coordinator's runtime directory [KVFORGE_RUNTIME_DIR]")
    add("--server-key", metavar="KEY", help="for tcp://, the coordinator's public key [KVFORGE_SERVER_KEY]")
    add("--key-file", metavar="FILE", help="for tcp://, this client's key pair [KVFORGE_KEY_FILE]")
    add("--url", metavar="URL", help="drive an OpenAI-compatible server at http://HOST:PORT/v1 instead")
    add("--model", metavar="NAME", help="the model of that server [its only model]")
    add("--api", choices=("completions", "chat"), default="completions", help="the API of that server [completions]")
    add("--text", action="store_true", help="send that server prompts as text, not as token ids")
    add("--no-extra", action="store_true", help="send that server no extensions of OpenAI's API (ignore_eos)")
    add(
        "--no-model",
        nargs="?",
        const=TABLE,
        metavar="TABLE",
        help="start workers without a model that only simulate step times: h200-8b, h200-70b or a file",
    )
    add("--workers", type=_count, default=1, metavar="N", help="number of simulated workers [1]")
    add("--blocks", type=int, default=0, metavar="N", help="KV blocks of each [as many as its memory holds]")
    add("--replicas", type=_count, default=1, metavar="N", help="number of coordinators, each with its workers [1]")
    add("--policy", choices=POLICIES, default=PREFIX, help=f"routing policy of the replicas [{PREFIX}]")
    add("--time-scale", type=float, default=1.0, metavar="F", help="scale the step times by F [1]")
    add(
        "--kill",
        action="append",
        default=[],
        metavar="NAME:TIME",
        help="kill processes: worker:10s,coordinator:30s or worker:every=20s",
    )


def _driver(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--clients", type=_count, default=1, metavar="N", help="number of client connections [1]")
    add("--processes", type=_count, metavar="N", help="number of driver processes [as many as the rate needs]")
    add(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="time limit from the intended arrival to the end [600]",
    )
    add(
        "--concurrency-max",
        type=_count,
        default=10_000,
        metavar="N",
        help="requests in flight; further ones wait [10000]",
    )
    add("--no-proof", action="store_true", help="do not drive the null server before the run")


def _report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--slo", metavar="LIST", help="service level objective, such as ttft=500ms,itl=50ms,e2e=10s")
    add(
        "--warmup",
        type=_seconds_or_none,
        default=0.0,
        metavar="S",
        help="exclude the first seconds from the result [0]",
    )
    add("--windows", type=_count, default=5, metavar="N", help="number of windows for the noise estimate [5]")
    add("--out", type=Path, metavar="FOLDER", help="write an HTML page, its pictures and result.json here")
    add("--compare", type=Path, metavar="FILE", help="compare with an earlier result.json")
    add("--quiet", action="store_true", help="show no progress")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and validate each option on its own.

    Raises:
        InvalidRequest: Names the option.
    """
    options = parser().parse_args(argv)
    bounds = (("clients", CLIENTS_MAX), ("processes", PROCESSES_MAX), ("concurrency_max", CONCURRENCY_MAX))
    for name, most in bounds:
        value = getattr(options, name)
        if value is not None and value > most:
            raise InvalidRequest(name.replace("_", "-"), f"is {value}; it must be at most {most}")
    if options.seed < 0:
        raise InvalidRequest("seed", f"is {options.seed}; it must be 0 or more")
    if not 0 <= options.temperature <= 100:
        raise InvalidRequest("temperature", f"is {options.temperature:g}; it must be 0 to 100")
    _one_of(options, "rate", "arrivals")
    _one_of(options, "no_model", "endpoint", "runtime_dir", "url")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        # Checked before the run, not after an hour of measuring.
        raise InvalidRequest("out", f"{options.out} is a file; it must be a folder or not exist yet")
    if options.url is None and (options.model or options.text or options.no_extra or options.api != "completions"):
        raise InvalidRequest("url", "is missing: --model, --api, --text and --no-extra apply to the server at --url")
    if options.replicas > 1 and options.no_model is None:
        raise InvalidRequest("replicas", "requires --no-model; use --url to measure a gateway over running replicas")
    if options.replicas > 1 and options.kill:
        raise InvalidRequest("kill", "supports one coordinator and its workers, not --replicas")
    if options.kill and options.url is not None:
        raise InvalidRequest("kill", "supports kvforge's processes on this machine, not a server at --url")
    return options


def _one_of(options: argparse.Namespace, *names: str) -> None:
    given = [name for name in names if getattr(options, name) is not None]
    if len(given) > 1:
        first, second = (name.replace("_", "-") for name in given[:2])
        raise InvalidRequest(second, f"cannot be combined with --{first}")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text.removesuffix("s"))
    if not 0 < value <= DAY_S:
        raise ValueError
    return value


def _seconds_or_none(text: str) -> float:
    return float(text.removesuffix("s")) and _seconds(text)


_count.__name__ = "number (1 or more)"
_seconds.__name__ = "number of seconds (above 0, at most a day)"
_seconds_or_none.__name__ = "number of seconds (0 to a day)"
