"""Whether a preempted request comes back with KV from the host tier, or computes it again: what takes less time.

The blocks that a preempted request leaves stay cached, and go to the host as others evict them. Both ways back are
measured: copies by the results of steps with host copies (`HostCopies.write_costs`, `read_costs`), computation by the
durations of steps with prompt tokens (`Group.costs`). What is not measured is not chosen: without the cost of a prompt
token nothing is read, and before the first read only PROBE_BLOCKS blocks are, which measures it.

Generated tokens are in blocks like others, with their kinds, and come back as generated tokens. The last block, which
is not full, is always computed again: an entry is a full block, and at most `block_size` - 1 tokens are in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..cache.costs import UNIT
from ..cache.groups import Group
from ..cache.placement import Placement
from ..cache.returns import Return

PROBE_BLOCKS = 8
Costs = npt.NDArray[np.int64]


def decide(placement: Placement, block_size: int) -> Placement:
    """Return the placement of a preempted request with as many host blocks as are worth their copy."""
    group, found = placement.group, len(placement.host)
    if not found or group.host is None:
        return placement
    copy, compute = _read_cost(group, found), group.costs.token * found * block_size
    if not compute:
        read = 0
    elif not copy:
        read = min(found, PROBE_BLOCKS)
    else:
        read = found if copy < compute else 0
    decided = Placement(group, placement.hits, (-1, 0), placement.needed)
    decided.host = placement.host[:read]
    decided.returns = Return(found, read, copy // UNIT if copy else -1, compute // UNIT if compute else -1)
    return decided


def decide_whole(placement: Placement, without: Placement, block_size: int) -> Placement:
    """Return the cheaper of two placements of a preempted request, in a pool with blocks of several kinds.

    There, a part of what the host has may be of no use, so all of it is read, or none. The first read measures copies.

    Args:
        placement: The placement that reads all.
        without: The one that computes these tokens.
        block_size: Tokens of a block.
    """
    group, found = placement.group, len(placement.reads)
    tokens = placement.cached_tokens(block_size) - without.cached_tokens(block_size)
    copy, compute = _read_cost(group, found), group.costs.token * tokens
    read = compute > 0 and copy < compute
    decided = placement if read else without
    decided.returns = Return(
        found, found if read else 0, copy // UNIT if copy else -1, compute // UNIT if compute else -1
    )
    return decided


def costs_of_return(group: Group, tokens: Costs, block_size: int) -> Costs:
    """Return what preempted requests cost when they come back, to compare them: [n], in a unit that depends on nothing.

    Args:
        group: The group.
        tokens: Tokens with KV that they would lose, [n].
        block_size: Tokens of a block.
    """
    if group.host is None or not group.costs.token:
        return tokens
    compute: Costs = tokens * group.costs.token
    write, read = group.host.write_costs, group.host.read_costs
    if not write.token or not read.token:
        return compute
    blocks = tokens // block_size
    copies = np.where(blocks > 0, write.fixed + read.fixed + blocks * (write.token + read.token), 0)
    copied: Costs = copies + tokens % block_size * group.costs.token
    return np.minimum(compute, copied)


def unit_of_return(group: Group) -> int:
    """Return what one token is worth in the unit of `costs_of_return`."""
    return group.costs.token if group.host is not None and group.costs.token else 1


def _read_cost(group: Group, blocks: int) -> int:
    """Return the measured cost of reading so many blocks, in units of 1 / UNIT microseconds; 0: not measured."""
    line = group.host.read_costs if group.host is not None else None
    return line.of(blocks) if line is not None and line.token else 0
