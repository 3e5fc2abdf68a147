"""Orders to a worker's disk tier, and the message that carries them."""

from __future__ import annotations

import msgspec
import numpy as np

from kvforge.protocol.messages import DISK_WIPE, DISK_WRITE, DiskOrders

from .host_node import HostNode


class DiskOrder(msgspec.Struct):
    """An order in flight.

    Attributes:
        kind: DISK_WRITE, DISK_READ or DISK_WIPE.
        host: The node of the host tier; 0 for none.
        disk: The node of the disk tier, or the block that is wiped.
        load: The load that it belongs to; 0 for none.
        sent: Whether it has been sent to the worker's present connection.
    """

    kind: int
    host: int
    disk: int
    load: int = 0
    sent: bool = False


def orders_message(
    epoch: int, due: list[tuple[int, DiskOrder]], host: dict[int, HostNode], disk: dict[int, HostNode], token_bytes: int
) -> DiskOrders:
    """Return the message with these orders, which then count as sent.

    Args:
        epoch: The registration of the worker.
        due: The orders, with their ids.
        host: Nodes of the host tier.
        disk: Nodes of the disk tier.
        token_bytes: Bytes of the tokens of a block.
    """
    rows: list[tuple[int, ...]] = []
    values: list[tuple[int, int]] = []
    tokens: list[bytes] = []
    owners: list[int] = []
    for number, order in due:
        order.sent = True
        if order.kind == DISK_WIPE:
            rows.append((number, order.kind, -1, order.disk, 0))
            values.append((0, 0))
            continue
        node = disk[order.disk]
        first = node.parent < 0
        rows.append((number, order.kind, host[order.host].block, node.block, first))
        values.append((node.value, -node.parent - 1 if first else disk[node.parent].value))
        if order.kind == DISK_WRITE:
            tokens.append(node.tokens.ljust(token_bytes, b"\0"))  # a part has one number alone
            owners.append(node.tag)
    numbers = np.zeros((len(due), 9), np.int32)
    numbers[:, (0, 1, 2, 3, 8)] = rows
    numbers[:, 4:8] = np.array(values, "<u8").view("<i4")
    tags = np.array(owners, "<u8").view("<i4")
    return DiskOrders(epoch, numbers.reshape(-1), np.frombuffer(b"".join(tokens), np.int32), tags)
