"""Publication of changes to the shared tables: once a turn, and only what changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvforge.protocol.service_metrics import ServiceMetricsWriter
from kvforge.protocol.tables import TablesWriter

from .core.cache.sequences import Sequences
from .core.machine import Machine
from .core.reporting.statistics import pool_row, tenant_blocks

METRICS_US = 10_000


def publish(machine: Machine, tables: TablesWriter, now_us: int, journal: tuple[int, int] = (0, 0)) -> None:
    """Write all that changed: see `publish_rows` and `publish_gauges`."""
    publish_rows(machine, tables)
    publish_gauges(machine, tables, now_us, journal)


def publish_rows(machine: Machine, tables: TablesWriter) -> None:
    """Write changed rows, cells and blocks, which workers read in their next steps, and clear the record of changes."""
    s = machine.cache.sequences
    if s.changed_rows or s.changed_cells or s.changed_rings:
        _publish_rows(s, tables)
    for slots in s.changed_lengths:  # after the rows: a length never runs ahead of the rest of its row
        tables.row_length[slots] = s.length[slots].astype(np.int32)
    s.changed_lengths.clear()
    blocks = machine.cache.blocks
    if blocks.changed:
        ids = blocks.changed[0] if len(blocks.changed) == 1 else np.concatenate(blocks.changed)
        tables.block_refcount[ids] = blocks.refcount[ids]
        tables.block_generation[ids] = blocks.generation[ids]
        tables.block_owner[ids] = blocks.owner[ids]
        tables.block_kind[ids] = blocks.kind[ids]
        tables.block_state[ids] = blocks.state[ids]
        blocks.changed.clear()


def publish_gauges(machine: Machine, tables: TablesWriter, now_us: int, journal: tuple[int, int]) -> None:
    """Write the gauges, and now and then the counters.

    Counters of tenants and pools are written when no request is live, and otherwise every few milliseconds, because a
    decode step can be shorter.

    Args:
        machine: The machine.
        tables: The shared tables.
        now_us: Time in microseconds.
        journal: Bytes of the journal since the last snapshot, and its number of records.
    """
    gauges = machine.gauges(now_us, journal)
    tables.write_gauges(gauges)
    if now_us - tables.metrics.written_us >= METRICS_US or not machine.requests.live:
        publish_metrics(machine, tables.metrics, now_us, gauges)


def publish_metrics(machine: Machine, metrics: ServiceMetricsWriter, now_us: int, gauges: Sequence[int]) -> None:
    """Write the counters, with the gauges of the same moment."""
    meters = machine.cache.tenants.meters
    metrics.begin()
    for row in meters.changed:
        metrics.tenants[row] = meters.rows[row]
    meters.changed.clear()
    for tier, blocks in enumerate(tenant_blocks(machine.cache)):
        metrics.tenant_blocks[: blocks.size, tier] = blocks
    for number, group in machine.cache.groups.items():
        metrics.pool(number, pool_row(machine.cache, group), group.step_times)
    if (facts := machine.news()) is not None:
        metrics.facts(facts)
    metrics.finish(now_us, gauges)


def forget_changes(machine: Machine) -> None:
    """Clear the record of changes without publishing them."""
    s = machine.cache.sequences
    s.changed_rings.clear()
    for changes in (s.changed_rows, s.changed_lengths, s.changed_cells, s.changed_states, machine.cache.blocks.changed):
        changes.clear()


def all_changed(machine: Machine) -> None:
    """Mark everything for publication to new tables.

    For rows in a step in flight, this includes the columns they used before: a worker still reads them if the row has
    ended meanwhile, and would otherwise write into other blocks.
    """
    s = machine.cache.sequences
    forget_changes(machine)
    width = s.used.astype(np.int64)
    stateful = (s.state_used > 0) | (s.window_end > 0)
    for group in machine.cache.groups.values():
        for sent in group.sent:
            width[sent.slots] = s.table.shape[1]
            stateful[sent.slots] |= group.pool.mixed
    slots = np.flatnonzero((s.id != 0) | (width > 0))
    s.changed_rows.append(slots)
    s.changed_cells.extend((np.array([slot]), slice(width[slot])) for slot in slots.tolist())
    s.changed_states.extend(np.flatnonzero(stateful).tolist())
    pools = [group.pool for group in machine.cache.groups.values()]
    machine.cache.blocks.changed.extend(np.arange(pool.base, pool.base + pool.count) for pool in pools)
    machine.all_is_news()


def _publish_rows(s: Sequences, tables: TablesWriter) -> None:
    """Write rows with any change besides a new length, between two markers for readers."""
    parts = s.changed_rows + [rows for rows, _ in s.changed_cells] + [rings.slots for rings in s.changed_rings]
    parts = list({id(rows): rows for rows in parts}.values())  # rows that grow do so in their table and their ring
    slots = np.concatenate(parts) if len(parts) > 1 else parts[0]
    tables.begin_rows(slots)
    tables.row_length[slots] = s.length[slots].astype(np.int32)  # takes less time than a conversion by the assignment
    tables.row_blocks[slots] = s.used[slots].astype(np.int32)
    tables.row_sequence[slots] = s.id[slots]
    for rings in s.changed_rings:  # first: their row may have states of another model by now
        tables.write_rings(*rings)
    for slot in s.changed_states:  # whole rows: a step in flight may read blocks that its row has released since
        tables.row_states[slot] = s.state_used[slot]
        tables.state_table[slot] = s.states[slot]
    for rows, columns in s.changed_cells:
        tables.block_table[rows, columns] = s.table[rows, columns]
    tables.end_rows(slots)
    s.changed_rows.clear()
    s.changed_cells.clear()
    s.changed_states.clear()
    s.changed_rings.clear()
