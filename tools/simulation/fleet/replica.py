"""A replica as a gateway sees it: its cache, its computation, its journal, and its health.

It stands for a coordinator with its workers, which the other simulator checks.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvforge.client.options import RequestOptions
from kvforge.protocol.errors import Draining, KvforgeError, QueueFull
from kvforge.protocol.messages import Health, ModelInfo, PrefixFound

from .settings import Settings

BLOCK = 16
MODEL = ModelInfo(
    name="m", source="m", architecture="m", fingerprint="one", vocab_size=1 << 15, context_tokens_max=4096
)


def answer(prompt: tuple[int, ...], seed: int, tokens: int) -> list[int]:
    """Return the model's tokens, which depend on the prompt and the seed alone."""
    digest = hashlib.blake2b(repr((prompt, seed)).encode(), digest_size=64).digest()
    return [digest[i % 64] * 256 + i % 256 for i in range(tokens)]


@dataclass(eq=False)
class Job:
    """A request on this replica; `owner` is the connection that reads it, or None."""

    number: int
    prompt: tuple[int, ...]
    options: RequestOptions
    seed: int
    says: list[int]
    left: int  # prompt tokens still to compute
    owner: object | None
    on_change: Callable[[], None] | None
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    error: KvforgeError | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Return the tenant and the idempotency key."""
        return self.options.tenant, self.options.idempotency_key


class SimulatedReplica:
    """A replica.

    Attributes:
        up: whether its process runs.
        hung: whether the process runs but makes no progress.
        life: the number of processes so far.
    """

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.up, self.hung, self.draining, self.life = True, False, False, 1
        self.lied = 0  # added to each token, to fake a different model
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.keyed: dict[tuple[str, str], Job] = {}
        self.computed: list[tuple[str, str]] = []  # keys of the jobs accepted here
        self.seeds: set[tuple[tuple[int, ...], int]] = set()  # prompts with their seeds
        self._blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._numbers = 0

    # ------------------------------------------------------------------------------------------------------------
    # queries

    @property
    def ready(self) -> bool:
        """Return whether the replica accepts requests."""
        return not self.draining

    def health(self) -> Health:
        """Return the health that a coordinator would report."""
        reason = "draining" if self.draining else ""
        return Health(
            rid=0, live=True, ready=self.ready, reason=reason, workers=(), model=MODEL, draining=self.draining
        )

    def find(self, prompt: tuple[int, ...], tenant: str, key: str) -> PrefixFound:
        """Return the prefix query's answer that a coordinator would give."""
        return PrefixFound(
            rid=0,
            ready=self.ready,
            draining=self.draining,
            cached_tokens=self._cached(prompt),
            queued_tokens=sum(job.left for job in (*self.running, *self.waiting)),
            running=len(self.running),
            pending=len(self.waiting),
            rows_free=self.settings.rows - len(self.running),
            room_tokens=1 << 20,
            known=bool(key) and (tenant, key) in self.keyed,
        )

    # --------------------------------------------------------------------------------------------------------- requests

    def submit(
        self, prompt: tuple[int, ...], options: RequestOptions, owner: object, on_change: Callable[[], None]
    ) -> Job:
        """Accept a request; raise Draining or QueueFull if that is impossible."""
        known = self.keyed.get((options.tenant, options.idempotency_key)) if options.idempotency_key else None
        if known is not None:
            known.owner, known.on_change = owner, on_change
            return known
        if self.draining:
            raise Draining("the replica is draining")
        if len(self.waiting) >= self.settings.waiting:
            raise QueueFull(self.settings.waiting, 100)
        assert options.sampling is not None and options.sampling.seed is not None, "the gateway must fix the seed"
        self._numbers += 1
        number = self.life << 32 | self._numbers
        self.seeds.add((prompt, options.sampling.seed))
        seed = options.sampling.seed
        says = answer(prompt, seed, options.max_tokens)
        job = Job(number, prompt, options, seed, says, len(prompt), owner, on_change)
        if options.idempotency_key:
            self.keyed[job.key] = job
            self.computed.append(job.key)
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job."""
        if not job.ended:
            self._end(job, "cancelled")

    def forget(self, owner: object, but: Collection[Job | None] = ()) -> None:
        """End a session: cancel the owner's jobs, except those in `but` and kept ones."""
        for job in (*self.running, *self.waiting):
            if job.owner is owner and job not in but and not job.options.kept:
                self._end(job, "cancelled")

    def step(self) -> None:
        """Run a step: prompt chunks up to the budget, then one token per job with a computed prompt."""
        while self.waiting and len(self.running) < self.settings.rows:
            job = self.waiting.pop(0)
            job.left -= min(self._cached(job.prompt), len(job.prompt) - 1)
            self.running.append(job)
        budget = self.settings.prefill_tokens
        decoding = [job for job in self.running if not job.left]
        for job in self.running:
            if job.left:
                done = min(job.left, budget)
                job.left, budget = job.left - done, budget - done
                if not job.left:
                    self._keep(job.prompt)
        for job in decoding:
            job.tokens.append(job.says[len(job.tokens)] + self.lied)
            if len(job.tokens) >= job.options.max_tokens:
                self._end(job, "length")
        for job in decoding:
            if job.on_change is not None:
                job.on_change()

    def _end(self, job: Job, reason: str) -> None:
        job.ended = reason
        for held in (self.running, self.waiting):
            if job in held:
                held.remove(job)
        if reason == "cancelled":
            self.keyed.pop(job.key, None)

    # -------------------------------------------------------------------------------------------------------------
    # faults

    def die(self, *, journal_lost: bool) -> None:
        """Kill the process and lose its cache; with `journal_lost`, its disk too."""
        self.up = self.hung = self.draining = False
        self.life += 1
        self._blocks.clear()
        for job in (*self.running, *self.waiting):
            job.left = len(job.prompt)
        self.waiting = [*self.running, *self.waiting]
        self.running = []
        if journal_lost:
            self.waiting, self.keyed = [], {}

    def drain(self) -> None:
        """Stop accepting requests; hand each request back as soon as its reader is connected."""
        self.draining = True
        for job in (*self.running, *self.waiting):
            job.error = Draining("submit it elsewhere")
            self._end(job, "cancelled")
            if job.on_change is not None:
                job.on_change()

    # ------------------------------------------------------------------------------------------------------------ cache

    def _cached(self, prompt: tuple[int, ...]) -> int:
        held = 0
        while held + BLOCK <= len(prompt) and prompt[: held + BLOCK] in self._blocks:
            held += BLOCK
        return held

    def _keep(self, prompt: tuple[int, ...]) -> None:
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            self._blocks[prompt[:end]] = None
            self._blocks.move_to_end(prompt[:end])
        while len(self._blocks) > self.settings.cache_blocks:
            self._blocks.popitem(last=False)
