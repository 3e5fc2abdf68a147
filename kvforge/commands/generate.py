"""`kvforge generate`: text or token ids in, text or token ids out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvforge.client.arguments import stop_strings
from kvforge.client.blocking import Client, Request
from kvforge.client.options import MAX_TOKENS
from kvforge.client.sampling import SamplingParams
from kvforge.protocol.errors import InvalidRequest

from . import parsing, printing
from .answers import Answer, add_reading
from .waiting import add_wait, wait_for_model


def add(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = parsing.add(subparsers, "generate", run, "Generate from a prompt; Ctrl-C cancels the request.")
    parser.add_argument("prompt", nargs="?", help="text, sent as a user's message; - reads standard input")
    parser.add_argument("--prompt-tokens", metavar="IDS", help="token ids like 1,2,3 instead of text")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"[{MAX_TOKENS}]")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy [the model's own]")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same numbers")
    parser.add_argument("--stop-tokens", metavar="IDS", default="", help="token ids that end the answer")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens; 0: all [the model's]")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="keep the likeliest tokens that reach P; 1: all [the model's]"
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", help="keep tokens at least P times the likeliest; 0: all [the model's]"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 1: penalise repeated tokens [the model's]"
    )
    parser.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="-2 to 2, for each token that occurred in the answer [0]",
    )
    parser.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="P",
        help="-2 to 2, for each occurrence in the answer [0]",
    )
    parser.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID:VALUE", help="-100 to 100 or -inf; may be repeated"
    )
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="report the N likeliest tokens of each place (with --json)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that the schema in FILE allows")
    shape.add_argument("--json-object", action="store_true", help="the answer is a JSON object")
    shape.add_argument("--regex", metavar="REGEX", help="the whole answer matches REGEX")
    shape.add_argument("--grammar", metavar="FILE", help="the answer follows the Lark grammar in FILE")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the model's end-of-sequence token")
    parser.add_argument("--tenant", default="default", metavar="NAME")
    _add_scheduling(parser)
    add_reading(parser)
    add_wait(parser)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the answer as it arrives")
    output.add_argument("--json", action="store_true", help="print one JSON document")


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--priority", type=int, default=0, metavar="N", help="-100 to 100, among the requests of the tenant [0]"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="expire unless ended by then")
    parser.add_argument("--first-token", type=float, metavar="SECONDS", help="expire without a token by then")
    parser.add_argument("--retry", type=float, metavar="SECONDS", help="retry for this long while the queue is full")
    parser.add_argument("--samples", type=int, metavar="N", help="number of answers, each with its own seed")
    parser.add_argument(
        "--key", default="", metavar="KEY", help="idempotency key: repeating the command returns the same request"
    )
    parser.add_argument(
        "--detach", action="store_true", help="print the request's id and leave; `kvforge attach ID` reads the answer"
    )


def run(options: argparse.Namespace) -> int:
    """Print the answer: text for text, token ids for token ids."""
    _check(options)
    sampling = SamplingParams(
        temperature=options.temperature,
        seed=options.seed,
        stop_tokens=tuple(parsing.token_ids(options.stop_tokens, "stop_tokens")),
        ignore_eos=options.ignore_eos,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(_bias(pair) for pair in options.logit_bias),
        logprobs=options.logprobs,
        json_schema=_text_of("json_schema", options.json_schema),
        json_object=options.json_object,
        regex=options.regex,
        grammar=_text_of("grammar", options.grammar),
    )
    with parsing.open_client(options, options.tokenizer) as kv:
        requests = _submit(kv, _prompt(kv, options), sampling, options)
        if options.detach:
            return _leave(requests, options)
        as_text = options.prompt_tokens is None
        answers = [
            Answer(request, request.text(options.stop) if as_text else None, options.generate_timeout)
            for request in requests
        ]
        return _show(answers, options)


def _check(options: argparse.Namespace) -> None:
    if (options.prompt is None) == (options.prompt_tokens is None):
        raise InvalidRequest("prompt", "give either a text or --prompt-tokens")
    stop_strings(options.stop)
    if options.stop and options.prompt_tokens is not None:
        raise InvalidRequest("stop", "applies to text only; use --stop-tokens with --prompt-tokens")
    if options.stop and options.detach:
        raise InvalidRequest("stop", "does not apply to --detach: pass it to `kvforge attach`")
    if options.stream and options.detach:
        raise InvalidRequest("stream", "does not apply to --detach: use `kvforge attach`")


def _text_of(option: str, file: str | None) -> str | None:
    try:
        return None if file is None else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(option, f"{file} cannot be read: {error}") from None


def _prompt(kv: Client, options: argparse.Namespace) -> list[int]:
    if options.prompt_tokens is not None:
        ids = parsing.token_ids(options.prompt_tokens, "prompt")
        if not options.detach:  # a detached request may wait in the queue for a worker
            wait_for_model(kv, options.wait)
        return ids
    wait_for_model(kv, options.wait)
    return kv.encode(sys.stdin.read() if options.prompt == "-" else options.prompt, raw=options.raw)


def _submit(kv: Client, ids: list[int], sampling: SamplingParams, options: argparse.Namespace) -> tuple[Request, ...]:
    arguments: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "sampling": sampling,
        "tenant": options.tenant,
        "priority": options.priority,
        "deadline_s": options.deadline,
        "first_token_s": options.first_token,
        "detached": options.detach,
        "idempotency_key": options.key,
        "retry_s": options.retry,
    }
    if options.samples is None:
        return (kv.submit(ids, **arguments),)
    return kv.submit_samples(ids, options.samples, **arguments)


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidRequest("logit_bias", f"{pair!r} is not a token id and a value like 42:-5") from None


def _leave(requests: tuple[Request, ...], options: argparse.Namespace) -> int:
    if options.json:
        documents = [{"request_id": request.id, "seed": request.seed} for request in requests]
        printing.print_json(documents[0] if options.samples is None else documents)
        return 0
    for request in requests:
        print(request.id)
    return 0


def _show(answers: list[Answer], options: argparse.Namespace) -> int:
    """Print one answer as it is, several answers with headings, or all as JSON."""
    if options.json:
        documents, errors = zip(*(answer.document() for answer in answers), strict=True)
        printing.print_json(documents[0] if options.samples is None else documents)
        if wrong := [error for error in errors if error is not None]:
            raise wrong[0]
        return 0
    for number, answer in enumerate(answers, 1):
        if options.samples is not None:
            gap = "\n" if number > 1 else ""
            print(f"{gap}[{number}] request {answer.request.id}, seed {answer.request.seed}", flush=True)
        answer.show(stream=options.stream)
    return 0
