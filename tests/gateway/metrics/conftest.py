"""A table file with numbers in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvforge.protocol.layout import GAUGES, Geometry
from kvforge.protocol.meters import (
    POOL_COUNTS,
    STEP_TIME,
    TENANT_CELLS,
    ServiceInfo,
    WorkerInfo,
)
from kvforge.protocol.tables import TablesWriter
from kvforge.protocol.transport import TABLES_FILE

GEOMETRY = Geometry(slots=8, blocks=64, blocks_per_sequence=16, block_size=4, pools=2)
FACTS = ServiceInfo(
    model="a/model",
    tenants=("a", 'b"\\\nc'),
    workers=(
        WorkerInfo(
            name="w0", pid=1, state="ready", pool=0, block_bytes=4096, kv_dtype="float32", device_bytes={"weights": 70}
        ),
        WorkerInfo(name="w1", pid=2, state="loading"),
    ),
)


def put(tables: TablesWriter, facts: ServiceInfo = FACTS, **gauges: int) -> None:
    """Publish numbers: a cell of tenant i holds its index times i + 1, and so on."""
    numbers = tables.metrics
    numbers.begin()
    for row in range(3):
        numbers.tenants[row] = np.arange(TENANT_CELLS) * (row + 1)
    numbers.tenant_blocks[:3] = [(1, 4, 7), (20, 50, 80), (300, 600, 900)]
    numbers.pool(0, range(1, len(POOL_COUNTS) + 1), range(STEP_TIME.end - len(POOL_COUNTS)))
    numbers.facts(facts)
    values = {name: 1000 + at for at, name in enumerate(GAUGES)} | gauges
    numbers.finish(1, [values[name] for name in GAUGES])


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[TablesWriter]:
    writer = TablesWriter(tmp_path / TABLES_FILE, GEOMETRY, "boot-1")
    put(writer)
    yield writer
    writer.close()
