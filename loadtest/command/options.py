"""Every option of the harness, in the groups that its help shows."""

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
STATUS = """exit status: 0 measured, and the result is valid; 1 measured, but it does not count (the driver was late,
requests failed or ran out of time, a promise was broken: the report says which); 2 wrong usage; 3 nobody there;
4 nothing was answered in time; 130 interrupted (the report is of what was measured so far). A refused request is not
a failed one."""
EXAMPLES = """
  kvforge loadtest --trace conversation --rate-scale 0.5 --duration 60 --out report/
  kvforge loadtest --arrivals poisson:20 --input lognormal:512,0.8 --output 128 --clients 50
  kvforge loadtest --closed 64 --prompts sonnet --compare baseline.json
  kvforge loadtest --url http://host:8000/v1 --model NAME --rate 10
  kvforge loadtest --no-model h200-8b --workers 4 --sweep rate=50,100,200
"""


def parser() -> argparse.ArgumentParser:
    """All of them."""
    top = Parser(
        prog="kvforge loadtest",
        description="Put a load on a server and report what its users would have measured.",
        epilog=f"examples:{EXAMPLES}\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _when(top.add_argument_group("when requests come"))
    _what(top.add_argument_group("what they ask for"))
    _where(top.add_argument_group("who serves"))
    _driver(top.add_argument_group("the driver"))
    _report(top.add_argument_group("what is reported"))
    return top


def _when(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--rate", type=float, metavar="R", help="so many requests a second, at exponential gaps: --arrivals poisson:R")
    add("--arrivals", metavar="SPEC", help=f"{FORMS}: R requests a second")
    add("--trace", metavar="NAME", help=f"replay {', '.join(NAMES)}; or a file, or FORMAT:FILE")
    add("--closed", type=_count, metavar="N", help="closed loop: N at a time, the next when one has ended")
    add("--requests", type=_count, metavar="N", help="so many sessions (of one request, unless a trace says more)")
    add("--duration", type=_seconds, metavar="S", help="nothing is due later than this, of a session neither")
    add("--rate-scale", type=float, default=1.0, metavar="F", help="a trace's arrivals, F times as fast [1]")
    add("--think-scale", type=float, default=1.0, metavar="F", help="its think times, times F [1]")
    add("--sweep", metavar="NAME=V,V", help="one run for each value of rate, rate-scale or closed; finds the knee")


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--input", metavar="TOKENS", help="prompt length: N, LOW:HIGH or lognormal:MEDIAN,SIGMA [128]")
    add("--output", metavar="TOKENS", help="tokens to generate, likewise [64]")
    add("--prompts", default=RANDOM, metavar="NAME", help=f"{', '.join(PROMPTS)} [{RANDOM}]")
    add("--prefix", type=int, default=0, metavar="TOKENS", help="tokens that all prompts begin with [0]")
    add("--length-scale", type=float, default=1.0, metavar="F", help="one factor for all lengths of a trace [1]")
    add("--context-max", type=_count, metavar="TOKENS", help="longer requests are shortened [the model's]")
    add("--vocab", type=_count, metavar="N", help="token ids are below this [the model's vocabulary]")
    add("--tokenizer", metavar="MODEL", help="makes token ids of prompts that are text [the model's, where it is here]")
    add("--tenant", default="default", metavar="NAME", help="whose requests they are, or shares: a:0.7,b:0.3 [default]")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy [0]")
    add("--seed", type=int, default=0, metavar="N", help="of arrivals, prompts and draws [0]")


def _where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--endpoint", metavar="URL", help="the coordinator, as ipc://PATH or tcp://HOST:PORT [KVFORGE_ENDPOINT]")
    add("--runtime-dir", type=Path, metavar="DIR", help="of the coordinator [KVFORGE_RUNTIME_DIR]")
    add("--server-key", metavar="KEY", help="for tcp://, its public key [KVFORGE_SERVER_KEY]")
    add("--key-file", metavar="FILE", help="for tcp://, our own keys [KVFORGE_KEY_FILE]")
    add("--url", metavar="URL", help="any OpenAI-compatible server, as http://HOST:PORT/v1, instead")
    add("--model", metavar="NAME", help="of that server [the only one it has]")
    add("--api", choices=("completions", "chat"), default="completions", help="of that server [completions]")
    add("--text", action="store_true", help="send prompts as text there, not as token ids")
    add("--no-extra", action="store_true", help="send it no fields that OpenAI's own does not have (ignore_eos)")
    add(
        "--no-model",
        nargs="?",
        const=TABLE,
        metavar="TABLE",
        help="start workers that only take their time: h200-8b, h200-70b or a file",
    )
    add("--workers", type=_count, default=1, metavar="N", help="so many of these [1]")
    add("--blocks", type=int, default=0, metavar="N", help="KV blocks of each [what its memory has room for]")
    add("--replicas", type=_count, default=1, metavar="N", help="so many coordinators, each with its workers [1]")
    add("--policy", choices=POLICIES, default=PREFIX, help=f"which of the replicas gets a request [{PREFIX}]")
    add("--time-scale", type=float, default=1.0, metavar="F", help="they take F times as long [1]")
    add(
        "--kill", action="append", default=[], metavar="WHO:TIME", help="worker:10s,coordinator:30s or worker:every=20s"
    )


def _driver(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--clients", type=_count, default=1, metavar="N", help="connections that the requests come from [1]")
    add("--processes", type=_count, metavar="N", help="driver processes [as many as the rate needs]")
    add("--timeout", type=_seconds, default=600.0, metavar="S", help="from the intended arrival to the end [600]")
    add("--concurrency-max", type=_count, default=10_000, metavar="N", help="under way at once; more wait [10000]")
    add("--no-proof", action="store_true", help="do not drive the null server before the run")


def _report(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--slo", metavar="LIST", help="what counts as served well, as ttft=500ms,itl=50ms,e2e=10s")
    add("--warmup", type=_seconds_or_none, default=0.0, metavar="S", help="the first seconds are not measured [0]")
    add("--windows", type=_count, default=5, metavar="N", help="parts of the run that the noise is told from [5]")
    add("--out", type=Path, metavar="FOLDER", help="a page, its pictures and result.json are written here")
    add("--compare", type=Path, metavar="FILE", help="an earlier result.json, to stand beside this one")
    add("--quiet", action="store_true", help="no progress while it runs")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, each checked as far as it can be by itself. Raises InvalidRequest naming the option."""
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
        # Found out now, not after an hour of measuring.
        raise InvalidRequest("out", f"{options.out} is a file; it must be a folder, or not be there yet")
    if options.url is None and (options.model or options.text or options.no_extra or options.api != "completions"):
        raise InvalidRequest("url", "is missing: --model, --api, --text and --no-extra are of the server that it names")
    if options.replicas > 1 and options.no_model is None:
        raise InvalidRequest("replicas", "is for --no-model; a gateway over replicas that run is measured with --url")
    if options.replicas > 1 and options.kill:
        raise InvalidRequest("kill", "is for one coordinator and its workers, not for --replicas")
    if options.kill and options.url is not None:
        raise InvalidRequest("kill", "is for kvforge's own processes on this machine, not for the server at --url")
    return options


def _one_of(options: argparse.Namespace, *names: str) -> None:
    given = [name for name in names if getattr(options, name) is not None]
    if len(given) > 1:
        first, second = (name.replace("_", "-") for name in given[:2])
        raise InvalidRequest(second, f"cannot be given together with --{first}: leave one of them out")


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
