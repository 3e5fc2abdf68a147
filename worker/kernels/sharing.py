"""Lets ranks on GPUs of one host exchange through each other's memory, if the bits equal those of the library.

Access to a peer's memory may seem to work and still give wrong numbers, as seen elsewhere. At each start, exchanges of
every size are therefore repeated back to back with changing numbers, and compared bit by bit with the parts that the
library (NCCL, RCCL) gathers, added in the order of ranks with the same arithmetic. If one rank finds a difference, all
ranks exchange through the library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvforge.worker.device.exchange import ATTENTION, INNER, LOGITS, RANKS_MAX
from kvforge.worker.device.ranks import Ranks

from .decoder import FusedDecoder
from .steady import same_bits

if TYPE_CHECKING:  # the kernels need triton
    from .exchange import DirectExchange

ROUNDS = 6  # per size: both buffers in turn
POLLS_MAX = 1 << 24  # about ten seconds, after which a missing rank is given up
LOGIT_BYTES_MAX = 1 << 28
log = logging.getLogger("worker")


def share_memory(ranks: Ranks, fused: FusedDecoder | None, tokens_max: int, rows_max: int) -> str:
    """Make the ranks of a model exchange through each other's memory, if possible. All ranks must call it.

    Args:
        ranks: The group of ranks.
        fused: The fused model.
        tokens_max: Most tokens of a step.
        rows_max: Most rows of a step that sample a token.

    Returns:
        Why they do not; "" if they do.
    """
    if ranks.unshared:
        return ranks.unshared
    shared: DirectExchange | None = None
    try:
        shared = _share(ranks, fused, tokens_max, rows_max)
        problem = ""
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    problem = next(filter(None, ranks.texts(problem)), "")
    if not problem:
        assert fused is not None and shared is not None
        problem = _difference(fused, ranks, shared, tokens_max, rows_max)
        problem = next(filter(None, ranks.texts(problem)), "")
    if problem:
        log.warning("ranks exchange through their library, not through each other's memory: %s", problem)
        ranks.unshared = problem
        return problem
    ranks.shared = shared
    log.info("ranks exchange through each other's memory: %d MiB per rank", shared.bytes >> 20 if shared else 0)
    return ""


def _share(ranks: Ranks, fused: FusedDecoder | None, tokens_max: int, rows_max: int) -> DirectExchange:
    """Allocate the shared memory.

    Raises:
        RuntimeError: It is not available; the message gives the reason.
    """
    from .exchange import DirectExchange
    from .fused import FusedOperations

    if fused is None or not isinstance(fused.operations, FusedOperations):
        raise RuntimeError("this model's layers do not run on kvforge's kernels")
    if not fused.sums_into_norms:
        raise RuntimeError("this model's sums over ranks are not followed by plain norms")
    if ranks.count > RANKS_MAX:
        raise RuntimeError(f"there are more than {RANKS_MAX} ranks")
    row = fused.table.shape[1] * fused.table.element_size()
    logits = rows_max * len(fused.head.weight) * 4 if fused.head_is_split else 0
    sizes = (tokens_max * row, tokens_max * row, min(logits, LOGIT_BYTES_MAX))
    return DirectExchange(ranks.exchange(sizes), fused.operations)


def _sizes(most: int) -> Iterator[int]:
    """Yield counts around each power of two, up to `most`."""
    for power in range(most.bit_length()):
        for count in ((1 << power), (1 << power) + 1):
            if count <= most:
                yield count


def _difference(fused: FusedDecoder, ranks: Ranks, shared: DirectExchange, tokens_max: int, rows_max: int) -> str:
    """Return the first difference from the library, or ""."""
    for count in _sizes(tokens_max):
        if not _same_sums(fused, ranks, shared, count):
            return f"the sum of {count} tokens has other bits than the library's"
    if fused.head_is_split:
        for count in _sizes(rows_max):
            if not _same_logits(fused, ranks, shared, count):
                return f"the logits of {count} rows differ from the library's"
    return ""


def _same_sums(fused: FusedDecoder, ranks: Ranks, shared: DirectExchange, count: int) -> bool:
    table, norm = fused.table, fused.final_norm.weight
    epsilon = fused.final_norm.epsilon
    hidden, rounds = table.shape[1], range(ROUNDS if count <= 64 else 2)
    generator = torch.Generator(table.device).manual_seed(1000 * count + ranks.rank)
    parts = [
        torch.empty((count, hidden), dtype=table.dtype, device=table.device).normal_(generator=generator)
        for _ in rounds
    ]
    residuals = [torch.zeros_like(part) for part in (parts[0], parts[0])]
    wanted = [fused.operations.add_norm(ranks.gather(part), residuals[0], norm, epsilon) for part in parts]
    found = []
    for number, part in enumerate(parts):
        which = (ATTENTION, INNER)[number % 2]
        place = shared.place(which, (count, hidden), table.dtype)
        assert place is not None, "the buffer was allocated for this size"
        place.copy_(part)
        found.append(shared.add_norm(which, residuals[1], norm, epsilon, POLLS_MAX))
    return all(map(same_bits, (*found, residuals[1]), (*wanted, residuals[0])))


def _same_logits(fused: FusedDecoder, ranks: Ranks, shared: DirectExchange, count: int) -> bool:
    device, share = fused.table.device, len(fused.head.weight)
    place = shared.place(LOGITS, (count, share), torch.float32)
    if place is None:
        return True  # it goes through the library
    generator = torch.Generator(device).manual_seed(count + ranks.rank)
    part = torch.empty((count, share), dtype=torch.float32, device=device).normal_(generator=generator)
    wanted = ranks.gather(part).transpose(0, 1).reshape(count, -1)
    place.copy_(part)
    found = shared.join(LOGITS, torch.empty_like(wanted), POLLS_MAX)
    meeting = shared.place(ATTENTION, (1, fused.table.shape[1]), fused.table.dtype)
    assert meeting is not None
    meeting.zero_()  # synchronise: the logits may be overwritten only after all ranks have read them
    residual = torch.zeros_like(meeting)
    shared.add_norm(ATTENTION, residual, fused.final_norm.weight, fused.final_norm.epsilon, POLLS_MAX)
    return same_bits(found, wanted)
