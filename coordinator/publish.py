"""Copies what the core changed into the shared tables: once a turn, only what changed."""

from __future__ import annotations

import numpy as np

from protocol.tables import TablesWriter

from .core.machine import Machine


def publish(machine: Machine, tables: TablesWriter, now_us: int) -> None:
    """Writes the changed rows, cells, blocks and gauges, and forgets that they changed."""
    s, blocks = machine.cache.sequences, machine.cache.blocks
    if s.changed_rows or s.changed_cells:
        cells = s.changed_cells
        slots = np.concatenate([*s.changed_rows, *(rows for rows, _ in cells)])
        tables.begin_rows(slots)
        tables.row_length[slots] = s.length[slots]
        tables.row_blocks[slots] = s.used[slots]
        tables.row_sequence[slots] = s.id[slots]
        for rows, columns in cells:
            tables.block_table[rows, columns] = s.table[rows, columns]
        tables.end_rows(slots)
        s.changed_rows.clear()
        s.changed_cells.clear()
    for ids in blocks.changed:
        tables.block_refcount[ids] = blocks.refcount[ids]
        tables.block_generation[ids] = blocks.generation[ids]
        tables.block_owner[ids] = blocks.owner[ids]
    blocks.changed.clear()
    tables.write_gauges(machine.gauges(now_us))
