"""The map of blocks: a viewer's map is correct, whatever frames it misses."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge import BlockColumns
from kvforge.coordinator.core.cache.blocks import CACHED, FREE, QUARANTINED, REFERENCED
from kvforge.gateway.page import blocks
from kvforge.gateway.page.blocks import BlockMap, Frame, ages
from tests.amount import examples

COUNTS = (0, 12, 40)
COLUMNS = {"ids": "<u4", "holders": "u1", "owners": "<u2", "ages": "u1", "kinds": "u1", "states": "u1"}
STATIC = Path(blocks.__file__).with_name("static")
# Applies the frame of its input as the page does.
SHOW_STATES = """
import { readFileSync } from "node:fs";
import { Blocks, STATES } from "./blocks.js";
const blocks = new Blocks();
await blocks.take(JSON.parse(readFileSync(0)));
console.log(JSON.stringify(Array.from({ length: blocks.count }, (_, block) => STATES[blocks.state(block)])));
"""


class Viewer:
    """A page's state, updated by frames."""

    def __init__(self) -> None:
        self.frame = 0
        self.cells: dict[str, np.ndarray] = {}

    def take(self, encoded: bytes) -> Frame:
        found = msgspec.json.decode(encoded, type=Frame)
        packed, n, at = zlib.decompress(found.data), found.n, 0
        columns = {}
        for name, dtype in COLUMNS.items():
            if name != "ids" or found.base:
                columns[name] = np.frombuffer(packed, dtype, n, at)
                at += n * np.dtype(dtype).itemsize
        assert at == len(packed) and found.base in (0, self.frame)
        ids = columns.pop("ids", slice(None))
        if not found.base:
            assert n == found.count
            self.cells = {name: np.zeros(found.count, column.dtype) for name, column in columns.items()}
        for name, column in columns.items():
            self.cells[name][ids] = column
        self.frame = found.frame
        return found


def columns(count: int, refcount: int = 0, owner: int = 0) -> BlockColumns:
    numbers = np.full(count, refcount, "i4"), np.zeros(count, "i4"), np.full(count, owner, "i4")
    return BlockColumns(*numbers, np.zeros(count, "i1"), np.zeros(count, "i1"))


LOOK = st.tuples(st.sampled_from(COUNTS), st.integers(0, 1 << 31))
VIEW = st.integers(0, 2)


@settings(max_examples=examples(50))
@given(st.lists(st.one_of(LOOK, VIEW), max_size=30))
def test_viewers_that_skip_frames_see_what_is_there(deeds: list[tuple[int, int] | int]) -> None:
    cells, viewers = BlockMap(), [Viewer() for _ in range(3)]
    there = columns(0)
    for now_s, deed in enumerate(deeds):
        if isinstance(deed, tuple):
            count, seed = deed
            rng = np.random.default_rng(seed)
            base = there if there.owner.size == count else columns(count)
            numbers = base.refcount.copy(), base.generation.copy(), base.owner.copy()
            there = BlockColumns(*numbers, base.kind.copy(), base.state.copy())
            some = rng.random(count) < rng.choice([0.05, 0.9])
            there.refcount[some] = rng.integers(0, 400, some.sum())
            there.generation[some] += rng.integers(0, 2, some.sum(), dtype="i4")
            there.owner[some] = rng.integers(0, 70_000, some.sum())
            there.kind[some] = rng.integers(0, 4, some.sum())
            there.state[some] = rng.integers(0, 4, some.sum())
            cells.look(there, float(now_s))
        else:
            viewer = viewers[deed]
            news = cells.since(viewer.frame, float(now_s))
            assert bool(news) == (viewer.frame != cells.number)
            if news:
                viewer.take(news)
                assert (viewer.cells["holders"] == np.minimum(there.refcount, 255)).all()
                assert (viewer.cells["owners"] == np.minimum(there.owner, 65_535)).all()
                assert (viewer.cells["kinds"] == there.kind).all()
                assert (viewer.cells["states"] == there.state).all()


def test_little_that_changed_is_little_that_is_sent() -> None:
    cells, viewer = BlockMap(), Viewer()
    there = columns(10_000, refcount=1, owner=3)
    assert cells.look(there, 0.0)
    assert viewer.take(cells.since(0, 0.0)).n == 10_000
    assert not cells.look(columns(10_000, refcount=1, owner=3), 1.0) and cells.since(viewer.frame, 1.0) == b""
    after = columns(10_000, refcount=1, owner=3)
    after.refcount[[5, 9_999]] = 0
    assert cells.look(after, 2.0)
    news = cells.since(viewer.frame, 2.0)
    assert viewer.take(news).n == 2 and len(news) < 150
    assert viewer.cells["holders"].sum() == 9_998


def test_a_block_whose_state_alone_changed_is_sent() -> None:
    """The end of a quarantine changes no count, owner or generation."""
    cells, viewer = BlockMap(), Viewer()
    before, after = (columns(40, owner=3) for _ in range(2))
    before.state[:], after.state[:] = CACHED, CACHED
    before.state[7] = QUARANTINED
    assert cells.look(before, 0.0)
    viewer.take(cells.since(0, 0.0))
    assert np.flatnonzero(viewer.cells["states"] == QUARANTINED).tolist() == [7]
    assert cells.look(after, 1.0)
    assert viewer.take(cells.since(viewer.frame, 1.0)).n == 1
    assert (viewer.cells["states"] == CACHED).all()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_names_the_state_of_every_block(tmp_path: Path) -> None:
    for name in ("blocks.js", "unpack.js"):
        shutil.copy(STATIC / name, tmp_path / name)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(SHOW_STATES)
    cells, there = BlockMap(), columns(5, owner=3)
    there.state[:] = [FREE, REFERENCED, REFERENCED, QUARANTINED, CACHED]
    there.refcount[1:3] = 1, 2
    cells.look(there, 0.0)
    command = ["node", str(tmp_path / "main.js")]
    done = subprocess.run(command, input=cells.since(0, 0.0), capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == ["free", "held", "shared", "quarantined", "cached"]


def test_the_age_is_that_of_the_content_not_of_its_holders() -> None:
    cells, viewer = BlockMap(), Viewer()
    cells.look(columns(4, refcount=1, owner=3), 10.0)
    again = columns(4, refcount=1, owner=3)
    again.refcount[0], again.generation[1], again.owner[2] = 2, 1, 4
    cells.look(again, 13.0)
    viewer.take(cells.since(0, 17.0))
    assert viewer.cells["ages"].tolist() == ages(np.array([7.0, 4.0, 4.0, 7.0])).tolist()


def test_ages_rise_with_time_and_end() -> None:
    found = ages(np.array([-5.0, 0.0, 1.0, 3.0, 60.0, 1e9])).tolist()
    assert found == [0, 0, 16, 32, 95, 255]
