"""A run in plain values: what a driver process is told, and what a result names as its configuration."""

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
    """One run: a load, whom it is sent to, and how. `dataclasses.asdict` of it is JSON.

    load: the fields of `LoadOptions` that are not as usual. target: one of KINDS. endpoint, server_key, key_file: of a
    coordinator, as for `kvforge.Client`. endpoints: of several, from which `policy` chooses. http: the fields of
    `HttpOptions`, but `clients`. tokenizer: makes token ids of prompts that are texts: a path or a model's name.
    closed: with arrivals, at most so many sessions are under way;
    else as in `load`. clients: connections of the whole run. processes: None: as many as the planned rate needs.
    timeout_s: from when a request is due to its end. concurrency_max: requests under way at once. seed: of the draws.
    proof_s: so long the null server is driven at the same rate first; 0: not at all.
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
        """Raises InvalidRequest naming the option."""
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
        """Plain values; `RunSpec(**spec.json())` is the same run."""
        return asdict(self)

    def workload(self) -> Load:
        """The load; the same one in every process. Raises InvalidRequest naming the option."""
        return build(LoadOptions(**self.load), _encoder(self.tokenizer))

    def plan(self, index: int, processes: int, sessions: int) -> Plan:
        """The share of one process. sessions: how many different ones the load has."""
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
        """Whom the process of `plan` sends to. Raises InvalidRequest, Unavailable."""
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
    """Pieces of text to token ids: without what a tokenizer puts before a prompt."""
    if tokenizer is None:
        return None
    from kvforge.text.tokenizer import Tokenizer  # loads transformers

    return partial(Tokenizer.load(tokenizer).encode, special=False)
