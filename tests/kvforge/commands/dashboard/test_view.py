"""Contents of the full screen's lines at every size."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from kvforge import BlockColumns
from kvforge.commands.dashboard import cells
from kvforge.commands.dashboard.asking import STALE_S, Asking, Told
from kvforge.commands.dashboard.columns import CELL_MAX, aligned
from kvforge.commands.dashboard.view import Seen, View
from kvforge.protocol import messages as m
from tests.kvforge.fake_coordinator import sample_stats

GAUGES = {"requests_running": 1, "requests_pending": 2, "sequences": 3}
RATES = {"tokens_per_s": 123.4, "steps_per_s": None}
WHY = "it waits for 12 blocks: tenant b holds 40 of its share of 32, and nothing of it can be taken away yet"


def columns(count: int) -> BlockColumns:
    """Return blocks that are free, cached, used, shared, free, ..."""
    kind = np.arange(count, dtype=np.int32) % 4
    refcount = np.array([0, 0, 1, 3], np.int32)[kind]
    return BlockColumns(refcount, np.zeros(count, np.int32), np.minimum(kind, 1))


def row(number: int, state: str, tenant: str = "b") -> m.RequestRow:
    return m.RequestRow(
        request_id=number,
        state=state,
        tenant=tenant,
        prompt_tokens=10,
        max_tokens=50,
        generated_tokens=5,
        age_us=2_000_000 + number,
    )


def seen(blocks: int = 64, **changes: object) -> Seen:
    stats = sample_stats(0, 1, 2)
    (pool,) = stats.pools
    pool = m.PoolStats(**{**{name: getattr(pool, name) for name in pool.__struct_fields__}, "blocks": blocks})
    parts = {name: getattr(stats, name) for name in stats.__struct_fields__}
    worker = m.WorkerHealth(name="w0", pid=1, state="ready", steps=17, device_bytes={"weights": 3 << 30, "pool": 5})
    health = m.Health(rid=0, live=True, ready=True, reason="", workers=(worker,), gone={"w9": "was killed"})
    requests = (row(1, "running", "a"), row(2, "pending"), row(3, "preempted"), row(4, "finished"))
    told = Told(m.Stats(**{**parts, "pools": (pool,)}), health, requests, 4, {2: WHY, 3: "preempted for request 1"})
    return Seen(GAUGES, RATES, columns(blocks), told, "0:00:09", **changes)  # type: ignore[arg-type]


def shown(what: Seen, width: int = 80, height: int = 24, *, plain: bool = False) -> list[str]:
    return [text.plain for text in View(plain=plain).texts(what, width, height)]


def test_everything_is_on_a_screen_of_the_usual_size() -> None:
    lines = shown(seen())
    text = "\n".join(lines)
    for words in ("123.4 tokens/s", "- steps/s", "run 1 wait 2", "w0", "weights 3 GiB", "was killed", "q quit"):
        assert words in text
    assert "·o█#" * 16 in text
    order = [next(at for at, line in enumerate(lines) if line.startswith(f"  {number} ")) for number in (2, 3, 1)]
    assert order == sorted(order) or order[0] > order[1]  # both waiting requests come before the running one
    assert order[2] == max(order)
    assert not any(line.startswith("  4 ") for line in lines)  # it has ended
    assert any("preempted for request 1" in line for line in lines)


def test_all_of_why_the_selected_one_waits_is_said() -> None:
    text = " ".join(" ".join(shown(seen(selected=2), width=60)).split())
    assert WHY in text
    assert WHY not in " ".join(" ".join(shown(seen(selected=3), width=60)).split())


@given(st.integers(1, 130), st.integers(1, 50), st.booleans(), st.sampled_from([0, 1, 64, 1000, 100_000]))
@settings(max_examples=50)
def test_it_fits_any_screen(width: int, height: int, help: bool, blocks: int) -> None:  # noqa: A002
    texts = View().texts(seen(blocks, help=help, selected=2), width, height)
    assert len(texts) <= height
    assert max(text.cell_len for text in texts) <= width
    assert not any("\n" in text.plain for text in texts)


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24)])
def test_a_hundred_thousand_blocks_and_requests_share_a_small_screen(width: int, height: int) -> None:
    text = "\n".join(shown(seen(100_000), width, height))
    assert "blocks a cell" in text or width == 40
    assert "####" in text
    assert "requests 3" in text


def test_colours_are_left_out_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m█" in "".join(View().lines(seen(), 80, 24))
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in "".join(View().lines(seen(), 80, 24))


def test_without_unicode_it_is_ascii() -> None:
    assert "".join(shown(seen(), plain=True)).isascii()
    assert ".o+#.o+#" in "".join(shown(seen(), plain=True))


def test_control_characters_of_others_do_not_reach_the_terminal() -> None:
    evil = seen(problem="gone\x1b]0;title\x07 \x1b[2J")
    assert "\x1b" not in "".join(shown(evil))


def test_the_busiest_block_of_a_cell_is_shown() -> None:
    found = np.zeros(100_000, np.int8)
    found[12_345] = cells.SHARED
    scaled, each = cells.scaled(found, 1000)
    assert (scaled.size, each) == (1000, 100)
    assert np.flatnonzero(scaled).tolist() == [123]
    assert cells.scaled(found[:0], 10)[0].size == 0
    assert sum(length for line in cells.rows(scaled, 80) for _, length in line) == 1000


def test_columns_are_headed_and_aligned() -> None:
    lines = shown(seen(), width=120, height=40)
    head = next(at for at, line in enumerate(lines) if line.startswith("  requests 3"))
    table = lines[head : head + 4]
    for name in ("state", "tenant", "why it waits"):
        at = table[0].index(name)
        assert all(line[at - 1] == " " and line[at : at + 1] != " " for line in table[:3]), name
    for name in ("prompt", "answer", "age"):
        end = table[0].index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in table), name
    for title in ("tenants 1", "workers 1"):
        assert any(line.startswith(f"  {title}") for line in lines)


def test_a_worker_that_left_is_not_listed_and_one_that_was_lost_is() -> None:
    before = seen()
    assert before.told.health is not None
    gone = {"w8": "left, process 4", "w9": "was lost, process 5"}
    told = replace(before.told, health=msgspec.structs.replace(before.told.health, gone=gone))
    text = "\n".join(shown(replace(before, told=told), height=40))
    assert re.search(r"w9 +lost", text) and "was lost, process 5" in text and "w8" not in text


def test_wide_characters_keep_the_columns() -> None:
    lines = aligned([("name", "n"), ("日本語", "1"), ("a" * 99, "2")], right=(1,))
    assert {cell_len(line) for line in lines} == {CELL_MAX + 3}


class Explaining:
    """A coordinator with requests in given states that counts the explanations of each."""

    def __init__(self, **states: str) -> None:
        self.states, self.explained = states, [0] * 9

    async def stats(self) -> m.Stats:
        return sample_stats(0, 1, 2)

    async def health(self) -> m.Health:
        return m.Health(rid=0, live=True, ready=True, reason="", workers=())

    async def requests(self, _count: int) -> m.RequestList:
        rows = tuple(row(int(name[1:]), state) for name, state in self.states.items())
        return m.RequestList(rid=0, requests=rows, total=len(rows))

    async def explain(self, request: int) -> m.Explanation:
        self.explained[request] += 1
        return m.Explanation(rid=0, subject="", sentences=(f"{request}, {self.explained[request]}",), facts={})


def test_no_stale_reason_is_shown() -> None:
    async def run() -> None:
        now = [0.0]
        kv = Explaining(r1="pending", r2="pending", r3="preempted")
        asking = Asking(cast(Any, kv), clock=lambda: now[0])
        assert set((await asking._round()).why) == {1, 2} or kv.explained.count(1) == 2
        now[0] = 1.0
        assert set((await asking._round()).why) == {1, 2, 3}  # each in turn
        kv.states["r1"] = "running"
        assert set((await asking._round()).why) == {2, 3}
        kv.states["r1"] = "preempted"  # the old explanation no longer applies
        now[0] = 2.0
        before = kv.explained[1]
        told = await asking._round()
        assert told.why[1] == f"1, {before + 1}"
        del kv.states["r2"]
        assert set((await asking._round()).why) == {1, 3}
        now[0] = 2.0 + STALE_S
        asking.selected = 3
        kv.states |= {"r4": "pending", "r5": "pending"}
        assert 1 not in (await asking._round()).why  # outdated, and others had their turn

    asyncio.run(run())
