"""Simulated workers: they execute real steps on a KV memory that records what was written where.

The memory starts as garbage and is written by steps alone. Each cell holds (token, position) and, where kinds matter,
whether the token was computed as a generated or a prompt token. A step reads the block tables from the published file
at execution time, not at planning time. Attention over a cell with a wrong position is a violation at once. A wrong
token is one, too, because the context's fingerprint then differs from the oracle's.

Layers with a sliding window write the same tokens into blocks of their own, in cells that also name the place of the
block among those of its tokens. A row must find there what the block table has, for each token that it can see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvforge.coordinator.core.cache.host_node import NO_HOST_BLOCK
from kvforge.coordinator.core.cache.host_tier import HostTier
from kvforge.coordinator.core.cache.kv_cache_manager import KVCacheManager
from kvforge.protocol import codec
from kvforge.protocol.messages import (
    GENERATED,
    MISSED_CHECKSUM,
    NO_INT32,
    DiskOrders,
    DiskScan,
    ErrorInfo,
    Message,
    ModelInfo,
    PoolRegistered,
    Refused,
    Rendezvous,
    RowError,
    RowStart,
    Step,
    StepResult,
    Stop,
    WorkerHello,
    WorkerLoading,
    WorkerReady,
    WorkerWelcome,
)
from kvforge.protocol.tables import TablesReader
from tools.simulation.disk_tiers import SimulatedDisk, WrongOrder
from tools.simulation.drafting import accepted, check_drafts, drafts_of, in_state, proposals, proposed
from tools.simulation.draws import Draws
from tools.simulation.host_files import Cells, HostFile, copies_of
from tools.simulation.model import CONTEXT_MAX, DEADLY, Oracle, Score, choose, fingerprint_of, poison, score_of, tops_of
from tools.simulation.network import Clock, Connection, SimulatedPeers
from tools.simulation.settings import Settings
from tools.simulation.states import EMPTY, StatePage, advanced, state_of

RETRY_US = 3_000
REBORN_US = 5_000
LOOKS_US = 200
# The watchdog of a worker's unit ends a process whose loop makes no turn for this many step timeouts: 120 s and 60 s in
# deploy/. The coordinator ends a worker that hangs earlier, but only one that is connected.
WATCHDOG_TIMEOUTS = 2
ANSWERS_KEPT = 16  # more than the steps in flight
PIDS = 100_000
POSITIONS = list(range(CONTEXT_MAX))
PAGE = 10 * CONTEXT_MAX
PASS_OF = 4  # a pass of a draft model takes 1 / PASS_OF of its step
COPY_US = 40  # time of a host copy: of a block
SPOILED = -2  # the position of KV that was not found on the host, and of what was computed from it
SPOILED_PAGE = StatePage(SPOILED, EMPTY, 0)  # likewise of a state


class WorkerCrashed(Exception):
    """A worker process crashed on a step."""


class Violation(AssertionError):
    """The system broke a promise."""


class Host(Protocol):
    """A worker's view of the world."""

    clock: Clock
    settings: Settings
    calm: bool

    def oracle(self, request_id: int) -> Oracle:
        """Return the oracle of a request."""

    def kept_pool(self, name: str, epoch: int) -> bool:
        """Return whether the coordinator knows this pool and still waits for its worker."""

    def has_pool(self, epoch: int) -> bool:
        """Return whether the coordinator has the pool of this epoch."""

    def met(self, name: str, epoch: int, meeting: str) -> None:
        """Record that a rank has a pool of this epoch, after a rendezvous of this name."""

    def others(self, worker: SimulatedWorker) -> list[SimulatedWorker]:
        """Return the live ranks of the worker's rendezvous."""

    def counts(self, request_id: int) -> bool:
        """Return whether a row of the request can still count: its client's sequence may have continued without it."""

    def delivered(self) -> None:
        """Count a message that reached a peer."""


class KvMemory:
    """Blocks of (token, position) cells, garbage at first; block ids are global, from `base` on.

    A block may hold a part of a recurrent state instead (`states`); writing the one destroys the other.

    Uses lists, because numpy takes longer for a few dozen cells.
    """

    def __init__(self, base: int, blocks: int, block_size: int, random: Random) -> None:
        self.base, self.blocks, self.block_size = base, blocks, block_size
        cells = blocks * block_size
        self._tokens = [random.randrange(1 << 16) for _ in range(cells)]
        self._positions = [-1] * cells
        self._states: dict[int, StatePage] = {}

    def copy(self, triples: npt.NDArray[np.int32]) -> None:
        """Copy leading cells of blocks: all reads before all writes, as a device may do it."""
        sources, targets = set(triples[0::3].tolist()), triples[1::3].tolist()
        if len(set(targets)) != len(targets) or sources & set(targets):
            raise Violation(f"copies of one step depend on each other: {triples.tolist()}")
        size = self.block_size
        read = []
        for source, target, count in triples.reshape(-1, 3).tolist():
            if not 1 <= count <= size:
                raise Violation(f"a copy of {count} tokens in blocks of {size}")
            start = self._cell(source)
            cells = slice(start, start + count)
            page = self._states.get(source) if count == size else None
            read.append((target, count, self._tokens[cells], self._positions[cells], page))
        for target, count, tokens, positions, page in read:
            start = self._cell(target)
            self._tokens[start : start + count] = tokens
            self._positions[start : start + count] = positions
            self._put(target, page)

    def cells(self, block: int) -> Cells:
        """Return what a block holds."""
        start = self._cell(block)
        cells = slice(start, start + self.block_size)
        return tuple(self._tokens[cells]), tuple(self._positions[cells]), self._states.get(block)

    def put_cells(self, block: int, cells: Cells) -> None:
        """Fill a block with what another one held."""
        start = self._cell(block)
        tokens, positions, page = cells
        self._tokens[start : start + self.block_size] = tokens
        self._positions[start : start + self.block_size] = positions
        self._put(block, page)

    def zero(self, blocks: npt.NDArray[np.int32]) -> None:
        """Clear the blocks, so that a later read of old contents is noticed."""
        for block in blocks.tolist():
            start = self._cell(block)
            self._tokens[start : start + self.block_size] = [0] * self.block_size
            self._positions[start : start + self.block_size] = [-1] * self.block_size
            self._put(block, None)

    def _put(self, block: int, page: StatePage | None) -> None:
        if page is None:
            self._states.pop(block, None)
        else:
            self._states[block] = page

    def states(self, blocks: list[int]) -> list[StatePage | None]:
        """Return what the blocks hold of a state."""
        return [self._states.get(block) for block in blocks]

    def write_states(self, rows: list[list[int]], contents: list[tuple[int, int]]) -> None:
        """Write the state of each row, (tokens, state), to its blocks; no block may be written twice."""
        blocks = [block for row in rows for block in row]
        if len(set(blocks)) != len(blocks):
            raise Violation("two rows of a step write the same block of a state")
        for row, (tokens, state) in zip(rows, contents, strict=True):
            for number, block in enumerate(row):
                start = self._cell(block)
                self._positions[start : start + self.block_size] = [-1] * self.block_size
                self._states[block] = StatePage(tokens, state, number)

    def _cell(self, block: int) -> int:
        if not self.base <= block < self.base + self.blocks:
            raise Violation(f"block {block} is not in this worker's pool")
        return (block - self.base) * self.block_size

    def write(self, rows: Iterable[tuple[list[int], int, int]], tokens: list[int], page: int = -1) -> None:
        """Write the KV of all rows of a step, with no cell written twice.

        Args:
            rows: (block ids, start, end) of each row; positions [start, end) are written.
            tokens: the tokens of all rows.
            page: the number of the window blocks among those of their tokens; -1 for blocks of all tokens.
        """
        at = [
            (self._cell(ids[p // self.block_size]) + p % self.block_size, p)
            for ids, *ends in rows
            for p in range(*ends)
        ]
        if len({cell for cell, _ in at}) != len(at):
            raise Violation("two rows of a step write the same cell")
        for cell, _ in at if self._states else ():
            self._states.pop(self.base + cell // self.block_size, None)
        for (cell, position), token in zip(at, tokens, strict=True):
            self._tokens[cell] = token
            self._positions[cell] = position + (page + 1) * PAGE

    def is_spoiled(self, ids: list[int], start: int, end: int) -> bool:
        """Return whether positions [start, end) of a row, with these blocks, have KV that was not found on the host."""
        return any(self._positions[cell] == SPOILED for cell in self._cells(ids, start, end))

    def spoil(self, ids: list[int], start: int, end: int) -> None:
        """Mark the KV of positions [start, end) of a row as computed from what was not found on the host."""
        for cell in self._cells(ids, start, end):
            self._positions[cell] = SPOILED

    def spoil_state(self, blocks: list[int]) -> None:
        """Mark the state in these blocks likewise."""
        self._states.update(dict.fromkeys(blocks, SPOILED_PAGE))

    def _cells(self, ids: list[int], start: int, end: int) -> list[int]:
        return [self._cell(ids[p // self.block_size]) + p % self.block_size for p in range(start, end)]

    def read(self, ids: list[int], end: int, counting: bool) -> list[int]:
        """Read the tokens of a row at positions [0, end).

        Args:
            ids: the row's block ids.
            end: the number of tokens.
            counting: whether the row's result matters; otherwise it may read any contents of the pool.

        Returns:
            The tokens.
        """
        tokens: list[int] = []
        positions: list[int] = []
        for block in ids[: -(-end // self.block_size)]:
            start = self._cell(block)
            tokens += self._tokens[start : start + self.block_size]
            positions += self._positions[start : start + self.block_size]
        if counting and positions[:end] != POSITIONS[:end]:
            position, found = next((p, found) for p, found in enumerate(positions) if p != found)
            raise Violation(f"a row attends at position {position} to KV of position {found} (-1: garbage)")
        return tokens[:end]

    def check_windows(self, ids: list[int], first: int, tokens: list[int], page: int) -> None:
        """Check what the layers with a window see.

        Args:
            ids: window blocks of the row, by the number of the block.
            first: the first token in sight.
            tokens: all tokens of the row.
            page: as in `write`.

        Raises:
            Violation: It is not the KV of these tokens.
        """
        size = self.block_size
        for position in range(first, len(tokens)):
            cell = self._cell(ids[position // size]) + position % size
            found = self._positions[cell] - (page + 1) * PAGE
            if found != position or self._tokens[cell] != tokens[position]:
                raise Violation(
                    f"a layer with a window sees at position {position} KV of position {found}, "
                    f"token {self._tokens[cell]} instead of {tokens[position]}"
                )


class Row:
    """A worker's state of a slot, from its RowStart on."""

    def __init__(self, begin: RowStart) -> None:
        self.request_id, self.seed, self.generated = begin.request_id, begin.seed, begin.generated
        self.tops = begin.sampling.logprobs
        self.scores = begin.sampling.prompt_logprobs
        self.drafts = begin.drafts
        self.last = -1
        self.failed = False


class SimulatedWorker:
    """One worker process, or one rank of a worker, through deaths and restarts; each life begins with an empty pool.

    When the coordinator's process dies, the worker keeps its pool, continues its steps, and reconnects with its pool
    and its unacknowledged results.
    """

    def __init__(
        self, name: str, blocks: int, host: Host, peers: SimulatedPeers, seed: str, rank: int = 0, ranks: int = 1
    ) -> None:
        self.name, self.blocks = name, blocks
        self.rank, self.ranks = rank, ranks
        self.label = f"{name}.{rank}" if rank else name
        self.meeting = ""
        self.lives = 0
        self.garble = ""
        self.wrong = False  # it has sent an invalid message in this life
        self.hangs = False
        self.alive = False  # the process runs
        self.connection: Connection | None = None
        self._host, self._peers, self._seed = host, peers, seed
        count = host.settings.host_blocks
        self._file = HostFile(self.label, count, host.settings.block_size) if count else None
        blocks, random = host.settings.disk_blocks, Random(f"disk/{seed}/{self.label}")
        times = host.settings.order_us, host.settings.late_share, host.settings.stuck_share
        self._disk = SimulatedDisk(blocks, random, host.settings.block_size, *times) if blocks else None
        self._half_share = host.settings.half_share

    def replaced(self, back_after_us: int) -> None:
        """Restart the worker, which the coordinator takes for hung.

        That is a violation if the worker had executed and reported all its steps, and no other rank kept it waiting.
        """
        told_us = self._host.clock.now_us - 2 * self._host.settings.turn_us
        busy = self.hangs or self._working or self._steps
        alone = self.ranks == 1
        if (
            alone
            and self.connection is not None
            and self.connection.last_us < told_us
            and self._registered
            and not busy
        ):
            raise Violation(f"{self.name} was replaced although it had finished all its steps")
        self.kill(back_after_us)

    @property
    def pid(self) -> int:
        """Return the process id, different in each life."""
        return PIDS * (1 + int(self.name[1:])) + PIDS // 10 * self.rank + self.lives

    def start(self) -> None:
        """Start a new life."""
        if self.alive:
            return
        self.alive = True
        self.lives += 1
        self._random = Draws(f"{self._seed}/{self.label}/{self.lives}")
        self.hangs = self.wrong = False
        self._boot, self._pools, self.meeting = "", 0, ""
        if self._file is not None and self.lives > 1:
            self._file.leave(self._unfinished, self._random)
            self._file.reborn(self._random)
        self._unfinished: list[list[int]] = []
        self._empty()
        self._connect()

    def _empty(self) -> None:
        """Drop all state and all steps."""
        self._pools += 1
        if self._disk is not None:
            self._disk.begin()
        self._epoch = self._last_step = 0
        self._rows: dict[int, Row] = {}
        self._steps: deque[Step] = deque()
        self._answers: deque[StepResult] = deque(maxlen=ANSWERS_KEPT)
        self._working = self._registered = self._stands = False
        self._ended_us = self._idle_us = -1  # when its last step ended, and the pause before the one that runs
        self._begun = self._stood_us = 0
        self._reader: TablesReader | None = None

    def _connect(self) -> None:
        if self._stands:
            if self.hangs and len(self._host.others(self)) < self.ranks - 1:
                self.kill(REBORN_US)  # in `_finish` it would notice that another rank is gone, if it got there
            elif self._host.clock.now_us - self._stood_us > WATCHDOG_TIMEOUTS * self._host.settings.step_timeout_us:
                self.kill(REBORN_US)  # it cannot reconnect, so the coordinator cannot end it
            else:
                self._lost()
            return
        self._registered = False
        self.connection = self._peers.connect(self._random, self._receive, lost=self._lost)
        ours: dict[str, Any] = {"boot": self._boot, "epoch": self._epoch, "rank": self.rank, "ranks": self.ranks}
        self._send(WorkerHello(rid=1, name=self.name, pid=self.pid, **ours))

    def _lost(self) -> None:
        """Handle the death of the coordinator's process."""
        self.connection, self._registered = None, False
        life = self.lives
        delay_us = 1 + self._random.randrange(RETRY_US)
        self._host.clock.after(delay_us, lambda: self._connect() if self.alive and life == self.lives else None)

    @property
    def epoch(self) -> int:
        """Return the epoch of its pool, or 0."""
        return self._epoch

    def cut_off(self) -> bool:
        """Drop a silent connection and reconnect; return whether there was one with a registered pool."""
        if (
            self.connection is None
            or not self._registered
            or any(each.wrong for each in (self, *self._host.others(self)))
        ):
            return False  # after an invalid message the coordinator drops it, and it may not know that yet
        self.connection.cut(at_once=True)  # the kernel notes it before the next connection is made
        self._lost()
        return True

    def kill(self, back_after_us: int) -> None:
        """Kill the process; it restarts later."""
        if not self.alive:
            return
        if self.connection is not None:
            self.connection.cut()
        self.connection, self.alive = None, False
        self._unfinished = [copy for step in self._steps for copy in copies_of(step.host_writes.tolist())]
        self._host.clock.after(back_after_us, self.start)

    def _send(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(codec.encode(message))

    def _receive(self, message: Message) -> None:
        self._host.delivered()
        if isinstance(message, Step):
            if message.step_id > self._last_step:  # otherwise it was received before, from a coordinator that has died
                self._last_step = message.step_id
                self._steps.append(message)
                self._work()
        elif isinstance(message, WorkerWelcome):
            self._welcome(message)
        elif isinstance(message, PoolRegistered):
            self._pool_registered(message)
        elif isinstance(message, Rendezvous):
            self.meeting = message.name
            self._load()
        elif isinstance(message, DiskScan | DiskOrders):
            self._use_disk(message)
        elif isinstance(message, Refused | Stop):
            self.kill(RETRY_US)

    def _use_disk(self, message: DiskScan | DiskOrders) -> None:
        disk = self._disk
        if disk is None:
            raise Violation(f"{self.name} has no disk tier, but gets {type(message).__name__}")
        if message.epoch != self._epoch:
            raise Violation(f"{self.name} has epoch {self._epoch}, but an order for its disk is of {message.epoch}")
        life = self.lives, self._pools
        if isinstance(message, DiskScan):
            self._send(disk.scan(message, self._epoch))
            return
        disk.take(message, self._host.clock.after, lambda number: self._disk_ended(life, number))

    def check_files(self, cache: KVCacheManager) -> None:
        """Check that the books have each block with bytes of an entry, so that a wipe finds them all."""
        if not self.alive or not self._registered:
            return
        group = next((each for each in cache.groups.values() if each.epoch == self._epoch), None)
        if group is None or group.host is None:
            return
        assert self._file is not None
        parts: list[tuple[HostTier, set[int]]] = [(group.host.tier, self._file.filled())]
        if group.disk is not None and self._disk is not None and group.disk.tier.announced:
            parts.append((group.disk.tier, self._disk.filled()))
        for tier, filled in parts:
            alive = [node.tag for node in tier.nodes.values() if node.block != NO_HOST_BLOCK and not node.wiped]
            if not cache.wipes.dead.keys().isdisjoint(alive):
                raise Violation(f"{self.name}: entries of wiped tenants can be hits")
            placed = {node.block for node in tier.nodes.values()}
            lost = filled.difference(placed, tier.stale, tier.to_wipe, tier.wiping, tier._quarantine)
            if lost:
                raise Violation(f"{self.name}: blocks {sorted(lost)} have bytes of entries that no wipe would find")

    def _disk_ended(self, life: tuple[int, int], number: int) -> None:
        if not self.alive or life != (self.lives, self._pools) or self.hangs:
            return
        assert self._disk is not None
        assert self._file is not None
        try:
            result = self._disk.finish(number, self._file)
        except WrongOrder as error:
            raise Violation(f"{self.name}: {error}") from None
        if result is not None and self._registered:
            self._send(msgspec.structs.replace(result, epoch=self._epoch))

    def _pool_registered(self, message: PoolRegistered) -> None:
        if not self._epoch:
            self._epoch = message.epoch
            self._memory = KvMemory(message.base_block, self.blocks, self._host.settings.block_size, self._random)
        elif message.epoch != self._epoch:
            raise Violation(f"{self.name} has a pool of epoch {self._epoch}, but the coordinator has {message.epoch}")
        self._registered = True
        if self.ranks > 1:
            self._host.met(self.name, self._epoch, self.meeting)
        for answer in self._answers:
            if answer.step_id > message.done:
                self._send(answer)
        self._work()

    def _welcome(self, message: WorkerWelcome) -> None:
        if message.epoch:
            self._reader = TablesReader(Path(message.tables_path), message.boot)
            return  # the coordinator knows its pool
        if self.meeting:
            self.kill(RETRY_US)  # another rank may be inside a step that this one never receives
            return
        if self._epoch and self.ranks == 1 and self._host.kept_pool(self.name, self._epoch):
            raise Violation(f"{self.name} reconnected with its pool in time, but must start anew")
        self._empty()
        self._boot = message.boot
        self._reader = TablesReader(Path(message.tables_path), message.boot)
        if self.ranks == 1:
            self._load()

    def _load(self) -> None:
        settings = self._host.settings
        self._send(WorkerLoading(phase="reading", progress=0.5))
        model = ModelInfo(
            name="hash",
            source="simulation",
            architecture="hash",
            fingerprint="00",
            vocab_size=settings.vocabulary,
            context_tokens_max=settings.context,
            eos_tokens=settings.eos,
        )
        pool: dict[str, Any] = {"blocks": self.blocks, "bytes_per_block": 64, "kv_dtype": "pair", "device": "none"}
        pool |= {"state_blocks": settings.state_blocks, "prompt_chunk": settings.prompt_chunk}
        pool |= {
            "window": settings.window,
            "window_pages": settings.window_pages,
            "window_blocks": settings.ring_blocks,
        }
        pool |= {"drafts": settings.drafts, "draft_states": settings.draft_states}
        pool |= {"model_drafts": settings.model_drafts}
        if self._file is not None:
            pool |= {"host_blocks": self._file.blocks, "host_identity": self._file.identity}
            pool |= {"host_new": not self._file.filled()}
            pool |= {"disk_blocks": self._disk.blocks if self._disk is not None else 0}
        self._send(WorkerReady(rid=2, model=model, zeroes=True, wants_kinds=settings.kinds, **pool))

    # ---------------------------------------------------------------------------------------------------------- steps

    def _work(self) -> None:
        if self._working or not self._steps:
            return
        self._working = True
        if self._ended_us >= 0:
            self._idle_us = self._host.clock.now_us - self._ended_us
        took_us = 1 + int(self._random.random() * self._host.settings.step_us)
        life = self.lives, self._pools
        self._begun = self._steps[0].step_id
        if self._half_share and self._steps[0].host_writes.size and self._random.random() < self._half_share:
            self._host.clock.after(1 + took_us // 2, lambda: self._die_within(life))
        self._host.clock.after(took_us, lambda: self._finish(life, took_us))

    def _die_within(self, life: tuple[int, int]) -> None:
        """Die in the middle of a step that copies to the host file, if it still runs."""
        if self.alive and life == (self.lives, self._pools) and self._working and self._half_share:
            self.kill(REBORN_US)

    def calm(self) -> None:
        """Die within no step any more, and let the disk go on."""
        self._half_share = 0.0
        if self._disk is not None:
            self._disk.calm()
            if self.hangs and not self._steps:  # only its watchdog notices: orders of the disk have no deadline
                self.kill(REBORN_US)

    def _waits_for_others(self, life: tuple[int, int], took_us: int) -> bool:
        """Return whether this rank waits inside a step for another one to begin it; it dies if that one is gone."""
        if self.ranks == 1:
            return False
        others = self._host.others(self)
        if len(others) < self.ranks - 1:
            self.kill(REBORN_US)
            return True
        stood, self._stands = self._stands, any(other._begun < self._begun for other in others)
        if self._stands:
            self._stood_us = self._stood_us if stood else self._host.clock.now_us
            self._host.clock.after(LOOKS_US, lambda: self._finish(life, took_us))
        return self._stands

    def _finish(self, life: tuple[int, int], took_us: int) -> None:
        if not self.alive or life != (self.lives, self._pools) or self.hangs:
            return
        if self._waits_for_others(life, took_us):
            return
        self._working, self._ended_us = False, self._host.clock.now_us
        if self._unknown():
            return  # dropped without knowing yet, or about to reconnect
        try:
            result = self.carry_out(self._steps.popleft(), took_us)
        except WorkerCrashed:
            self.kill(1 + int(self._random.random() * REBORN_US))
            return
        if self._host.settings.measures:
            result = msgspec.structs.replace(result, idle_us=self._idle_us)
        self._answers.append(result)
        if self._registered:
            self._send(self._garbled(result))
        if not self._host.calm and self._random.random() < self._host.settings.duplicate_share:
            self._send(result)
        self._work()

    def _unknown(self) -> bool:
        """Return whether the running coordinator does not know this worker, so that its results may not count.

        A worker that lost its connection may have been given up: its rows are then those of other pools.
        """
        connection = self.connection
        if connection is None or not self._peers.serves(connection):
            return not self._host.has_pool(self._epoch)
        return self._peers.number(connection.identity) is None

    def _garbled(self, result: StepResult) -> StepResult:
        how, self.garble = self.garble, ""
        self.wrong |= bool(how)
        if how == "vocabulary" and result.tokens.size and self.ranks > 1:  # only the other ranks' results can reveal it
            other = (result.tokens + 1 + self.rank) % self._host.settings.vocabulary
            return msgspec.structs.replace(result, tokens=other.astype(np.int32))
        if how == "vocabulary" and result.tokens.size:
            wrong = result.tokens + self._host.settings.vocabulary
            return StepResult(result.step_id, result.epoch, (), 0, result.slots, wrong, result.logprobs)
        if how == "missing" and result.tokens.size:
            row = int(np.count_nonzero(result.slots == result.slots[0]))  # all tokens of the first row
            lost = int(result.top_counts[:row].sum())
            tops = (result.top_counts[row:], result.top_tokens[lost:], result.top_logprobs[lost:])
            names = ("slots", "tokens", "logprobs", "top_counts", "top_tokens", "top_logprobs")
            short = (result.slots[row:], result.tokens[row:], result.logprobs[row:], *tops)
            drafts = dict.fromkeys(("draft_slots", "draft_counts", "draft_tokens"), NO_INT32)
            columns = dict(zip(names, short, strict=True)) | drafts
            return msgspec.structs.replace(result, duration_us=0, draft_model_rows=0, draft_us=0, **columns)
        if how == "step":
            return StepResult(result.step_id + 1, result.epoch)
        if how == "epoch":
            self._send(StepResult(result.step_id, result.epoch - 1, (), 0, result.slots, result.tokens * 0))
        return result

    def carry_out(self, step: Step, took_us: int) -> StepResult:
        """Execute a step exactly as the message says: host copies, zeroing, copies, writes, sampling."""
        if not step.host_writes.size and not step.host_reads.size and not step.host_wipes.size:
            return self._computed(step, took_us)
        copied, missed = self._host_copied(step)
        result = msgspec.structs.replace(self._computed(step, took_us), host_copied=copied, host_missed=missed)
        if not self._host.settings.measures:
            return result
        write_us, read_us = COPY_US * step.host_writes.size // 4, COPY_US * step.host_reads.size // 4
        return msgspec.structs.replace(result, host_write_us=write_us, host_read_us=read_us)

    def _host_copied(self, step: Step) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Copy blocks to the host, zero blocks, and copy blocks from the host.

        Returns:
            The host blocks, and those that were not found with their reasons.
        """
        memory, file = self._memory, self._file
        if file is None:
            raise Violation(f"{self.name} has no host file, but step {step.step_id} copies from or to it")
        writes, reads = copies_of(step.host_writes.tolist()), copies_of(step.host_reads.tolist())
        for host_block in step.host_wipes.tolist():
            file.wipe(host_block)
        sources = [memory.cells(block) for block, *_ in writes]
        for (_, host_block, low, high), cells in zip(writes, sources, strict=True):
            file.write(host_block, (low, high), cells)
        if step.zeros.size:
            memory.zero(step.zeros)
        missed: list[int] = []
        self._flip(step, file)
        for block, host_block, low, high in reads:
            found = file.read(host_block, (low, high))
            if host_block in file.flipped:
                missed += [host_block, MISSED_CHECKSUM]
                found = (0,) * memory.block_size, (SPOILED,) * memory.block_size, SPOILED_PAGE
            if found is None:
                raise Violation(f"{self.name} step {step.step_id}: host block {host_block} has other content")
            memory.put_cells(block, found)
        copied = [*(copy[1] for copy in (*writes, *reads)), *step.host_wipes.tolist()]
        return np.array(copied, np.int32), np.array(missed, np.int32)

    def _flip(self, step: Step, file: HostFile) -> None:
        """Flip a bit now and then; of several ranks the same one, since all compute from what one has missed."""
        share = self._host.settings.flip_share
        if self.ranks == 1:
            file.flip(self._random, share)
        elif share:
            draws = Draws(f"{self._seed}/{self.name}/{self._epoch}/{step.step_id}")
            file.flipped.update(block for block in step.host_reads[1::4].tolist() if draws.random() < share)

    def _computed(self, step: Step, took_us: int) -> StepResult:
        assert self._reader is not None
        memory, size = self._memory, self._host.settings.block_size
        if step.zeros.size and not step.host_reads.size:
            memory.zero(step.zeros)
        if step.copies.size:
            memory.copy(step.copies)
        for begin in step.begins:
            self._rows[begin.slot] = Row(begin)
        if not step.slots.size:
            return StepResult(step_id=step.step_id, epoch=self._epoch, duration_us=took_us)
        settings = self._host.settings
        states_max = settings.draft_states if settings.state_blocks else settings.step_rows_max
        if problem := check_drafts(step, list(self._steps), settings.drafts, settings.step_rows_max, states_max):
            raise Violation(f"{self.name} step {step.step_id}: {problem}")
        starts, counts = step.starts.tolist(), step.counts.tolist()
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        table, _, _ = self._reader.rows(step.slots, -(-max(ends) // size))
        rows: list[list[int]] = table.tolist()
        tokens = self._resolved(step)
        counting = [self._host.counts(self._rows[slot].request_id) for slot in step.slots.tolist()]
        tainted = self._tainted(step, rows) if settings.flip_share else []
        memory.write(zip(rows, starts, ends, strict=True), tokens)
        for row in tainted:
            counting[row] = False
            memory.spoil(rows[row], starts[row], ends[row])
        found = [memory.read(*row) for row in zip(rows, ends, counting, strict=True)]
        if self._host.settings.window_pages:
            self._through_windows(step, tokens, found, counting)
        if self._host.settings.state_blocks:
            self._advance_states(step, tokens, found, counting)
        if tainted:
            self._spoil_parts(step, tainted)
        whole = found
        if step.drafts.size:  # what is known; no rejected draft crashes or fails anything
            ends = [end - drafted for end, drafted in zip(ends, drafts_of(step), strict=True)]
            found = [text[:end] for text, end in zip(found, ends, strict=True)]
        bad = poison(self._host.settings.vocabulary)
        poisons = [tokens.count(bad) for tokens in found]
        if self._host.settings.deadly and any(c and p >= DEADLY for c, p in zip(counting, poisons, strict=True)):
            raise WorkerCrashed
        fingerprints = list(map(fingerprint_of, found))
        result = self._sampled(step, ends, counting, fingerprints, [p > 0 for p in poisons], took_us, whole)
        return self._scored(step, found, result) if step.scored.size else result

    def _window_rows(self, step: Step, page: int) -> list[list[int]]:
        """Return the window blocks of each row by the number of the block; those out of sight are undefined."""
        assert self._reader is not None
        settings = self._host.settings
        pages, ring, before = settings.window_pages, settings.ring_blocks, settings.state_blocks
        table: list[list[int]] = self._reader.states(step.slots, before + ring * pages).tolist()
        ends = (step.starts + step.counts).tolist()
        return [
            [row[before + number % ring * pages + page] for number in range(-(-end // settings.block_size))]
            for row, end in zip(table, ends, strict=True)
        ]

    def _tainted(self, step: Step, rows: list[list[int]]) -> list[int]:
        """Return the rows that read what was not found on the host. Their results do not count."""
        assert self._reader is not None
        settings, memory, starts = self._host.settings, self._memory, step.starts.tolist()
        found = {row for row, start in enumerate(starts) if memory.is_spoiled(rows[row], 0, start)}
        for page in range(settings.window_pages):
            for row, (ids, start) in enumerate(zip(self._window_rows(step, page), starts, strict=True)):
                if memory.is_spoiled(ids, max(0, start + 1 - settings.window), start):
                    found.add(row)
        if settings.state_blocks:
            states = self._reader.states(step.slots, settings.state_blocks).tolist()
            found.update(
                row for row, start in enumerate(starts) if start and SPOILED_PAGE in memory.states(states[row])
            )
        return sorted(found)

    def _spoil_parts(self, step: Step, tainted: list[int]) -> None:
        """Mark what tainted rows have written for layers with a window, and their states."""
        assert self._reader is not None
        settings, memory, starts = self._host.settings, self._memory, step.starts.tolist()
        ends = (step.starts + step.counts).tolist()
        for page in range(settings.window_pages):
            ids = self._window_rows(step, page)
            for row in tainted:
                memory.spoil(ids[row], starts[row], ends[row])
        if settings.state_blocks:
            states = self._reader.states(step.slots, settings.state_blocks).tolist()
            for row in tainted:
                memory.spoil_state(states[row])

    def _through_windows(self, step: Step, tokens: list[int], found: list[list[int]], counting: list[bool]) -> None:
        """Write the tokens for the layers with a window, and check all that these layers see."""
        settings, memory, starts = self._host.settings, self._memory, step.starts.tolist()
        ends = (step.starts + step.counts).tolist()
        for page in range(settings.window_pages):
            rows = self._window_rows(step, page)
            memory.write(zip(rows, starts, ends, strict=True), tokens, page)
            for ids, start, text, counts in zip(rows, starts, found, counting, strict=True):
                if counts:
                    memory.check_windows(ids, max(0, start + 1 - settings.window), text, page)

    def _advance_states(self, step: Step, tokens: list[int], found: list[list[int]], counting: list[bool]) -> None:
        """Advance the states of all rows, which must be those of the tokens that the rows attend to."""
        assert self._reader is not None
        settings, memory = self._host.settings, self._memory
        rows: list[list[int]] = self._reader.states(step.slots, settings.state_blocks).tolist()
        contents, first, drafts = [], 0, drafts_of(step)
        for i, (start, count) in enumerate(zip(step.starts.tolist(), step.counts.tolist(), strict=True)):
            own, first = tokens[first : first + count], first + count
            text = found[i]
            if drafts[i]:
                count = self._in_state(int(step.slots[i]), text, drafts[i])
                own, text = own[:count], text[: start + count]
            pages = memory.states(rows[i]) if start else []
            before = pages[0].state if pages and pages[0] is not None else EMPTY
            after = advanced(before, own, start, settings.prompt_chunk)
            if counting[i]:
                self._check_state(pages, text, start, settings.prompt_chunk)
                self._check_row(own, text, after, settings.prompt_chunk, drafts[i])
            contents.append((start + count, after))
        memory.write_states(rows, contents)

    def _check_state(self, pages: list[StatePage | None], text: list[int], start: int, chunk: int) -> None:
        state = state_of(tuple(text[:start]), chunk)
        due: list[StatePage | None] = [StatePage(start, state, number) for number in range(len(pages))]
        if pages != due:
            raise Violation(f"{self.name}: a row starts at {start} with a state of {pages}, not {due}")

    def _in_state(self, slot: int, text: list[int], drafted: int) -> int:
        """Return behind how many tokens of a row with drafts its state is. text: what the row attends to."""
        row = self._rows[slot]
        if row.failed:
            return 1
        return in_state(
            drafted,
            len(accepted(text, len(text) - drafted, row.seed, row.generated, self._host.settings.vocabulary)),
        )

    def _check_row(self, own: list[int], text: list[int], after: int, chunk: int, drafted: int) -> None:
        if len({token >= GENERATED for token in own}) > 1 or (own[0] >= GENERATED and len(own) > 1 + drafted):
            raise Violation(f"{self.name}: a row with tokens of both kinds, or with several generated ones: {own}")
        if after != state_of(tuple(text), chunk):
            raise Violation(f"{self.name}: a prompt was cut elsewhere than at multiples of {chunk}: up to {len(text)}")

    def _scored(self, step: Step, found: list[list[int]], result: StepResult) -> StepResult:
        """Add the log-probabilities of prompt tokens, computed from the contents of the memory."""
        failed = {error.slot for error in result.errors}
        ends = np.cumsum(step.counts)
        scores: list[Score] = []
        for place, token in zip(step.scored.tolist(), step.following.tolist(), strict=True):
            row = int(np.searchsorted(ends, place, "right"))
            slot = int(step.slots[row])
            if slot in failed:
                continue
            position = int(step.starts[row]) + place - int(ends[row] - step.counts[row])
            width = self._rows[slot].scores
            if width is None:
                raise Violation(f"slot {slot} is scored, but its request does not want it")
            context = fingerprint_of(found[row][: position + 1])
            scores.append(score_of(context, token, width, self._host.settings.vocabulary))
        pairs = [pair for _, _, tops in scores for pair in tops]
        return msgspec.structs.replace(
            result,
            prompt_logprobs=np.array([logprob for logprob, _, _ in scores], np.float32),
            prompt_ranks=np.array([rank for _, rank, _ in scores], np.int32),
            prompt_top_counts=np.array([len(tops) for _, _, tops in scores], np.int32),
            prompt_top_tokens=np.array([token for token, _ in pairs], np.int32),
            prompt_top_logprobs=np.array([logprob for _, logprob in pairs], np.float32),
        )

    def _resolved(self, step: Step) -> list[int]:
        tokens: list[int] = step.tokens.tolist()
        if -1 in tokens:
            slots, rows = step.slots.tolist(), np.arange(step.slots.size).repeat(step.counts).tolist()
            for i, token in enumerate(tokens):
                if token == -1:
                    row = self._rows[slots[rows[i]]]
                    if not row.failed and row.last < 0:
                        raise Violation(f"slot {slots[rows[i]]} gets a sampled token as input before any was sampled")
                    tokens[i] = (0 if row.failed else row.last) + self._host.settings.mark
        return tokens

    def _sampled(
        self,
        step: Step,
        ends: list[int],
        counting: list[bool],
        fingerprints: list[int],
        poisoned: list[bool],
        took_us: int,
        whole: list[list[int]],
    ) -> StepResult:
        slots, chosen, errors, tops, drafts = [], [], [], [], dict[int, list[int]]()
        vocabulary = self._host.settings.vocabulary
        for i, slot in enumerate(step.slots.tolist()):
            row = self._rows[slot]
            if row.failed:
                errors.append(RowError(slot, ErrorInfo("worker_error", "failed before")))
                continue
            if counting[i] and fingerprints[i] != self._host.oracle(row.request_id).fingerprint(ends[i]):
                raise Violation(
                    f"{self.name} step {step.step_id}: request {row.request_id} attends over wrong tokens "
                    f"in positions 0 to {ends[i] - 1}"
                )
            if poisoned[i]:
                row.failed = True
                errors.append(RowError(slot, ErrorInfo("worker_error", "poison")))
            elif step.samples[i]:
                if step.drafts.size:
                    own = accepted(whole[i], ends[i], row.seed, row.generated, vocabulary)
                else:
                    own = [choose(fingerprints[i], row.seed, row.generated, vocabulary)]
                row.last = own[-1]
                row.generated += len(own)
                slots += [slot] * len(own)
                chosen += own
                tops += [tops_of(token, row.tops, vocabulary) for token in own]
                if row.drafts:
                    oracle = self._host.oracle(row.request_id)
                    most = min(row.drafts, step.propose or row.drafts)
                    drafts[slot] = proposed(oracle, row.generated, most, vocabulary, self._random)
        result = StepResult(
            step_id=step.step_id,
            epoch=self._epoch,
            errors=tuple(errors),
            duration_us=took_us if self._host.settings.measures else 0,
            slots=np.array(slots, np.int32),
            tokens=np.array(chosen, np.int32),
            logprobs=-np.array(chosen, np.float32),
        )
        pass_us = took_us // PASS_OF if self._host.settings.measures else 0
        if columns := proposals(drafts, step.propose, pass_us):
            result = msgspec.structs.replace(result, **columns)
        pairs = [pair for row_tops in tops for pair in row_tops]
        if not pairs:
            return result
        return msgspec.structs.replace(
            result,
            top_counts=np.array([len(row_tops) for row_tops in tops], np.int32),
            top_tokens=np.array([token for token, _ in pairs], np.int32),
            top_logprobs=np.array([logprob for _, logprob in pairs], np.float32),
        )
