"""A replica as a gateway sees it: what it caches, computes, keeps in its journal and says of itself.

It stands for a coordinator with its workers, whose own promises the other simulator checks.
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
    """What the model says: it follows from the prompt and the seed alone."""
    digest = hashlib.blake2b(repr((prompt, seed)).encode(), digest_size=64).digest()
    return [digest[i % 64] * 256 + i % 256 for i in range(tokens)]


@dataclass(eq=False)
class Job:
    """A request here. owner: the connection that reads it; None: nobody does now."""

    number: int
    prompt: tuple[int, ...]
    options: RequestOptions
    seed: int
    says: list[int]
    left: int  # tokens of its prompt that are not computed
    owner: object | None
    told: Callable[[], None] | None
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    error: KvforgeError | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.options.tenant, self.options.key


class SimulatedReplica:
    """up: its process is there. hung: it is, and does nothing. life: how many there were."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name, self.settings = name, settings
        self.up, self.hung, self.draining, self.life = True, False, False, 1
        self.lied = 0  # added to each token: another model than it says
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.keyed: dict[tuple[str, str], Job] = {}
        self.computed: list[tuple[str, str]] = []  # keys of what was taken on here
        self.seeds: set[tuple[tuple[int, ...], int]] = set()  # prompts with their seeds
        self._blocks: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._numbers = 0

    # -------------------------------------------------------------------------------------------------------- questions

    @property
    def ready(self) -> bool:
        return not self.draining

    def health(self) -> Health:
        """As a coordinator says it."""
        reason = "draining" if self.draining else ""
        return Health(
            rid=0, live=True, ready=self.ready, reason=reason, workers=(), model=MODEL, draining=self.draining
        )

    def find(self, prompt: tuple[int, ...], tenant: str, key: str) -> PrefixFound:
        """As a coordinator says it."""
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

    def submit(self, prompt: tuple[int, ...], options: RequestOptions, owner: object, told: Callable[[], None]) -> Job:
        """Takes it on. Raises Draining or QueueFull."""
        known = self.keyed.get((options.tenant, options.key)) if options.key else None
        if known is not None:
            known.owner, known.told = owner, told
            return known
        if self.draining:
            raise Draining("it drains")
        if len(self.waiting) >= self.settings.waiting:
            raise QueueFull(self.settings.waiting, 100)
        assert options.sampling is not None and options.sampling.seed is not None, "the gateway fixes the seed"
        self._numbers += 1
        number = self.life << 32 | self._numbers
        self.seeds.add((prompt, options.sampling.seed))
        seed = options.sampling.seed
        says = answer(prompt, seed, options.max_tokens)
        job = Job(number, prompt, options, seed, says, len(prompt), owner, told)
        if options.key:
            self.keyed[job.key] = job
            self.computed.append(job.key)
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """Nobody wants it."""
        if not job.ended:
            self._end(job, "cancelled")

    def forget(self, owner: object, but: Collection[Job | None] = ()) -> None:
        """Its session is over: what nobody can ask for again ends."""
        for job in (*self.running, *self.waiting):
            if job.owner is owner and job not in but and not job.options.kept:
                self._end(job, "cancelled")

    def step(self) -> None:
        """Prompts as far as a step goes, then a token of each that has its prompt."""
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
            if job.told is not None:
                job.told()

    def _end(self, job: Job, reason: str) -> None:
        job.ended = reason
        for held in (self.running, self.waiting):
            if job in held:
                held.remove(job)
        if reason == "cancelled":
            self.keyed.pop(job.key, None)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def die(self, *, journal_lost: bool) -> None:
        """Its process is gone, with all that was cached. journal_lost: and its disk with it."""
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
        """Takes nothing more; what it has is handed back, as soon as its reader is there."""
        self.draining = True
        for job in (*self.running, *self.waiting):
            job.error = Draining("submit it elsewhere")
            self._end(job, "cancelled")
            if job.told is not None:
                job.told()

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
