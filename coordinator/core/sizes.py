"""How large messages get: what a peer's decoder takes is a limit like any other.

What grows with a limit of the configuration is either told in several messages (streams), spread over several steps
(rows that begin), cut with a word about it (lists), or bounded by a check of the configuration at the start.
"""

from __future__ import annotations

from kvforge.protocol.codec import BODY_BYTES_MAX, FRAME_BYTES_MAX
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import ErrorInfo, Sampling

CHARACTER_BYTES = 4
NAME_BYTES = 128 * CHARACTER_BYTES
END_BYTES = 500
LISTED_BYTES = 300 + 2 * NAME_BYTES  # of one request in a list: tenant and worker have names
TENANT_BYTES = 300 + NAME_BYTES
WORKER_BYTES = 3_000 + NAME_BYTES  # with what its memory is for
BIAS_BYTES, BEGIN_BYTES = 15, 400
BEGINS_BYTES_MAX = 8 << 20  # of the rows that begin in one step
HOLDERS_LISTED_MAX = 1000


def error_bytes(error: ErrorInfo) -> int:
    """What an error takes in a body, at most."""
    fields = sum(len(str(value)) + len(name) for name, value in error.fields.items())
    return 50 + CHARACTER_BYTES * (len(error.message) + fields)


def begin_bytes(sampling: Sampling, length: int) -> int:
    """What a row takes in the step that it begins in, at most: its biases, its grammar, its history's tokens."""
    history = 4 * length if sampling.counts_answer else 0
    grammar = CHARACTER_BYTES * len(sampling.grammar.text) if sampling.grammar is not None else 0
    return BEGIN_BYTES + BIAS_BYTES * len(sampling.logit_bias) + grammar + history


def check(context_tokens: int, step_tokens: int, tenants: int, pools: int) -> None:
    """Raises InvalidConfiguration naming the field that would let a message become larger than its peer accepts."""
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


def check_zeros(blocks: int) -> None:
    """Raises InvalidConfiguration where a step that zeroes so many blocks would be too large."""
    if 4 * blocks > FRAME_BYTES_MAX // 4:
        problem = f"must be at most {FRAME_BYTES_MAX // 16} with cache.zero_on_tenant_change, not {blocks}"
        raise InvalidConfiguration("limits.blocks_max", problem)
