"""The world of a seed: limits of the core, workers, tenants, and the network's behaviour."""

from __future__ import annotations

from random import Random

import msgspec

from kvforge.coordinator.core.limits import Limits, Quota
from kvforge.protocol.layout import Geometry
from kvforge.protocol.messages import GENERATED
from tools.simulation.limits import make_limits

TENANTS = ("ant", "bee", "cat")
DAY_US = 86_400_000_000
SAMPLES_MAX = 4
CRASHES_SHARE = KINDS_SHARE = 0.4  # share of the worlds
STATES_SHARE = WINDOWS_SHARE = 0.25
DRAFTS_SHARE = HOSTS_SHARE = DISKS_SHARE = BATCHES_SHARE = 0.0  # the worlds of known seeds have none
DISK_WAIT_US = 20_000
MEASURES_SHARE = 0.5  # of the worlds with drafts
RANKS_SHARE = STANDS_SHARE = 0.3


def tenant_of(holder: str) -> str:
    """Return the tenant that a holder's name is charged to, the same in every world."""
    return TENANTS[ord(holder[-1]) % len(TENANTS)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings drawn from a seed or given explicitly; times in microseconds, shares from 0 to 1.

    Attributes:
        deadly: some prompts crash every worker that runs them; nothing else crashes workers, so all other requests must
            finish.
        drain_ms: the deadline of the Drain at the end of the run; 0 for none, -1 for no Drain.
        drain_by_signal: a signal drains instead of a message.
        backlog_max: replies kept for a slow consumer.
        bound: clients restricted to one tenant; never c0, which releases everything at the end.
        zeroes: blocks that change tenant are zeroed first.
        scores: some requests want log-probabilities of their prompts.
        kinds: workers compute generated tokens differently from prompts, so their KV differs.
        ranks: processes of each worker; empty for one each.
        state_blocks: blocks of the recurrent state of a sequence; 0 for a model without one.
        prompt_chunk: tokens of the chunks in which such a model computes prompts.
        checkpoint_tokens: distance of the checkpoints of such states.
        window: tokens that layers with a sliding window see; 0 for a model without such layers.
        drafts: the most drafts of a row; 0 for none.
        draft_states: the most drafts of a step of a model with a recurrent state.
        model_drafts: the most tokens that a draft model proposes.
        batches: share of the requests that are of a batch.
        measures: workers report how long their steps took, so that few drafts may pay.
        window_pages: blocks with the KV of these layers for one block of tokens.
        host_blocks: blocks of the host file of each worker; 0 for none.
        writeback: blocks that a step writes back to it at most.
        learn: evicted blocks over which copies to it are judged; 0: all are made.
        disk_blocks: blocks of the disk tier of each worker; 0 for none.
        flip_share: share of the steps with host copies before which a bit of a block in the file flips.
        half_share: share of the steps with copies to the host file that their worker dies amid.
        order_us: most time of the other orders of a disk.
        late_share: share of the orders of a disk that end late.
        stuck_share: share of these that do not end before the worker dies, or all is calm.
        wipe_gap_us: mean time between two wipes of tenants; 0 for none.
        stand_gap_us: mean time between two standstills of the coordinator; 0 for none.
        crash_gap_us: mean time between two deaths of the coordinator; 0 for none, without journal and sessions.
    """

    block_size: int = 4
    context_blocks: int = 8
    sequences_max: int = 8
    queue_max: int = 16
    finished_max: int = 64
    finished_ttl_us: int = 600_000_000
    step_tokens_max: int = 16
    step_rows_max: int = 4
    steps_in_flight_max: int = 2
    partial_tokens_min: int = 2
    ageing_us: int = 10_000_000
    passes_max: int = 16
    deadline_max_us: int = DAY_US
    lease_us: int = 0
    step_timeout_us: int = 60_000_000
    decode_gap_us: int = 200_000
    crashes_max: int = 1000
    deadly: bool = False
    drain_ms: int = -1
    drain_by_signal: bool = False
    backlog_max: int = 1024
    policy: str = "lru"
    quotas: dict[str, Quota] = {}
    workers: tuple[int, ...] = (16,)
    clients: int = 2
    vocabulary: int = 24
    eos: tuple[int, ...] = ()
    short_us: int = 200
    long_us: int = 20_000
    long_share: float = 0.02
    step_us: int = 600
    duplicate_share: float = 0.05
    gap_us: int = 700
    turn_us: int = 50
    bound: dict[str, str] = {}
    zeroes: bool = False
    scores: bool = True
    kinds: bool = False
    ranks: tuple[int, ...] = ()
    state_blocks: int = 0
    prompt_chunk: int = 1
    checkpoint_tokens: int = 2048
    window: int = 0
    window_pages: int = 0
    drafts: int = 0
    draft_states: int = 0
    model_drafts: int = 0
    batches: float = 0.0
    measures: bool = True
    host_blocks: int = 0
    writeback: int = 0
    learn: int = 1024
    disk_blocks: int = 0
    flip_share: float = 0.0
    half_share: float = 0.0
    order_us: int = 200
    late_share: float = 0.08
    stuck_share: float = 0.0
    wipe_gap_us: int = 0
    stand_gap_us: int = 0
    crash_gap_us: int = 0
    reattach_us: int = 10_000_000

    @property
    def mark(self) -> int:
        """Return the mark of a generated token, as workers see and store it."""
        return GENERATED if self.kinds else 0

    def ranks_of(self, worker: int) -> int:
        """Return the number of processes of a worker."""
        return self.ranks[worker] if self.ranks else 1

    @property
    def processes(self) -> int:
        """Return the number of processes of all workers."""
        return sum(self.ranks) or len(self.workers)

    @property
    def context(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.block_size * self.context_blocks

    @property
    def ring_blocks(self) -> int:
        """Return how many blocks of a sequence the ring of its windows names; 0 without windows."""
        if not self.window_pages:
            return 0
        seen = self.window + self.steps_in_flight_max * self.step_tokens_max
        return min(-(-seen // self.block_size) + 2, self.context_blocks)

    @property
    def others_max(self) -> int:
        """Return the columns of the table of states: those of the state, of the ring, and one."""
        return 1 + self.state_blocks + self.ring_blocks * self.window_pages

    @property
    def blocks_max(self) -> int:
        """Return enough blocks for all workers at once."""
        return sum(self.workers) + max(self.workers)

    def limits(self) -> Limits:
        """Return the core's limits."""
        return make_limits(
            block_size=self.block_size,
            sequences_max=self.sequences_max,
            blocks_max=self.blocks_max,
            blocks_per_sequence_max=self.context_blocks,
            state_blocks_max=self.others_max,
            pools_max=self.processes + 1,
            tenants_max=len(TENANTS) + 2,
            queue_max=self.queue_max,
            finished_max=self.finished_max,
            finished_ttl_us=self.finished_ttl_us,
            step_tokens_max=self.step_tokens_max,
            step_rows_max=self.step_rows_max,
            steps_in_flight_max=self.steps_in_flight_max,
            stop_tokens_max=4,
            holders_per_block_max=2,
            bulk_max=4,
            list_max=8,
            partial_tokens_min=self.partial_tokens_min,
            checkpoint_tokens=self.checkpoint_tokens,
            host_writeback_blocks=self.writeback,
            host_learn_blocks=self.learn,
            policy=self.policy,
            samples_max=SAMPLES_MAX,
            ageing_us=self.ageing_us,
            passes_max=self.passes_max,
            deadline_max_us=self.deadline_max_us,
            lease_us=self.lease_us,
            step_timeout_us=self.step_timeout_us,
            disk_wait_us=DISK_WAIT_US,
            decode_gap_us=self.decode_gap_us,
            crashes_max=self.crashes_max,
            drafts_max=self.drafts,
            reattach_us=self.reattach_us,
            quotas=self.quotas,
            zero_on_tenant_change=self.zeroes,
        )

    def geometry(self) -> Geometry:
        """Return the geometry of the shared tables."""
        return Geometry(
            slots=self.sequences_max,
            blocks=self.blocks_max,
            blocks_per_sequence=self.context_blocks,
            block_size=self.block_size,
            pools=self.processes + 1,
            states_per_sequence=self.others_max,
        )


def draw_settings(random: Random) -> Settings:
    """Draw a small, tight world in which every resource is exhausted now and then."""
    block_size = random.choice((1, 2, 3, 4, 4, 8))
    context_blocks = random.randint(3, 8) if block_size > 2 else random.randint(6, 16)
    workers = tuple(random.randint(context_blocks + 1, 4 * context_blocks) for _ in range(random.choice((1, 1, 2, 3))))
    rows = random.randint(1, 6)
    vocabulary = random.choice((12, 24, 60))
    deadly = random.random() < 0.2
    return Settings(
        block_size=block_size,
        context_blocks=context_blocks,
        sequences_max=random.randint(max(2, rows), rows + 8),
        queue_max=random.choice((2, 6, 12)),
        finished_max=random.choice((3, 30)),
        finished_ttl_us=random.choice((20_000, 600_000_000)),
        step_tokens_max=random.randint(max(rows, 2), 24),
        step_rows_max=rows,
        steps_in_flight_max=random.randint(1, 3),
        partial_tokens_min=random.choice((1, 2, 4)),
        policy=random.choice(("lru", "lru", "none")),
        quotas=_draw_quotas(random, min(workers), context_blocks),
        workers=workers,
        clients=random.randint(1, 4),
        vocabulary=vocabulary,
        eos=(random.randrange(vocabulary - 1),) if random.random() < 0.3 else (),
        short_us=random.choice((50, 200, 1000)),
        long_us=random.choice((5_000, 40_000)),
        long_share=random.choice((0.0, 0.01, 0.1)),
        step_us=random.choice((100, 600, 2000)),
        duplicate_share=random.choice((0.0, 0.05, 0.2)),
        gap_us=random.choice((100, 250, 1000)),
        turn_us=random.choice((20, 200, 800)),
        ageing_us=random.choice((1_000, 100_000, 10_000_000)),
        passes_max=random.choice((1, 1, 2, 4, 16)),
        deadline_max_us=random.choice((DAY_US, DAY_US, DAY_US, 200_000)),
        lease_us=random.choice((0, 2_000, 20_000, 10_000_000)),
        # Longer than any step without faults; with faults, a long delay may look like a hung worker. Nothing may look
        # like a crash in a deadly world, so there the timeout is out of reach.
        step_timeout_us=60_000_000 if deadly else random.choice((20_000, 60_000)),
        decode_gap_us=random.choice((50, 500, 200_000)),
        crashes_max=random.choice((3, 4, 6)) if deadly else 1000,
        deadly=deadly,
        drain_ms=random.choice((-1, -1, -1, 0, 1, 20)),
        backlog_max=random.choice((1, 4, 1024)),
        drain_by_signal=random.random() < 0.4,
        bound={f"c{i}": random.choice(TENANTS) for i in range(1, random.choice((1, 1, 2, 3)))},
        zeroes=random.random() < 0.4,
    )


def with_crashes(settings: Settings, random: Random, share: float = CRASHES_SHARE) -> Settings:
    """Return the settings; in a share of the worlds the coordinator dies now and then."""
    if random.random() >= share:
        return settings
    gap_us = random.choice((8_000, 40_000, 100_000))
    # In a deadly world, every worker must have the time to reconnect.
    reattach_us = 10_000_000 if settings.deadly else random.choice((2_000, 20_000, 10_000_000))
    return msgspec.structs.replace(settings, crash_gap_us=gap_us, reattach_us=reattach_us)


def with_kinds(settings: Settings, random: Random, share: float = KINDS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds generated tokens are computed differently from prompts."""
    return msgspec.structs.replace(settings, kinds=random.random() < share)


def with_states(settings: Settings, random: Random, share: float = STATES_SHARE) -> Settings:
    """Return the settings; in a share of the worlds the model keeps a recurrent state, in larger pools."""
    if random.random() >= share:
        return settings
    blocks, chunk = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 4, 8))
    held = blocks * random.randint(1, settings.step_rows_max + 2)
    ceilings = {
        tenant: msgspec.structs.replace(quota, ceiling=quota.ceiling + 2 * blocks) if quota.ceiling else quota
        for tenant, quota in settings.quotas.items()
    }
    return msgspec.structs.replace(
        settings,
        kinds=True,
        state_blocks=blocks,
        prompt_chunk=chunk,
        checkpoint_tokens=random.choice((3, 8, 16, 2048)),
        step_tokens_max=max(settings.step_tokens_max, chunk),
        workers=tuple(count + held for count in settings.workers),
        quotas=ceilings,
    )


def with_windows(settings: Settings, random: Random, share: float = WINDOWS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds the model has layers with a sliding window, in larger pools."""
    if random.random() >= share:
        return settings
    pages, window = random.choice((1, 1, 2, 3)), random.choice((1, 2, 3, 4, 6, 9, 16))
    blocks = min(settings.context_blocks, -(-(window + settings.step_tokens_max) // settings.block_size) + 1)
    held = pages * blocks * random.randint(1, settings.step_rows_max)
    ceilings = {
        tenant: msgspec.structs.replace(quota, ceiling=quota.ceiling + pages * blocks) if quota.ceiling else quota
        for tenant, quota in settings.quotas.items()
    }
    return msgspec.structs.replace(
        settings,
        window=window,
        window_pages=pages,
        workers=tuple(count + held for count in settings.workers),
        quotas=ceilings,
    )


def with_drafts(settings: Settings, random: Random, share: float = DRAFTS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds workers propose drafts, and steps and blocks have room for some."""
    if random.random() >= share:
        return settings
    rows = settings.step_rows_max + random.choice((1, 3, 8))
    drafting = msgspec.structs.replace(
        settings,
        drafts=random.choice((1, 2, 4, 8)),
        measures=random.random() < MEASURES_SHARE,
        block_size=max(settings.block_size, random.choice((3, 4, 8))),
        sequences_max=settings.sequences_max + rows - settings.step_rows_max,
        step_rows_max=rows,
        step_tokens_max=max(settings.step_tokens_max, rows),
        draft_states=random.choice((1, 2, 4, 8)) if settings.state_blocks else 0,
    )
    # Not drawn, so that nothing else changes.
    return msgspec.structs.replace(drafting, model_drafts=drafting.drafts * (drafting.sequences_max % 3 == 0))


def with_batches(settings: Settings, random: Random, share: float = BATCHES_SHARE) -> Settings:
    """Return the settings; in a share of the worlds most requests are of batches, which often run alone."""
    if random.random() >= share:
        return settings
    batches, in_flight = random.choice((0.6, 0.9)), random.choice((2, 2, 3))
    return msgspec.structs.replace(settings, batches=batches, steps_in_flight_max=in_flight)


def with_hosts(settings: Settings, random: Random, share: float = HOSTS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds workers have host files, beside smaller pools."""
    if random.random() >= share:
        return settings
    blocks = random.choice((1, 3, 8, 16, 40)) * (1 + settings.window_pages + min(1, settings.state_blocks))
    flips, writeback = random.choice((0.0, 0.2)), random.choice((0, 1, 4))
    quotas = {
        tenant: msgspec.structs.replace(quota, host_floor=random.choice((0, blocks // 3)), host_ceiling=ceiling)
        for tenant, quota in settings.quotas.items()
        for ceiling in (random.choice((0, max(1, blocks // 2))),)
    }
    shares = {"flip_share": flips, "writeback": writeback, "quotas": quotas}
    shares["wipe_gap_us"] = random.choice((0, 10_000, 60_000))
    if not settings.deadly:  # there, only deadly requests may crash workers
        shares["half_share"] = random.choice((0.0, 0.02, 0.1))
    shares["learn"] = random.choice((0, 2, 8, 30))
    return msgspec.structs.replace(settings, host_blocks=blocks, **shares)


def with_disks(settings: Settings, random: Random, share: float = DISKS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds with host files, workers have disk tiers too."""
    if random.random() >= share or not settings.host_blocks:
        return settings
    blocks = random.choice((1, 4, 16, 60))
    quotas = {
        tenant: msgspec.structs.replace(quota, disk_floor=random.choice((0, blocks // 3)), disk_ceiling=ceiling)
        for tenant, quota in settings.quotas.items()
        for ceiling in (random.choice((0, max(1, blocks // 2))),)
    }
    copies = {"late_share": random.choice((0.08, 0.5)), "stuck_share": random.choice((0.0, 0.02))}
    # Most disks are quicker than steps, since those that are slower are read seldom.
    order_us = random.choice((100, 200, 3000))
    return msgspec.structs.replace(settings, disk_blocks=blocks, quotas=quotas, order_us=order_us, **copies)


def with_standstills(settings: Settings, random: Random, share: float = STANDS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds the coordinator's process is stopped now and then."""
    if random.random() >= share:
        return settings
    # In a deadly world, every worker must have the time to reconnect.
    reattach_us = 10_000_000 if settings.deadly else settings.reattach_us
    gap_us = random.choice((20_000, 100_000))
    return msgspec.structs.replace(settings, stand_gap_us=gap_us, reattach_us=reattach_us)


def with_ranks(settings: Settings, random: Random, share: float = RANKS_SHARE) -> Settings:
    """Return the settings; in a share of the worlds some workers have several processes."""
    if random.random() >= share:
        return settings
    return msgspec.structs.replace(settings, ranks=tuple(random.choice((1, 2, 2, 3)) for _ in settings.workers))


def _draw_quotas(random: Random, pool: int, context_blocks: int) -> dict[str, Quota]:
    """Draw no quotas, or floors that mostly fit the longest sequence, and ceilings that fit at least a short one."""
    if random.random() < 0.5:
        return {}
    quotas = {}
    spare = max(0, pool - random.choice((context_blocks, context_blocks, 2)))
    for tenant in TENANTS[:2]:
        floor = random.randint(0, spare // 2)
        ceiling = random.choice((0, random.randint(max(floor, 2), max(floor, 2) + context_blocks // 2)))
        quotas[tenant] = Quota(floor=floor, ceiling=ceiling, weight=random.choice((0.25, 1.0, 4.0)))
    return quotas
