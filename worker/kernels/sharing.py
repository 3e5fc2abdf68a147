"""Ranks on GPUs of one host exchange through each other's memory, if that gives the bits that their library gives.

Access to a peer's memory that only seems to work has served wrong numbers elsewhere. So at each start every size of
exchange is made some times, back to back, of numbers that differ each time, and compared with what the library (NCCL,
RCCL) gathers, added up in the order of ranks by the same arithmetic: bit by bit. If one rank finds a difference, all
of them exchange through the library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from worker.device.device import Device
from worker.device.exchange import ATTENTION, INNER, LOGITS, RANKS_MAX
from worker.device.ranks import Ranks

from .steady import same_bits

if TYPE_CHECKING:
    from .decoder import FusedDecoder
    from .exchange import Shared

ROUNDS = 6  # of each size: both places, and each of them after the other
POLLS_MAX = 1 << 24  # some ten seconds: who has not come by then does not see what the others say
LOGIT_BYTES_MAX = 1 << 28
log = logging.getLogger("worker")


def share_memory(ranks: Ranks, fused: FusedDecoder | None, device: Device, tokens_max: int, rows_max: int) -> str:
    """From now on the ranks of a model exchange through each other's memory, where they can. All of them call it.

    tokens_max: of a step. rows_max: that get a token in one. Returns why they do not; "" where they do.
    """
    if ranks.unshared:
        return ranks.unshared
    shared: Shared | None = None
    try:
        shared = _share(ranks, fused, device, tokens_max, rows_max)
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
    log.info("ranks exchange through each other's memory: %d MiB of each", shared.bytes >> 20 if shared else 0)
    return ""


def _share(ranks: Ranks, fused: FusedDecoder | None, device: Device, tokens_max: int, rows_max: int) -> Shared:
    """Errors: RuntimeError says why there is no such memory."""
    from worker.device.targets import current_target

    from .exchange import Shared
    from .fused import FusedOperations

    operations = fused.operations if fused is not None else None
    if fused is None or not isinstance(operations, FusedOperations):
        raise RuntimeError("no kernels of kvforge's serve this model's layers")
    if ranks.count > RANKS_MAX:
        raise RuntimeError(f"there are more than {RANKS_MAX} ranks")
    row = fused.table.shape[1] * fused.table.element_size()
    logits = rows_max * len(fused.head.weight) * 4 if fused.head_is_split else 0
    sizes = (tokens_max * row, tokens_max * row, min(logits, LOGIT_BYTES_MAX))
    return Shared(ranks.exchange(sizes), current_target(device), operations.overlap)


def _sizes(most: int) -> Iterator[int]:
    """1, 2, 3, and then around each power of two, up to the most."""
    for power in range(most.bit_length()):
        for count in ((1 << power), (1 << power) + 1):
            if count <= most:
                yield count


def _difference(fused: FusedDecoder, ranks: Ranks, shared: Shared, tokens_max: int, rows_max: int) -> str:
    """What is not as the library gives it; "" where all is."""
    for count in _sizes(tokens_max):
        if not _same_sums(fused, ranks, shared, count):
            return f"the sum of {count} tokens has other bits than the library's"
    if fused.head_is_split:
        for count in _sizes(rows_max):
            if not _same_logits(fused, ranks, shared, count):
                return f"the logits of {count} rows are others than the library's"
    return ""


def _same_sums(fused: FusedDecoder, ranks: Ranks, shared: Shared, count: int) -> bool:
    table, norm = fused.table, fused.final_norm
    hidden, rounds = table.shape[1], range(ROUNDS if count <= 64 else 2)
    generator = torch.Generator(table.device).manual_seed(1000 * count + ranks.rank)
    parts = [
        torch.empty((count, hidden), dtype=table.dtype, device=table.device).normal_(generator=generator)
        for _ in rounds
    ]
    residuals = [torch.zeros_like(part) for part in (parts[0], parts[0])]
    wanted = [fused.operations.add_norm(ranks.gather(part), residuals[0], norm, fused.epsilon) for part in parts]
    found = []
    for number, part in enumerate(parts):
        which = (ATTENTION, INNER)[number % 2]
        place = shared.place(which, (count, hidden), table.dtype)
        assert place is not None, "it was made for so many"
        place.copy_(part)
        found.append(shared.add_norm(which, residuals[1], norm, fused.epsilon, POLLS_MAX))
    return all(map(same_bits, (*found, residuals[1]), (*wanted, residuals[0])))


def _same_logits(fused: FusedDecoder, ranks: Ranks, shared: Shared, count: int) -> bool:
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
    meeting.zero_()  # whoever writes logits again has to know that the others have read these
    residual = torch.zeros_like(meeting)
    shared.add_norm(ATTENTION, residual, fused.final_norm, fused.epsilon, POLLS_MAX)
    return same_bits(found, wanted)
