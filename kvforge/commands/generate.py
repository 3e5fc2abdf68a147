"""kvforge generate: text or token ids in, text or token ids out."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from protocol.errors import InvalidRequest
from protocol.messages import Sampling

from ..client import MAX_TOKENS, Request, TextRequest
from ..results import Finished
from ..screen import printable
from . import common


def add(subparsers: Any) -> None:
    """Declares the subcommand."""
    parser = common.add(subparsers, "generate", run, "Generate from a prompt; Ctrl-C cancels the request.")
    parser.add_argument("prompt", nargs="?", help="text, put to the model as a user's message; - reads standard input")
    parser.add_argument("--prompt-tokens", metavar="IDS", help="token ids like 1,2,3 instead of text")
    parser.add_argument("--raw", action="store_true", help="give the text as it is, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=f"[{MAX_TOKENS}]")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy [1]")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same tokens")
    parser.add_argument("--stop-tokens", metavar="IDS", default="", help="token ids that end the answer")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the K most likely tokens [0: all]")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="only the likeliest that reach P [1: all]"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="only those P times the likeliest [0: all]"
    )
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: against what was there [1]"
    )
    parser.add_argument(
        "--presence-penalty", type=float, default=0.0, metavar="P", help="-2 to 2, for tokens of the answer [0]"
    )
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="P", help="-2 to 2, for each time one occurred [0]"
    )
    parser.add_argument(
        "--logit-bias", action="append", default=[], metavar="ID:VALUE", help="-100 to 100 or -inf; may be repeated"
    )
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="report the N likeliest of each place (with --json)"
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence token")
    parser.add_argument("--tenant", default="default", metavar="NAME")
    parser.add_argument("--tokenizer", metavar="PATH", help="where to load the tokenizer from [KVFORGE_TOKENIZER]")
    parser.add_argument("--generate-timeout", type=common.seconds, metavar="S", help="seconds for the answer [600]")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--stream", action="store_true", help="print the answer as it comes")
    output.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    """Prints the answer: text for text, token ids for token ids."""
    if (options.prompt is None) == (options.prompt_tokens is None):
        raise InvalidRequest("prompt", "give either a text or --prompt-tokens")
    sampling = Sampling(
        temperature=options.temperature,
        seed=options.seed,
        stop_tokens=tuple(common.token_ids(options.stop_tokens, "stop_tokens")),
        ignore_eos=options.ignore_eos,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(_bias(pair) for pair in options.logit_bias),
        logprobs=options.logprobs,
    )
    if options.stop and options.prompt_tokens is not None:
        raise InvalidRequest("stop", "is looked for in text; with --prompt-tokens there is none (use --stop-tokens)")
    arguments = {"max_tokens": options.max_tokens, "sampling": sampling, "tenant": options.tenant}
    with common.open_client(options, options.tokenizer) as kv:
        if options.prompt_tokens is not None:
            return _tokens(kv.submit(common.token_ids(options.prompt_tokens, "prompt"), **arguments), options)
        kv.health()  # whether somebody is there is known sooner than a tokenizer is loaded
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        return _text(kv.generate_stream(prompt, raw=options.raw, stop=options.stop, **arguments), options)


def _bias(pair: str) -> tuple[int, float]:
    token, _, value = pair.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidRequest("logit_bias", f"{pair!r} is not a token id and a value like 42:-5") from None


def _tokens(request: Request, options: argparse.Namespace) -> int:
    if options.stream:
        for token in request:
            print(token.token_id, end=" ", flush=True)
        print()
    done = request.result(options.generate_timeout)
    if options.json:
        common.print_json(_document(done, request.seed))
    elif not options.stream:
        print(" ".join(map(str, done.tokens)))
    return 0


def _text(text: TextRequest, options: argparse.Namespace) -> int:
    if options.stream:
        for piece in text:
            print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)
        print()
        text.result(options.generate_timeout)
        return 0
    completion = text.result(options.generate_timeout)
    if options.json:
        common.print_json({"text": completion.text, **_document(completion.finished, text.request.seed)})
    else:
        print(completion.text)
    return 0


def _document(done: Finished, seed: int) -> dict[str, Any]:
    return {
        "request_id": done.request_id,
        "reason": done.reason,
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        **({"top_logprobs": done.top} if any(done.top) else {}),
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "seed": seed,
        "timings": done.timings,
    }
