"""Messages from the coordinator to workers: the shared geometry, the registration of a pool, and the steps."""

from __future__ import annotations

import msgspec

from .shared import NO_INT32, Int32Array, Message, Refused, SamplingParams

GENERATED = 1 << 30  # above every token id
DISK_WRITE, DISK_READ, DISK_WIPE = 1, 2, 3  # kinds of an order: see DiskOrders
DISK_ORDER_NUMBERS = 9
ANY_ROWS = (1 << 31) - 1  # more than a step has


class WorkerWelcome(Message, frozen=True, tag="worker_welcome"):
    """Reply to WorkerHello: the geometry of all pools, and the tables to map read-only.

    Attributes:
        epoch: The registration under which the worker keeps its pool. PoolRegistered follows, then the due steps, which
            may include steps that the worker has already received. 0: the worker's pool content is void.
        state_blocks_max: The most blocks that the state of one sequence and the ring of its windows may take together;
            0: the coordinator keeps no states.
        window_ahead: How many tokens the steps in flight may take a sequence beyond its acknowledged ones; 0: the
            coordinator keeps no windows, and all layers keep all tokens.
        drafts_max: The most drafted tokens of one row that the coordinator verifies in a step; 0: it verifies none, and
            the worker proposes none.
        draft_rows_max: The most rows of a step, drafts included. Lookup proposes nothing behind a step with as many.
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
    state_blocks_max: int = 0
    window_ahead: int = 0
    drafts_max: int = 0
    draft_rows_max: int = ANY_ROWS


class Rendezvous(Message, frozen=True, tag="meeting"):
    """All ranks of a worker are connected: they rendezvous under the unique name `name`, then load the model."""

    name: str


class PoolRegistered(Message, frozen=True, tag="pool_registered"):
    """The worker's blocks are [base_block, base_block + blocks) in tables and copies.

    Attributes:
        epoch: The registration, to be named in all results.
        pool: The number of the pool, by which the worker finds its steps in shared memory.
        done: The last step with a result at the coordinator. A worker that returns first sends its results of later
            steps again, in order.
    """

    rid: int
    epoch: int
    base_block: int
    pool: int = 0
    done: int = 0


class RowStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request takes a slot. The worker keeps this until another RowStart names the slot.

    Attributes:
        seed: Unsigned 64 bit.
        generated: Tokens that the request had generated before it took the slot. The draw of the next token is keyed by
            (seed, generated).
        sampling: The sampling parameters. The seed and the stop tokens stay with the coordinator.
        prompt_history: How many prompt tokens the step's `history` holds for this row.
        generated_history: How many generated tokens follow these. Both are 0 where neither a penalty, a grammar nor
            drafts need them.
        drafts: The most tokens that the worker proposes for this row at a time; 0: none. Above 0, the history holds at
            least the latest tokens of the sequence for the drafter: the last of the prompt, then the last of the
            answer, which may be fewer than `generated`. Where the sampling needs more, all are there.
        shared_drafts: Rows with the same number, one of a tenant and its salt, may be drafted from each other's tokens;
            0: from none. Unsigned 63 bit.
    """

    slot: int
    request_id: int
    sampling: SamplingParams
    seed: int
    generated: int = 0
    prompt_history: int = 0
    generated_history: int = 0
    drafts: int = 0
    shared_drafts: int = 0


class Step(Message, frozen=True, tag="step"):
    """One forward pass over rows of any length (prefill chunks and decodes mixed).

    The worker executes it in this order: `host_wipes`, `host_writes`, `zeros`, `host_reads`, `copies`, writing the KV
    of the new tokens, attention, and sampling for rows with sample = 1.

    For a worker with `state_blocks`, row slots[r] of the shared tables also names the blocks that hold the sequence's
    recurrent state. A row with start 0 begins with an empty state and does not read them. Any other row finds the state
    behind exactly `start` tokens there. The step leaves the state behind start + count tokens.

    For a worker with `window_pages`, the row also names the blocks with the KV of its layers with a window, behind
    those of the state: block j of the sequence has window_pages columns, from state_blocks + (j % window_blocks) *
    window_pages on. Defined are only the columns of blocks with a key in sight of the row's tokens, or that the step
    writes.

    A row r with k = drafts[r] > 0 verifies drafts: it has count k + 1 and sample 1. Its tokens are the last known one,
    at position starts[r], and the k drafts behind it, all generated tokens (with GENERATED if `wants_kinds`), none -1.
    The worker treats it as k + 1 rows of one token: token i sits at position starts[r] + i, sees what is before it and
    itself, and is followed by a draw keyed by (seed, generated + i). The KV of all is written before attention reads.
    The worker samples as if the drafts before had been sampled. Only the accepted tokens of the result change the state
    of the slot. No other step with the slot is in flight. KV behind the accepted tokens is overwritten by later steps.
    Rows of one generated token come first in a step, then rows with drafts, then chunks of prompts.

    Attributes:
        copies: [3 * n] int32, triples (from block, to block, tokens): copy the first `tokens` tokens of a block. No
            copy of a step reads a block that another one writes. A copy of block_size tokens copies the whole block:
            so a block of a state is copied. Where KV is copied, the blocks of windows are copied alike.
        slots: [rows] int32. The block table of row r is row slots[r] of the shared tables.
        starts: [rows] int32, the position of the first token of each row.
        counts: [rows] int32, the number of tokens of each row.
        samples: [rows] int32, 1 for rows that sample a token.
        tokens: [sum(counts)] int32; -1 stands for the token that the worker sampled last for the slot, which may not
            have reached the coordinator yet. If WorkerReady set `wants_kinds`, generated tokens have GENERATED added to
            their id.
        history: [sum over begins] int32, the tokens for penalties and grammars, one row of `begins` after the other.
            The worker adds the tokens that it samples.
        zeros: [n] int32 distinct blocks to fill with zeros. Sent only after a WorkerReady with `zeroes`.
        scored: [m] int32, increasing indices in `tokens`: the prompt tokens that the step scores the next token of.
        following: [m] int32, the prompt token behind each of `scored`.
        drafts: [rows] int32, how many of the row's last tokens are drafts to verify, 0 to `WorkerReady.drafts`; empty:
            no row has any. Sent only after a WorkerReady with `drafts`.
        host_writes: [4 * n] int32, (block, host block, low half of the tag, high half): copy a whole block to the host,
            and store the tag beside it once the copy is complete. Sent only after a WorkerReady with `host_blocks`.
        host_reads: [4 * n] int32, as `host_writes`: copy a whole host block to a block, if its tag is this one. A
            worker that cannot make all copies of a step fails, because later steps depend on them.
        host_wipes: [n] int32 distinct host blocks to overwrite with zeros, with their tags. No copy uses them.
        propose: How many tokens the draft model proposes at most for each row that samples; 0: none. No step follows
            until the result of one with `propose`. Sent only after a WorkerReady with `model_drafts`.
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
        ("scored", "<i4"),
        ("following", "<i4"),
        ("drafts", "<i4"),
        ("host_writes", "<i4"),
        ("host_reads", "<i4"),
        ("host_wipes", "<i4"),
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
    scored: Int32Array = NO_INT32
    following: Int32Array = NO_INT32
    drafts: Int32Array = NO_INT32
    host_writes: Int32Array = NO_INT32
    host_reads: Int32Array = NO_INT32
    host_wipes: Int32Array = NO_INT32
    propose: int = 0


class DiskScan(Message, frozen=True, tag="disk_scan"):
    """The worker announces the entries of its disk tier, from `cursor` on, with one DiskEntries.

    Sent only after a WorkerReady with `disk_blocks`, again with the cursor of each answer until that was the last one.
    """

    epoch: int
    cursor: int = 0


class DiskOrders(Message, frozen=True, tag="disk_orders"):
    """Copies between the host file and the disk tier, beside the steps and in any order.

    The worker answers each order once with DiskResults, or again if it is sent again. Until then no step uses the host
    block of a read, none writes that of a write, and no other order names one of its blocks.

    Attributes:
        orders: [9 * n] int32, (id, kind, host block, disk block, low half of the chain value, high half, low half of
            the parent's, high half, first). The kind is DISK_WRITE, from the host block to the disk block, or
            DISK_READ. The parent of a first block is the salt. Ids rise by 1. DISK_WIPE: overwrite the disk block with
            zeros, with its record; its host block is -1, and what follows the disk block is 0.
        tokens: [writes * block_size] int32, the tokens of each written block in the form in which they are indexed.
        owners: [2 * writes] int32, the halves of each written block's owner tag.
    """

    FRAMES = (("orders", "<i4"), ("tokens", "<i4"), ("owners", "<i4"))
    epoch: int
    orders: Int32Array = NO_INT32
    tokens: Int32Array = NO_INT32
    owners: Int32Array = NO_INT32


class Stop(Message, frozen=True, tag="stop"):
    """The worker finishes the steps that it has received, then exits with status 0."""

    reason: str = ""


WORKER_REPLIES = WorkerWelcome | Rendezvous | PoolRegistered | Step | DiskScan | DiskOrders | Refused | Stop
