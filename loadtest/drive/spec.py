"""The specification of a run as plain values, for driver processes and for the result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from kvforge.loadtest.load.build import Load, LoadOptions, build
from kvforge.loadtest.load.texts import Encode
from kvforge.protocol.errors import InvalidRequest
from kvforge.routing import PREFIX

from .plan import Plan

if TYPE_CHECKING:
    from .target import Target

KVFORGE, HTTP = KINDS = ("kvforge", "http")


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run: a load, its target and the limits. It converts to JSON with `dataclasses.asdict`.

    Attributes:
        load: The fields of `LoadOptions` that differ from their defaults.
        target: One of KINDS.
        endpoint, server_key, key_file: The coordinator, as for `kvforge.Client`.
        endpoints: Several coordinators, from which `policy` chooses.
        policy: The routing policy.
        http: The fields of `HttpOptions`, except `clients`.
        tokenizer: The tokenizer of text prompts: a path or the name of a model.
        closed: With arrivals, the limit of concurrent sessions; else see `load`.
        clients: The connections of the whole run.
        processes: The number of driver processes; None for as many as the planned rate needs.
        timeout_s: The time limit of a request, from when it is due.
        concurrency_max: Requests in flight.
        temperature: The temperature.
        seed: The seed of sampling.
        proof_s: How long the null server is driven first; 0 to skip it.
    """

    load: dict[str, Any]
    target: str = KVFORGE
    endpoint: str | None = None
    endpoints: list[str] = field(default_factory=list)
    policy: str = PREFIX
    server_key: str | None = None
    key_file: str | None = None
    http: dict[str, Any] = field(default_factory=dict)
    tokenizer: str | None = None
    closed: int = 0
    clients: int = 1
    processes: int | None = None
    timeout_s: float = 600.0
    concurrency_max: int = 10_000
    temperature: float = 0.0
    seed: int = 0
    proof_s: float = 2.0

    def __post_init__(self) -> None:
        """Validate the specification. Raises InvalidRequest naming the option."""
        if self.target not in KINDS:
            raise InvalidRequest("target", f"is {self.target!r}; it must be one of {', '.join(KINDS)}")
        for name in ("clients", "concurrency_max"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"is {getattr(self, name)}; it must be at least 1")
        if self.processes is not None and self.processes < 1:
            raise InvalidRequest("processes", f"is {self.processes}; it must be at least 1")
        if not self.timeout_s > 0:
            raise InvalidRequest("timeout", f"is {self.timeout_s:g}; it must be above 0 seconds")

    def json(self) -> dict[str, Any]:
        """Return plain values; `RunSpec(**spec.json())` is the same run."""
        return asdict(self)

    def workload(self) -> Load:
        """Return the load, the same in every process. Raises InvalidRequest naming the option."""
        return build(LoadOptions(**self.load), _encoder(self.tokenizer))

    def plan(self, index: int, processes: int, sessions: int) -> Plan:
        """Return the share of one process. `sessions` is the number of sessions of the load."""
        duration_s = self.load.get("duration_s")
        endless = duration_s is not None and self.load.get("requests") is None
        return Plan(
            index=index,
            processes=processes,
            closed=self.closed or self.load.get("closed", 0),
            sessions_max=None if endless else sessions,
            duration_s=duration_s,
            timeout_s=self.timeout_s,
            concurrency_max=self.concurrency_max,
            clients=self.clients,
            temperature=self.temperature,
            seed=self.seed,
        )

    def make_target(self, plan: Plan) -> Target:
        """Return the target of one process. Raises InvalidRequest or Unavailable."""
        clients = plan.part(self.clients)
        if self.target == KVFORGE:
            if self.endpoints:
                from .replicas import ReplicasTarget

                return ReplicasTarget(self.endpoints, self.policy)
            from .coordinator import CoordinatorTarget

            return CoordinatorTarget(self.endpoint, clients=clients, server_key=self.server_key, key_file=self.key_file)
        from .http import HttpOptions, HttpTarget

        vocab = self.load.get("vocab", LoadOptions.vocab)
        return HttpTarget(HttpOptions(**self.http, clients=clients, vocab=vocab), _encoder(self.tokenizer))


@cache
def _encoder(tokenizer: str | None) -> Encode | None:
    """Return a tokenizer that adds no special tokens."""
    if tokenizer is None:
        return None
    from kvforge.text.tokenizer import Tokenizer  # loads transformers

    return partial(Tokenizer.load(tokenizer).encode, special=False)
