"""Sizes of messages: a message must not exceed what the peer's decoder accepts.

A message that grows with a configured limit is handled in one of four ways: it is split into several messages
(streams), spread over several steps (rows that begin), truncated with a note (lists), or bounded by a check of the
configuration at startup.
"""

from __future__ import annotations

from kvforge.protocol.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import ErrorInfo, SamplingParams

CHARACTER_BYTES = 4
NAME_BYTES = 128 * CHARACTER_BYTES
END_BYTES = 500
LISTED_BYTES = 300 + 2 * NAME_BYTES  # one request in a list, with the names of tenant and worker
TENANT_BYTES = 300 + NAME_BYTES
WORKER_BYTES = 3_000 + NAME_BYTES  # includes its memory breakdown
BIAS_BYTES, BEGIN_BYTES = 15, 400
BEGINS_BYTES_MAX = 8 << 20  # for the rows that begin in one step
HOLDERS_LISTED_MAX = 1000
DRAFT_HISTORY_TOKENS = 1 << 15  # the latest tokens of a prompt, and of an answer, that a worker drafts from
COPY_BYTES = 12  # of one block, in a step


def error_bytes(error: ErrorInfo) -> int:
    """Return an upper bound of an error's size in a message body, in bytes."""
    fields = sum(len(str(value)) + len(name) for name, value in error.fields.items())
    return 50 + CHARACTER_BYTES * (len(error.message) + fields)


def begin_bytes(sampling: SamplingParams, length: int, drafts: int = 0) -> int:
    """Return an upper bound of a row's size in the step where it begins, in bytes: biases, grammar and history."""
    history = 4 * length if sampling.counts_answer else 0
    if drafts:
        history = max(history, 4 * min(length, 2 * DRAFT_HISTORY_TOKENS))
    grammar = CHARACTER_BYTES * len(sampling.grammar.text) if sampling.grammar is not None else 0
    return BEGIN_BYTES + BIAS_BYTES * len(sampling.logit_bias) + grammar + history


def check(context_tokens: int, step_tokens: int, tenants: int, pools: int) -> None:
    """Check that no message can become larger than its peer accepts.

    Raises:
        InvalidConfiguration: A limit is too large; the error names the field.
    """
    if 4 * context_tokens > FRAME_BYTES_MAX // 2:
        most = FRAME_BYTES_MAX // 8
        problem = f"{context_tokens} tokens of context do not fit a message: at most {most}"
        raise InvalidConfiguration("limits.blocks_per_sequence_max", problem)
    if 4 * step_tokens > FRAME_BYTES_MAX // 4:
        problem = f"must be at most {FRAME_BYTES_MAX // 16}, not {step_tokens}"
        raise InvalidConfiguration("schedule.step_tokens_max", problem)
    for field, count, each in (("tenants_max", tenants, TENANT_BYTES), ("pools_max", pools, WORKER_BYTES)):
        most = BODY_BYTES_MAX // 2 // each
        if count > most:
            problem = f"must be at most {most}, not {count}: statistics of more do not fit a message"
            raise InvalidConfiguration(f"limits.{field}", problem)


def state_blocks_most(sequences: int) -> int:
    """Return how many blocks a recurrent state may take, so that a step may restore and copy that of each sequence."""
    return FRAME_BYTES_MAX // 2 // (COPY_BYTES * 2 * sequences)


def check_zeros(blocks: int) -> None:
    """Check that a step may zero every block.

    Raises:
        InvalidConfiguration: There are too many blocks for one message.
    """
    if 4 * blocks > FRAME_BYTES_MAX // 4:
        problem = f"must be at most {FRAME_BYTES_MAX // 16} with cache.zero_on_tenant_change, not {blocks}"
        raise InvalidConfiguration("limits.blocks_max", problem)
