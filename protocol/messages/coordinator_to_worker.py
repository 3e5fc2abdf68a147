"""What the coordinator says to workers: the geometry that all share, their place in it, and step after step."""

from __future__ import annotations

import msgspec

from .shared import NO_INT32, Int32Array, Message, Refused, Sampling

GENERATED = 1 << 30  # above every token id


class WorkerWelcome(Message, frozen=True, tag="worker_welcome"):
    """Answer to WorkerHello: the geometry that every pool shares, and the tables to map read-only.

    epoch: of the registration under which the worker goes on with its pool; PoolRegistered follows, and the steps that
    are due, each of which it may have got before. 0: whatever it holds means nothing any more.
    """

    rid: int
    version: int
    boot: str
    tables_path: str
    block_size: int
    slots_max: int
    blocks_per_sequence_max: int
    step_tokens_max: int
    step_rows_max: int
    epoch: int = 0


class Meeting(Message, frozen=True, tag="meeting"):
    """All ranks of a worker are connected: they meet under a name that no other ranks have had. None loads a model
    before that."""

    name: str


class PoolRegistered(Message, frozen=True, tag="pool_registered"):
    """The worker's blocks are [base_block, base_block + blocks) in tables and copies. Results must name `epoch`.

    pool: the pool's number, by which its steps are found in shared memory. done: the last step whose result is there:
    a worker that comes back sends again what it has of those after it, in order, before anything else.
    """

    rid: int
    epoch: int
    base_block: int
    pool: int = 0
    done: int = 0


class RowStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot. The worker keeps this until another RowStart names the slot.

    seed: unsigned 64 bit. generated: tokens that the request had generated before it came to this slot (the draw for
    the next one is keyed by (seed, generated)). sampling: what the choice of a token needs; its seed and stop tokens
    stay with the coordinator.
    prompt_history, generated_history: how many tokens of the step's `history` are this row's: first those of the
    prompt, then those of the answer so far. Both 0 where neither a penalty nor a grammar asks for them.
    """

    slot: int
    request_id: int
    sampling: Sampling
    seed: int
    generated: int = 0
    prompt_history: int = 0
    generated_history: int = 0


class Step(Message, frozen=True, tag="step"):
    """One forward pass over rows of any length (prefill chunks and decodes mixed).

    Carried out in this order: `zeros`, then `copies`, then KV of the new tokens is written and attention run, then the
    rows with sample = 1 choose a token.

    copies: [3 * n] int32, triples (from block, to block, tokens): the first `tokens` tokens of a block are copied.
    Copies of one step never read what another copy of it writes.
    slots, starts, counts, samples: [rows] int32. Row r feeds counts[r] tokens at positions starts[r]...; its block
    table is row slots[r] of the shared tables. tokens: [sum(counts)] int32; -1 stands for the token that the worker
    itself sampled last for that slot (it may not have reached the coordinator yet). To a worker whose WorkerReady said
    `wants_kinds`, the id of a token that was generated comes with GENERATED added.
    history: [sum over begins] int32, the tokens that penalties count and that grammars begin after, one row of `begins`
    after the other. The worker adds the tokens that it samples itself.
    zeros: [n] int32 distinct blocks, all of whose bytes are zeroed. Only a worker whose WorkerReady said `zeroes` is
    sent any.
    """

    FRAMES = (
        ("slots", "<i4"),
        ("starts", "<i4"),
        ("counts", "<i4"),
        ("samples", "<i4"),
        ("tokens", "<i4"),
        ("copies", "<i4"),
        ("history", "<i4"),
        ("zeros", "<i4"),
    )
    step_id: int
    begins: tuple[RowStart, ...] = ()
    slots: Int32Array = NO_INT32
    starts: Int32Array = NO_INT32
    counts: Int32Array = NO_INT32
    samples: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    copies: Int32Array = NO_INT32
    history: Int32Array = NO_INT32
    zeros: Int32Array = NO_INT32


class Stop(Message, frozen=True, tag="stop"):
    """The worker finishes what it was sent, then leaves with exit status 0."""

    reason: str = ""


WORKER_REPLIES = WorkerWelcome | Meeting | PoolRegistered | Step | Refused | Stop
