"""A small world around kvforge.coordinator.core.machine.Machine: clients, workers that execute steps, and a manual
clock.

The fake worker has a real KV memory. The cell of a position holds a fingerprint of all tokens up to it, computed from
the previous cell as found in the worker's own memory. The next token is a function of the last fingerprint, so a block
that was corrupted, lost, shared wrongly or copied too late shows as a wrong token.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvforge.coordinator.core.events import (
    Boot,
    ClientCame,
    ClientFull,
    ClientGone,
    DropWorker,
    Effect,
    Event,
    FromClient,
    FromWorker,
    Log,
    ToClient,
    ToWorker,
    Turn,
    WorkerGone,
)
from kvforge.coordinator.core.machine import Machine
from kvforge.coordinator.core.rights import Access
from kvforge.protocol.errors import GpuError, KvforgeError, restore
from kvforge.protocol.messages import (
    GENERATED,
    Accepted,
    Append,
    Attach,
    Attached,
    BlockCount,
    BlockInfo,
    Cancel,
    CreateSequence,
    Ended,
    ErrorInfo,
    Explain,
    Explanation,
    Fork,
    GetBlock,
    GetRequest,
    GetSequence,
    GetStats,
    GetTokens,
    Message,
    ModelInfo,
    PoolRegistered,
    RefBlock,
    Refused,
    RemoveSequences,
    RequestInfo,
    RowError,
    RowStart,
    SamplingParams,
    SequenceInfo,
    Stats,
    Step,
    StepResult,
    Stream,
    Submit,
    UnrefBlock,
    WorkerHello,
    WorkerReady,
)
from tests.amount import thinned
from tools.simulation.digest import refusal_digest
from tools.simulation.due_scan import check_due
from tools.simulation.limits import make_limits

VOCABULARY = 1000
BYTES_PER_BLOCK = 4096
MASK = (1 << 64) - 1
SMALL: dict[str, Any] = {
    "lease_us": 0,
    "block_size": 4,
    "sequences_max": 16,
    "blocks_max": 64,
    "blocks_per_sequence_max": 16,
    "tenants_max": 8,
    "queue_max": 32,
    "step_tokens_max": 32,
    "step_rows_max": 8,
}
GREEDY = SamplingParams(temperature=0.0, seed=1)
PROMPT = [5, 6, 7, 8, 9]
# lease of a disconnected client; time that a restarted coordinator waits for workers
LEASE_US, REATTACH_US = 2_000_000, 5_000_000


Score = tuple[float, int, tuple[tuple[int, float], ...]]  # log-probability, rank, top tokens


def fingerprint(before: int, token: int) -> int:
    """Return the fingerprint of a context that is one token longer."""
    return (before * 6364136223846793005 + token + 1442695040888963407) & MASK


def choose(context: int, vocabulary: int) -> int:
    """Return the next token of a context."""
    return (context >> 33) % vocabulary


def logprob_of(token: int) -> float:
    """Return the log-probability that the fake workers report for a token."""
    return float(np.float32(-token / 1000))


def score_of(context: int, token: int, width: int, vocabulary: int = VOCABULARY) -> Score:
    """Return what the fake workers report for a prompt token behind a context."""
    mixed = fingerprint(context, token)
    tops = tuple(((mixed + i) % vocabulary, float(-i)) for i in range(min(width, vocabulary)))
    return float(np.float32(-(mixed >> 40) / 1000)), 1 + (mixed >> 33) % vocabulary, tops


def scores_of(prompt: Sequence[int], width: int, vocabulary: int = VOCABULARY) -> list[Score]:
    """Return the log-probabilities of a prompt, computed without blocks."""
    context, scores = 1, []
    for token, following in itertools.pairwise(prompt):
        context = fingerprint(context, token)
        scores.append(score_of(context, following, width, vocabulary))
    return scores


def columns_of(scores: list[Score]) -> dict[str, Any]:
    """Return log-probabilities of prompt tokens as the columns of a StepResult."""
    pairs = [pair for _, _, tops in scores for pair in tops]
    return {
        "prompt_logprobs": np.array([logprob for logprob, _, _ in scores], np.float32),
        "prompt_ranks": int32([rank for _, rank, _ in scores]),
        "prompt_top_counts": int32([len(tops) for _, _, tops in scores]),
        "prompt_top_tokens": int32([token for token, _ in pairs]),
        "prompt_top_logprobs": np.array([logprob for _, logprob in pairs], np.float32),
    }


def continuation(prompt: Sequence[int], count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the tokens that a request with this prompt must generate, computed without blocks."""
    context, answer = 1, []
    for token in prompt:
        context = fingerprint(context, token)
    for _ in range(count):
        answer.append(choose(context, vocabulary))
        context = fingerprint(context, answer[-1])
    return answer


def model_info(name: str = "m", vocabulary: int = VOCABULARY, context: int = 1 << 20, eos: Any = ()) -> ModelInfo:
    """Return a model as a worker announces it."""
    return ModelInfo(
        name=name,
        source=name,
        architecture="fake",
        fingerprint=f"fingerprint of {name}",
        vocab_size=vocabulary,
        context_tokens_max=context,
        eos_tokens=eos,
    )


class FakeWorker:
    """A worker that executes steps on its own KV memory; it reads block tables when it executes a step."""

    def __init__(self, machine: Machine, number: int, name: str, blocks: int, model: ModelInfo) -> None:
        self.machine, self.number, self.name, self.blocks, self.model = machine, number, name, blocks, model
        self.inbox: deque[Step] = deque()
        self.steps: list[Step] = []
        self.kv: dict[tuple[int, int], int] = {}
        self.last_token: dict[int, int] = {}
        self.begins: dict[int, RowStart] = {}
        self.poison: set[int] = set()
        self.epoch = self.base = -1
        self.dropped = ""

    def take(self, step: Step) -> None:
        """Receive a step and check that it is within all limits and writes only blocks it may write."""
        limits, cache = self.machine.limits, self.machine.cache
        assert step.slots.size + step.drafts.sum() <= limits.schedule.step_rows_max
        assert not step.drafts.size or not self.inbox, "a step with drafts behind a step in flight"
        assert not step.drafts.size or step.drafts.any(), "a step with drafts has none"
        assert not self.inbox or not self.inbox[-1].propose, "a step behind one that asks for proposals"
        assert 0 <= step.propose <= self.machine.limits.schedule.drafts_max
        assert step.counts.sum() == step.tokens.size <= limits.schedule.step_tokens_max
        assert step.slots.size == np.unique(step.slots).size
        assert step.counts.size == 0 or step.counts.min() >= 1
        for slot, start, count in zip(step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
            columns = np.arange(start // limits.cache.block_size, -(-(start + count) // limits.cache.block_size))
            ids = cache.sequences.table[slot, columns]
            assert (cache.blocks.refcount[ids] <= 1).all(), "a step writes a shared block"
            assert not cache.blocks.indexed[ids].any(), "a step writes an indexed block"
        self.inbox.append(step)
        self.steps.append(step)
        assert len(self.inbox) <= limits.schedule.steps_in_flight_max

    def execute(self, step: Step) -> StepResult:
        """Execute a step: zeroing, copies, KV and attention, sampling."""
        for block in step.zeros.tolist():
            for offset in range(self.machine.limits.cache.block_size):
                self.kv.pop((block, offset), None)
        triples = step.copies.reshape(-1, 3).tolist()
        assert not {source for source, _, _ in triples} & {target for _, target, _ in triples}
        for source, target, count in triples:
            for offset in range(count):
                self.kv[target, offset] = self.kv[source, offset]
        for begin in step.begins:
            self.last_token.pop(begin.slot, None)
            self.begins[begin.slot] = begin
        sampled: list[int] = []
        errors: list[RowError] = []
        fed = 0
        following = dict(zip(step.scored.tolist(), step.following.tolist(), strict=True))
        scores: list[Score] = []
        drafts = step.drafts if step.drafts.size else np.zeros(step.slots.size, np.int32)
        rows = zip(*(a.tolist() for a in (step.slots, step.starts, step.counts, step.samples, drafts)), strict=True)
        chosen: list[int] = []
        proposed: dict[int, list[int]] = {}
        by_model: dict[int, list[int]] = {}
        for slot, start, count, sample, drafted in rows:
            tokens = [self.last_token.get(slot, -1) if t == -1 else t for t in step.tokens[fed : fed + count].tolist()]
            fed += count
            if self.poison & set(tokens) or -1 in tokens:  # the row or its previous step failed
                errors.append(RowError(slot, ErrorInfo.of(GpuError("a poisoned token"))))
                continue
            context = self._feed(slot, start, tokens)
            wanted = [(at, following.get(fed - count + at)) for at in range(count)]
            scores += [self._score(slot, start + at, token) for at, token in wanted if token is not None]
            if sample:
                accepted = self._verify(slot, start, tokens) if drafted else [self.choose(slot, context)]
                self.last_token[slot] = accepted[-1]
                sampled += [slot] * len(accepted)
                chosen += accepted
                if most := self.begins[slot].drafts:
                    before = self._context(slot, start + count - 1 - drafted + len(accepted) - 1)
                    context = fingerprint(before, accepted[-1])
                    by_model[slot] = (
                        self.propose_asked(slot, context)[: min(most, step.propose)] if step.propose else []
                    )
                    proposed[slot] = [] if by_model[slot] else self.propose(slot, context)[:most]
        by_model = {slot: tokens for slot, tokens in by_model.items() if tokens}
        proposed = by_model | {slot: tokens for slot, tokens in proposed.items() if tokens}
        return StepResult(
            step_id=step.step_id,
            epoch=self.epoch,
            errors=tuple(errors),
            slots=np.array(sampled, np.int32),
            tokens=np.array(chosen, np.int32),
            logprobs=np.array([logprob_of(token) for token in chosen], np.float32),
            draft_slots=int32(list(proposed)),
            draft_counts=int32([len(tokens) for tokens in proposed.values()]),
            draft_tokens=int32([token for tokens in proposed.values() for token in tokens]),
            draft_model_rows=len(by_model),
            **columns_of(scores),
        )

    def _verify(self, slot: int, start: int, tokens: list[int]) -> list[int]:
        """Return the tokens of a row with drafts: those that agree with them, and the one behind."""
        accepted = [self.choose(slot, self._context(slot, start))]
        for place, draft in enumerate(tokens[1:], 1):
            if draft % GENERATED != accepted[-1]:
                break
            accepted.append(self.choose(slot, self._context(slot, start + place)))
        return accepted

    def propose(self, slot: int, context: int) -> list[int]:
        """Return the tokens that are proposed behind a context."""
        return []

    def propose_asked(self, slot: int, context: int) -> list[int]:
        """Return the tokens that the draft model proposes behind a context."""
        return []

    def _context(self, slot: int, position: int) -> int:
        """Return the fingerprint up to a position, as it is in the KV memory."""
        table, size = self.machine.cache.sequences.table[slot].tolist(), self.machine.limits.cache.block_size
        return self.kv[table[position // size], position % size]

    def _score(self, slot: int, position: int, token: int) -> Score:
        """Return the log-probability, rank and top tokens of the prompt token behind a position."""
        width = self.begins[slot].sampling.prompt_logprobs
        assert width is not None, "a row is scored although its request does not want it"
        return score_of(self._context(slot, position), token, width, self.model.vocab_size)

    def choose(self, slot: int, context: int) -> int:
        """Return the token that follows a context in this slot."""
        return choose(context, self.model.vocab_size)

    def _feed(self, slot: int, start: int, tokens: list[int]) -> int:
        table, size = self.machine.cache.sequences.table[slot].tolist(), self.machine.limits.cache.block_size
        before = (table[(start - 1) // size], (start - 1) % size)
        if start and before not in self.kv:  # a sequence was cut off while the step with its last token was in flight
            assert self.machine.cache.sequences.scheduled[slot] < start + len(tokens), "a row attends to nothing"
            return 0
        context = self.kv[before] if start else 1
        for position, token in enumerate(tokens, start):
            context = fingerprint(context, token % GENERATED)
            self.kv[table[position // size], position % size] = context
        return context


CHECKED, EVERY = 20, 7


class Driver:
    """A machine with its clients and workers; invariants are checked after every event.

    `make test` checks them after each of the first `CHECKED` events, and then after each seventh: a broken invariant
    stays broken.

    Attributes:
        check_every: invariants are checked after each event of this number, and where `run_until_idle` ends.
        full: clients that accept no Stream; each stream is reported back as lost, as the shell does.
        streamed: tokens of each request streamed to any client.
        read: (token, log-probability) by (client, request) and offset.
        ended: the last reported end of each request.
        told: (client, "paused" or "taken", request) in order.
        wants_kinds: whether workers that register from now on want token kinds.
        state_blocks: blocks of a sequence's recurrent state in such workers.
        prompt_chunk: the tokens of their prompt chunks.
        draft_states: the most drafts of a step of such workers.
        model_drafts: the most tokens that their draft models propose.
        window: window, window_pages and window_blocks of such workers.
    """

    wants_kinds = False
    state_blocks, prompt_chunk, draft_states, model_drafts = 0, 1, 0, 0
    window = (0, 0, 0)
    check_every = 1

    worker_type: type[FakeWorker] = FakeWorker

    def __init__(self, start_us: int = 1_000_000, first_id: int = 0, first_generation: int = 0, **limits: Any) -> None:
        boot = Boot("boot", b"a key", make_limits(**{**SMALL, **limits}), first_id, first_generation)
        self.machine = Machine(boot, start_us)
        self.now_us = start_us
        self.workers: list[FakeWorker] = []
        self.streamed: dict[int, list[int]] = {}
        self.read: dict[tuple[int, int], dict[int, tuple[int, float]]] = {}
        self.ended: dict[int, Ended] = {}
        self.full: set[int] = set()
        self.notices: list[tuple[int, str, int]] = []
        self._due: dict[tuple[int, int], int] = {}
        self._reader = 0
        self.logs: list[Log] = []
        self._ends_told = self._events = 0
        self._numbers = 0
        self._rid = 0

    # ---------------------------------------------------------------------------------------------------------- events

    def apply(self, event: Event) -> list[Effect]:
        """Apply an event now, and deliver its effects."""
        effects, due_us = self.machine.apply(event, self.now_us)
        self._events += 1
        if self._events % (self.check_every if self._events <= CHECKED else max(self.check_every, thinned(EVERY))) == 0:
            self.machine.check_invariants()
        for effect in effects:
            if isinstance(effect, ToWorker):
                self._to_worker(effect)
            elif isinstance(effect, ToClient):
                self._to_client(effect)
            elif isinstance(effect, DropWorker):
                self._drop(effect)
            elif isinstance(effect, Log):
                self.logs.append(effect)
                self._ends_told += effect.event == "request_ended"
        assert self._ends_told == sum(self.machine.requests.ended_total.values()), "an end was reported never or twice"
        if isinstance(event, Turn):
            seen_to = due_us is None or due_us > self.now_us
            assert seen_to != self.machine.streams.more, "a due timer was not handled, or the streams were not flushed"
            if seen_to:
                check_due(self.machine, due_us)
        return effects

    def _to_client(self, effect: ToClient) -> None:
        client, message = effect.client, effect.message
        if isinstance(message, Accepted):
            for request in range(message.request_id, message.request_id + message.count):
                self._starts(client, request, 0)
        elif isinstance(message, Attached):
            self._starts(client, message.request_id, message.offset)
        elif isinstance(message, Stream):
            if client in self.full:
                self._lose(client, message)
                return
            self._reader = client
            self._stream(message)

    def _starts(self, client: int, request: int, offset: int) -> None:
        """Expect the client to read the request from `offset` to its end."""
        self._due[client, request] = offset
        self.read[client, request] = {}
        self.ended.pop(request, None)

    def _lose(self, client: int, message: Stream) -> None:
        for request in {*message.request_ids.tolist(), *(ended.request_id for ended in message.ended)}:
            self._due.pop((client, request))
        assert self.apply(ClientFull(client, message)) == []

    def _to_worker(self, effect: ToWorker) -> None:
        worker = next((w for w in self.workers if w.number == effect.worker), None)
        if worker is not None and isinstance(effect.message, Step):
            worker.take(effect.message)
        elif worker is not None and isinstance(effect.message, PoolRegistered):
            worker.epoch, worker.base = effect.message.epoch, effect.message.base_block

    def _stream(self, message: Stream) -> None:
        client = self._reader
        columns = (message.request_ids, message.offsets, message.tokens, message.logprobs)
        for request, offset, token, logprob in zip(*(column.tolist() for column in columns), strict=True):
            assert offset == self._due.get((client, request)), "a token was repeated, lost, or not asked for"
            assert request not in self.ended, "a token after the end"
            self._due[client, request] += 1
            self.read[client, request][offset] = (token, logprob)
            received = self.streamed.setdefault(request, [])
            if offset <= len(received):  # else no client received the tokens before it
                assert received[offset : offset + 1] in ([], [token]), "two clients received different tokens"
                received[offset : offset + 1] = [token]
        for ended in message.ended:
            assert ended.request_id not in self.ended, "a request ended twice"
            reach = self._due.pop((client, ended.request_id))
            told = ended.generated_tokens + ended.cut_tokens
            assert told == reach, "the end's token count differs from the stream"
            self.ended[ended.request_id] = ended
        for kind, requests in (("paused", message.paused), ("taken", message.taken)):
            for request in requests:
                self._due.pop((client, request), None)
                self.notices.append((client, kind, request))

    def _drop(self, effect: DropWorker) -> None:
        for worker in self.workers:
            if worker.number == effect.worker:
                worker.dropped = effect.reason
        self.workers = [worker for worker in self.workers if worker.number != effect.worker]

    def advance(self, us: int) -> None:
        """Advance the clock."""
        self.now_us += us

    def turn(self) -> list[Effect]:
        """Run one loop turn: plan steps and flush streams."""
        return self.apply(Turn())

    # --------------------------------------------------------------------------------------------------------- workers

    def add_worker(self, blocks: int, name: str = "", model: ModelInfo | None = None) -> FakeWorker:
        """Connect a worker that registers a pool."""
        self._numbers += 1
        name = name or f"w{self._numbers}"
        worker = self.worker_type(self.machine, self._numbers, name, blocks, model or model_info())
        self.workers.append(worker)
        self.apply(FromWorker(worker.number, WorkerHello(rid=1, name=worker.name, pid=1)))
        self.apply(FromWorker(worker.number, self.ready(worker)))
        return worker

    def ready(self, worker: FakeWorker) -> WorkerReady:
        """Return the worker's message after its pool is allocated."""
        return WorkerReady(
            rid=2,
            model=worker.model,
            blocks=worker.blocks,
            bytes_per_block=BYTES_PER_BLOCK,
            kv_dtype="float32",
            device="cpu",
            zeroes=True,
            wants_kinds=self.wants_kinds,
            state_blocks=self.state_blocks,
            prompt_chunk=self.prompt_chunk,
            window=self.window[0],
            window_pages=self.window[1],
            window_blocks=self.window[2],
            drafts=self.machine.limits.schedule.drafts_max,
            draft_states=self.draft_states,
            model_drafts=self.model_drafts,
        )

    def lose(self, worker: FakeWorker) -> None:
        """Kill the worker and drop all messages sent to it."""
        self.workers.remove(worker)
        self.apply(WorkerGone(worker.number))

    def answer(self, worker: FakeWorker) -> list[Effect]:
        """Execute the worker's oldest step and report the result."""
        return self.report(worker, worker.execute(worker.inbox.popleft()))

    def report(self, worker: FakeWorker, result: Message) -> list[Effect]:
        """Deliver a message from the worker."""
        return self.apply(FromWorker(worker.number, result))

    def step(self) -> None:
        """Run one turn and answer every step in flight."""
        self.turn()
        for worker in list(self.workers):
            while worker.inbox:
                self.answer(worker)

    def run_until_idle(self, turns_max: int = 1000) -> None:
        """Run steps until no request is live and no step is in flight."""
        for _ in range(turns_max):
            self.step()
            if not self.machine.busy:
                self.turn()
                self.machine.check_invariants()
                return
        stuck = [str(self.explain(request_id=request)) for request in self.machine.requests.live]
        raise AssertionError(f"not idle after {turns_max} turns: " + "; ".join(stuck))

    # --------------------------------------------------------------------------------------------------------- clients

    def ask(self, message: Any, client: int = 1) -> Any:
        """Return the reply to a command; raise the error of a refusal."""
        self.come(client)
        effects = self.apply(FromClient(client, message, entropy=7))
        replies = (e.message for e in effects if isinstance(e, ToClient) and not isinstance(e.message, Stream))
        reply: Any = next(replies)
        assert reply.rid == message.rid
        if isinstance(reply, Refused):
            raise restore(reply.error.code, reply.error.message, reply.error.fields)
        return reply

    def refused(self, message: Any, error: type[KvforgeError], client: int = 1) -> KvforgeError:
        """Check that the command is refused with exactly this error and leaves the state byte-identical."""
        self.come(client)
        before = refusal_digest(self.machine)
        with pytest.raises(error) as caught:
            self.ask(message, client)
        assert type(caught.value) is error
        assert refusal_digest(self.machine) == before, "a refused command changed the state"
        return caught.value

    def rid(self) -> int:
        """Return a fresh command number."""
        self._rid += 1
        return self._rid

    def come(self, client: int, access: Access | None = None) -> None:
        """Connect a client, if it is not connected; with `access` None it may do everything."""
        if access is not None or client not in self.machine.clients:
            self.apply(ClientCame(client, access=access or Access()))

    def gone(self, client: int, goodbye: bool = False) -> None:
        """End a client's connection."""
        self.apply(ClientGone(client, goodbye))
        self.full.discard(client)

    def attach(self, request: int, offset: int = 0, client: int = 1) -> Attached:
        """Attach the client to a request from an offset on."""
        reply: Attached = self.ask(self.attach_message(request, offset), client)
        assert (reply.request_id, reply.offset) == (request, offset)
        return reply

    def attach_message(self, request: int, offset: int = 0) -> Attach:
        """Return the command that streams a request to its sender."""
        return Attach(rid=self.rid(), request_id=request, offset=offset)

    def wake_us(self) -> int | None:
        """Return the microseconds until the next turn is due if no message arrives, or None."""
        due_us = self.machine.due_us()
        return None if due_us is None else due_us - self.now_us

    def nothing_due(self) -> bool:
        """Return whether no timer is due except the eviction of finished requests."""
        finished = self.machine.requests.finished.values()
        ttl_us = self.machine.requests._ttl_us
        return self.machine.due_us() == min((request.ended_us + ttl_us for request in finished), default=None)

    def tokens_read(self, client: int, request: int) -> dict[int, int]:
        """Return the request's tokens that the client has received since its last attach, by offset."""
        return {offset: token for offset, (token, _) in self.read[client, request].items()}

    def create(self, tokens: Sequence[int] = (), client: int = 1, **fields: Any) -> int:
        """Create a sequence and return its id."""
        reply: SequenceInfo = self.ask(self.create_message(tokens, **fields), client)
        return reply.sequence_id

    def create_message(self, tokens: Sequence[int] = (), **fields: Any) -> CreateSequence:
        """Return the command that creates a sequence."""
        return CreateSequence(rid=self.rid(), tokens=int32(tokens), **fields)

    def append(self, *pairs: tuple[int, Sequence[int]]) -> list[int]:
        """Append to each (sequence, tokens) in one command; return the new lengths."""
        lengths: list[int] = self.ask(self.append_message(*pairs)).lengths.tolist()
        return lengths

    def append_message(self, *pairs: tuple[int, Sequence[int]]) -> Append:
        """Return the command that appends to (sequence, tokens) pairs."""
        return Append(
            rid=self.rid(),
            sequence_ids=np.array([sequence for sequence, _ in pairs], np.int64),
            counts=int32([len(tokens) for _, tokens in pairs]),
            tokens=int32([token for _, tokens in pairs for token in tokens]),
        )

    def fork(self, sequence: int, count: int = 1, client: int = 1) -> list[int]:
        """Fork a sequence and return the ids of the forks."""
        ids: list[int] = self.ask(Fork(rid=self.rid(), sequence_id=sequence, count=count), client).sequence_ids.tolist()
        return ids

    def info(self, sequence: int) -> SequenceInfo:
        """Return the status of a sequence."""
        reply: SequenceInfo = self.ask(GetSequence(rid=self.rid(), sequence_id=sequence))
        return reply

    def tokens(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence."""
        tokens: list[int] = self.ask(GetTokens(rid=self.rid(), sequence_id=sequence)).tokens.tolist()
        return tokens

    def remove(self, *sequences: int) -> int:
        """Remove sequences; return how many blocks were freed."""
        freed: int = self.ask(self.remove_message(*sequences)).freed_blocks
        return freed

    def remove_message(self, *sequences: int) -> RemoveSequences:
        """Return the command that removes sequences."""
        return RemoveSequences(rid=self.rid(), sequence_ids=np.array(sequences, np.int64))

    def submit(self, prompt: Sequence[int] = (), max_tokens: int = 4, client: int = 1, **fields: Any) -> int:
        """Submit a request and return its id."""
        request: int = self.ask(self.submit_message(prompt, max_tokens, **fields), client).request_id
        return request

    def submit_message(self, prompt: Sequence[int] = (), max_tokens: int = 4, **fields: Any) -> Submit:
        """Return the command that submits a request."""
        fields = {"sampling": GREEDY, **fields}
        return Submit(rid=self.rid(), prompt=int32(prompt), max_tokens=max_tokens, **fields)

    def cancel(self, request: int) -> None:
        """Cancel a request."""
        self.ask(Cancel(rid=self.rid(), request_id=request))

    def request(self, request: int) -> RequestInfo:
        """Return a request with its tokens."""
        reply: RequestInfo = self.ask(GetRequest(rid=self.rid(), request_id=request, with_tokens=True))
        return reply

    def answer_of(self, request: int) -> list[int]:
        """Return the generated tokens of a request."""
        found: list[int] = self.request(request).tokens.tolist()
        return found

    def block(self, block: int) -> BlockInfo:
        """Return a block's status."""
        reply: BlockInfo = self.ask(GetBlock(rid=self.rid(), block_id=block))
        return reply

    def ref(self, block: int, holder: str, client: int = 1, **fields: Any) -> BlockCount:
        """Add a named holder to a block."""
        reply: BlockCount = self.ask(RefBlock(rid=self.rid(), block_id=block, holder=holder, **fields), client)
        return reply

    def unref(self, block: int, holder: str, client: int = 1, **fields: Any) -> BlockCount:
        """Remove a named holder from a block."""
        reply: BlockCount = self.ask(UnrefBlock(rid=self.rid(), block_id=block, holder=holder, **fields), client)
        return reply

    def explain(self, **subject: Any) -> Explanation:
        """Return the explanation of a subject."""
        before = refusal_digest(self.machine)
        reply: Explanation = self.ask(Explain(rid=self.rid(), **subject))
        assert refusal_digest(self.machine) == before, "an explanation changed the state"
        return reply

    def stats(self) -> Stats:
        """Return the statistics."""
        reply: Stats = self.ask(GetStats(rid=self.rid()))
        return reply

    # ----------------------------------------------------------------------------------------------------------- state

    def blocks_of(self, sequence: int) -> list[int]:
        """Return the block table of a sequence, without counting as an access."""
        s = self.machine.cache.sequences
        found: list[int] = s.blocks_of(s.slot_of[sequence]).tolist()
        return found

    def counts_of(self, sequence: int) -> list[int]:
        """Return the reference counts of a sequence's blocks."""
        found: list[int] = self.machine.cache.blocks.refcount[self.blocks_of(sequence)].tolist()
        return found

    def free(self) -> int:
        """Return the free blocks of all pools."""
        return sum(group.pool.free for group in self.machine.cache.groups.values())

    def free_or_cached(self) -> int:
        """Return the blocks of all pools that have no holder and that no step may touch."""
        return sum(group.pool.free + group.pool.cached for group in self.machine.cache.groups.values())


def waiting_driver(**limits: Any) -> Driver:
    """Return a driver with leases for clients and a reattach period for workers."""
    return Driver(lease_us=LEASE_US, reattach_us=REATTACH_US, **limits)


def submit(d: Driver, rid: int = 100, client: int = 1, **fields: Any) -> Accepted:
    """Submit PROMPT with this command number, which a client repeats; return the answer."""
    fields = {"max_tokens": 12, "sampling": GREEDY, **fields}
    reply = d.ask(Submit(rid=rid, prompt=int32(PROMPT), **fields), client)
    assert isinstance(reply, Accepted)
    return reply


def int32(values: Sequence[int]) -> Any:
    """Return an int32 array."""
    return np.array(values, np.int32)
