"""From the command line options to a run: the load as plain values, its target, and the description in the result."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from kvforge.loadtest.drive.spec import RunSpec
from kvforge.loadtest.load.options import RANDOM, LoadOptions
from kvforge.protocol.errors import InvalidRequest, ModelNotFound, Unavailable, UnsupportedModel
from kvforge.routing import PREFIX

from .places import ServerUnderTest

# The default number of requests, if neither a number nor a duration is given.
REQUESTS = 500
# Options that do not describe the workload.
APART = ("endpoint", "runtime_dir", "server_key", "key_file", "out", "compare", "quiet", "no_proof")
SWEPT = {"rate": float, "rate_scale": float, "closed": int}


def load_options(options: argparse.Namespace, place: ServerUnderTest) -> LoadOptions:
    """Return the options of the load.

    Raises:
        InvalidRequest: Names the option.
    """
    arrivals = options.arrivals or (f"poisson:{options.rate:g}" if options.rate is not None else "")
    open_loop = bool(arrivals or options.trace)
    if not open_loop and not options.closed:
        raise InvalidRequest("rate", "is missing: give the arrivals with --rate, --arrivals, --trace or --closed")
    bounded = options.requests is not None or options.duration is not None
    context = [tokens for tokens in (options.context_max, place.context_max) if tokens is not None]
    return LoadOptions(
        trace=options.trace or "",
        arrivals=arrivals,
        # With arrivals it is only an upper bound, which the driver applies.
        closed=0 if open_loop else options.closed,
        requests=options.requests if bounded or options.trace else REQUESTS,
        duration_s=options.duration,
        rate_scale=options.rate_scale,
        think_scale=options.think_scale,
        length_scale=options.length_scale,
        input=options.input,
        output=options.output,
        prompts=options.prompts,
        prefix=options.prefix,
        seed=options.seed,
        vocab=place.vocab,
        tenant=options.tenant,
        context_max=min(context, default=None),
    )


def run_spec(options: argparse.Namespace, place: ServerUnderTest) -> RunSpec:
    """Return the specification of a run.

    Raises:
        InvalidRequest: Names the option.
    """
    load = load_options(options, place)
    return RunSpec(
        load=asdict(load),
        target=place.target,
        endpoint=place.endpoint,
        endpoints=list(place.endpoints),
        policy=place.policy or PREFIX,
        server_key=place.server_key,
        key_file=place.key_file,
        http=place.http,
        tokenizer=_tokenizer(options, place),
        closed=0 if load.closed else options.closed or 0,
        clients=options.clients,
        processes=options.processes,
        timeout_s=options.timeout,
        concurrency_max=options.concurrency_max,
        temperature=options.temperature,
        seed=options.seed,
        **({"proof_s": 0.0} if options.no_proof else {}),
    )


def described(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options as plain values, for the document."""
    found = {}
    for name, value in vars(options).items():
        if name not in APART and value is not None and value is not False and value != []:
            found[name] = value if isinstance(value, int | float | str | list) else str(value)
    return found


def sweep(options: argparse.Namespace) -> tuple[str, list[float]]:
    """Return the attribute of the swept option and its values.

    Raises:
        InvalidRequest: The sweep is malformed.
    """
    name, equals, values = options.sweep.partition("=")
    attribute = name.replace("-", "_")
    if not equals or attribute not in SWEPT:
        raise InvalidRequest(
            "sweep", f"invalid sweep {options.sweep!r} (expected NAME=V,V with rate, rate-scale or closed as NAME)"
        )
    try:
        found = [SWEPT[attribute](value) for value in values.split(",")]
    except ValueError:
        raise InvalidRequest("sweep", f"invalid values {values!r} (expected numbers such as 1,2,4)") from None
    if not all(0 < value < float("inf") for value in found) or len(set(found)) < len(found):
        raise InvalidRequest("sweep", f"invalid values {values!r} (expected distinct numbers above 0)")
    return attribute, sorted(found)


def swept(options: argparse.Namespace, attribute: str, value: float) -> argparse.Namespace:
    """Return the options of one run of a sweep."""
    return argparse.Namespace(**{**vars(options), attribute: value, "sweep": None})


def _tokenizer(options: argparse.Namespace, place: ServerUnderTest) -> str | None:
    """Return the tokenizer of text prompts: the given one, or the model's own if it is on this machine."""
    if options.prompts == RANDOM and not options.tokenizer:
        return None
    if options.tokenizer:
        return str(options.tokenizer)
    if not place.source:
        return None
    from kvforge.text.tokenizer import Tokenizer  # loads transformers

    try:
        Tokenizer.load(place.source)
    except (ModelNotFound, Unavailable, UnsupportedModel):
        return None  # each word then has an id of its own
    return place.source
