"""Copies what the core changed into the shared tables: once a turn, only what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvforge.protocol.numbers import NumbersWriter
from kvforge.protocol.tables import TablesWriter

from .core.cache.sequences import Sequences
from .core.machine import Machine
from .core.reporting.statistics import pool_row, tenant_blocks

NUMBERS_US = 10_000


def publish(machine: Machine, tables: TablesWriter, now_us: int, journal: tuple[int, int] = (0, 0)) -> None:
    """Writes the changed rows, cells, blocks and gauges, and forgets that they changed.

    What is counted by tenant and pool is written when nothing is asked of the service any more, and else every few
    milliseconds: a decode step is over sooner. journal: its bytes since the last snapshot, and its records.
    """
    publish_rows(machine.cache.sequences, tables)
    blocks = machine.cache.blocks
    if blocks.changed:
        ids = blocks.changed[0] if len(blocks.changed) == 1 else np.concatenate(blocks.changed)
        tables.block_refcount[ids] = blocks.refcount[ids]
        tables.block_generation[ids] = blocks.generation[ids]
        tables.block_owner[ids] = blocks.owner[ids]
        blocks.changed.clear()
    gauges = machine.gauges(now_us, journal)
    tables.write_gauges(gauges)
    if now_us - tables.numbers.written_us >= NUMBERS_US or not machine.requests.live:
        publish_numbers(machine, tables.numbers, now_us, gauges)


def publish_numbers(machine: Machine, numbers: NumbersWriter, now_us: int, gauges: Sequence[int]) -> None:
    """Writes what is counted, and the gauges of the same moment."""
    meters = machine.cache.tenants.meters
    numbers.begin()
    for row in meters.changed:
        numbers.tenants[row] = meters.rows[row]
    meters.changed.clear()
    blocks = tenant_blocks(machine.cache)
    numbers.tenant_blocks[: blocks.size] = blocks
    for number, group in machine.cache.groups.items():
        numbers.pool(number, pool_row(group), group.step_times)
    if (facts := machine.news()) is not None:
        numbers.facts(facts)
    numbers.finish(now_us, gauges)


def forget_changes(machine: Machine) -> None:
    """Nobody is to see what changed."""
    s = machine.cache.sequences
    for changes in (s.changed_rows, s.changed_lengths, s.changed_cells, machine.cache.blocks.changed):
        changes.clear()


def all_changed(machine: Machine) -> None:
    """The tables are new: everything is to be written.

    Of rows that are part of a step under way, that is also what they held: a worker still reads it where the row ended
    meanwhile, and would write into whatever block it found there instead.
    """
    s = machine.cache.sequences
    forget_changes(machine)
    width = s.used.astype(np.int64)
    for group in machine.cache.groups.values():
        for sent in group.sent:
            width[sent.slots] = s.table.shape[1]
    slots = np.flatnonzero((s.id != 0) | (width > 0))
    s.changed_rows.append(slots)
    s.changed_cells.extend((np.array([slot]), slice(width[slot])) for slot in slots.tolist())
    pools = [group.pool for group in machine.cache.groups.values()]
    machine.cache.blocks.changed.extend(np.arange(pool.base, pool.base + pool.count) for pool in pools)
    machine.all_is_news()


def publish_rows(s: Sequences, tables: TablesWriter) -> None:
    """Writes the changed rows. Those of which only the length changed, most of a decode step, are never marked."""
    if s.changed_rows or s.changed_cells:
        slots = np.concatenate([*s.changed_rows, *(rows for rows, _ in s.changed_cells)])
        tables.begin_rows(slots)
        tables.row_length[slots] = s.length[slots]
        tables.row_blocks[slots] = s.used[slots]
        tables.row_sequence[slots] = s.id[slots]
        for rows, columns in s.changed_cells:
            tables.block_table[rows, columns] = s.table[rows, columns]
        tables.end_rows(slots)
        s.changed_rows.clear()
        s.changed_cells.clear()
    for slots in s.changed_lengths:  # after the rows: a length never runs ahead of the rest of its row
        tables.row_length[slots] = s.length[slots]
    s.changed_lengths.clear()
