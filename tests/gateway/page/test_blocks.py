"""The map of blocks: a viewer's map is correct, whatever frames it misses."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvforge import BlockColumns
from kvforge.gateway.page.blocks import BlockMap, Frame, ages
from tests.amount import examples

COUNTS = (0, 12, 40)


class Viewer:
    """A page's state, updated by frames."""

    def __init__(self) -> None:
        self.frame = 0
        self.cells: dict[str, np.ndarray] = {}

    def take(self, encoded: bytes) -> Frame:
        found = msgspec.json.decode(encoded, type=Frame)
        packed, n, at = zlib.decompress(found.data), found.n, 0
        columns = {}
        for name, dtype in (("ids", "<u4"), ("holders", "u1"), ("owners", "<u2"), ("ages", "u1"), ("kinds", "u1")):
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
    return BlockColumns(*numbers, np.zeros(count, "i1"))


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
            there = BlockColumns(*numbers, base.kind.copy())
            some = rng.random(count) < rng.choice([0.05, 0.9])
            there.refcount[some] = rng.integers(0, 400, some.sum())
            there.generation[some] += rng.integers(0, 2, some.sum(), dtype="i4")
            there.owner[some] = rng.integers(0, 70_000, some.sum())
            there.kind[some] = rng.integers(0, 4, some.sum())
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
