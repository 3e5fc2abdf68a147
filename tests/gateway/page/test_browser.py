"""The page in a real browser, on a real server, with a real coordinator and workers without a model."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request

from kvforge import AsyncClient, SamplingParams
from kvforge.gateway.page import documents
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from kvforge.protocol.errors import QueueFull
from kvforge.protocol.messages import DiskStats
from tests.gateway.page.browser import NAMES, Browser, browser
from tests.gateway.page.serving import ANSWER, keyed, seeing, serving

pytestmark = pytest.mark.skipif(browser() is None, reason=f"needs Chromium ({', '.join(NAMES)}, or KVFORGE_BROWSER)")
GREEDY = SamplingParams(temperature=0.0)
EVIL = "<script>document.title='mine'</script><img src=x onerror=alert(1)>"
SETTINGS = {"quotas": {EVIL: {"ceiling": 60}}}
TEXT = "document.querySelector(%s).textContent"

# Contrast of every visible text by WCAG 2.2; returns the texts below AA.
TOO_FAINT = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(node).backgroundColor);
      if (a === 1 && r !== undefined) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const node of document.body.querySelectorAll("*")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest(".hidden, .skip, :disabled")) continue;
    const style = getComputedStyle(node);
    const [one, two] = [light(parse(style.color)), light(behind(node))].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const told = `${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`;
    if ((one + 0.05) / (two + 0.05) < (large ? 3 : 4.5)) faint.push(told);
  }
  return faint;
})()"""
COLOURS = """(() => {
  const canvas = document.querySelector("canvas");
  const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
  return new Set(pixels.filter((pixel) => pixel >>> 24 === 255)).size;
})()"""


def shows(selector: str, words: str) -> str:
    """Return a JavaScript expression that tests whether an element contains these words."""
    return f"document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(words)})"


def test_a_service_at_work() -> None:
    async def run() -> None:
        async with (
            SimulatedFleet(blocks=128, time_scale=40.0, coordinator_settings=SETTINGS) as fleet,
            AsyncClient(fleet.endpoint, timeout_s=30) as kv,
            serving(fleet.runtime) as address,
            Browser() as page,
        ):
            runs = await kv.submit(list(range(1, 100)), max_tokens=900, sampling=GREEDY)
            holds = await kv.submit(list(range(2, 202)), max_tokens=700, tenant=EVIL, sampling=GREEDY)
            waits = await kv.submit(list(range(3, 803)), max_tokens=50, tenant=EVIL, sampling=GREEDY)
            await page.look()
            await page.go(address)
            await page.until(shows("#sentence", f"2 running, 1 waiting for room below tenant {EVIL}'s ceiling."))
            await page.until("document.documentElement.dataset.blocks === '128'")
            await page.until(shows("#lives", "no restarts and no losses"))
            assert await page.until(f"{COLOURS} > 1 && {COLOURS}") <= 5  # free, cached, quarantined, held, shared
            await everything_is_a_click_away(page, holds.id, waits.id)
            await a_chat(page)
            for dark in (False, True):
                await page.look(dark=dark)
                assert await page.run(TOO_FAINT) == []
            await page.look(375, 700)
            assert await page.until("document.documentElement.scrollWidth <= 375")
            fits = "(({ scrollWidth, clientWidth }) => scrollWidth <= clientWidth)(document.querySelector('.tall'))"
            assert await page.until(fits)
            await a_cancel_and_a_drain(page, kv, waits.id)
            assert (await kv.status(runs.id)).state == "running"
            assert "<script>document" in await page.run("document.body.innerText")
            assert (
                await page.run("document.scripts.length") == 1 and "mine" not in (await page.run("document.title"))[:4]
            )
            said = [one for one in page.said if "getImageData" not in one]  # the warning about our own reads of colours
            assert len(said) == 1 and "status of 503" in said[0] and "/v1/chat/completions" in said[0], said
            assert {urlsplit(url).netloc for url in page.asked} <= {urlsplit(address).netloc, ""}  # "": data:

    asyncio.run(run())


async def everything_is_a_click_away(page: Browser, holds: int, waits: int) -> None:
    """The reason for a request's wait; the holder of a block, by pointer and by keys; colours; a tenant."""
    await page.click(".requests button")  # waiting requests come first
    await page.until(shows(".detail", f"Request {waits}") + " && " + shows(".detail", "its ceiling is 60"))
    await page.click(".requests button")
    await page.until("!document.querySelector('.detail')")
    x, y = await page.run("(() => { const box = document.querySelector('canvas').getBoundingClientRect();"
                          " return [box.x + 4, box.y + 4]; })()")  # fmt: skip
    await page.point(x, y)
    await page.until(shows(".readout", "Block 0") + " && " + shows(".readout", "held by request"))
    await page.run("document.querySelector('[name=colouring]:checked').focus()")
    await page.press("ArrowRight")
    await page.until("document.querySelector('[name=colouring]:checked').value === 'tenant'")
    await page.until(shows("#legend", EVIL))
    await page.press("ArrowRight")
    await page.until(shows("#legend", "under 1 s"))
    await page.press("Tab")
    assert await page.run("document.activeElement.tagName") == "CANVAS"
    for _ in range(2):
        await page.press("ArrowRight")
    await page.until(shows(".readout", "Block 2"))
    await page.click(".tenant:nth-child(2) button")
    await page.until(shows(".tenant:nth-child(2) .why", "token slots are live"))


async def a_chat(page: Browser) -> None:
    await page.click("#chat-text")
    await page.write("hello")
    await page.press("Enter")
    await page.until(f"document.querySelector('.answer')?.textContent === {json.dumps(ANSWER)}")
    await page.until(shows("#chat-told", "4 of 9 prompt tokens from cache"))
    assert (
        await page.run(TEXT % "'.thought'") == "hm " and await page.run("document.querySelector('.answer b')") is None
    )
    await page.write("fail")
    await page.click("#chat-send")
    await page.until(shows(".answer:last-child", "the model is <tired>"))


async def a_cancel_and_a_drain(page: Browser, kv: AsyncClient, waits: int) -> None:
    await page.click(".requests button")
    await page.until(shows(".detail", f"Request {waits}") + " && " + shows(".detail .why", "it is pending since"))
    await page.click(".detail .row button")
    await page.click(".detail .row button.danger")
    await page.until(shows(".detail .row", "cancelled"))
    assert (await kv.status(waits)).state == "cancelled"
    await page.click("#drain")
    await page.click("#drain-yes")
    await page.until(shows("#sentence", "Draining, no new requests: "))
    assert (await kv.health()).draining
    assert await page.run("!document.querySelector('dialog').open && document.querySelector('#drain').disabled")


def test_who_is_killed_comes_back_while_the_page_is_open() -> None:
    async def run() -> None:
        async with SimulatedFleet(workers=2, blocks=32) as fleet, Browser() as page, AsyncExitStack() as gateway:
            address = await gateway.enter_async_context(serving(fleet.runtime, allowed=seeing))
            await page.look()
            await page.go(address)
            await page.until(shows("#sentence", "All is well: nothing runs and nothing waits."))
            assert await page.run("document.querySelector('#drain').hidden"), "it has no right to"
            fleet.kill("worker-1")
            await page.until(shows("#workers", "starting again"))
            await page.until(shows("#sentence", "worker-1 is starting again; nothing runs and nothing waits."))
            await page.until(shows("#lately", "worker-1 is gone"))
            await page.until(shows("#lately", "worker-1 is ready"))
            fleet.kill("coordinator")
            await page.until(shows("#lately", "the coordinator recovered after"))
            await page.until(shows("#lives", "restarted 1 time") + " && " + shows("#lives", "1 worker lost"))
            await page.until(shows("#sentence", "All is well") + " && document.querySelectorAll('canvas').length === 2")
            await gateway.aclose()
            await page.until("document.querySelector('#link').dataset.state === 'lost'")
            await page.until(shows("#sentence", "The gateway does not answer."))
            port = int(urlsplit(address).port or 0)
            await gateway.enter_async_context(serving(fleet.runtime, allowed=seeing, port=port))
            await page.until("document.querySelector('#link').dataset.state === 'live'")
            await page.until(shows("#sentence", "All is well"))

    asyncio.run(run())


# Elements that extend beyond the window, and elements that scroll horizontally.
TOO_WIDE = """[...document.body.querySelectorAll("*")].filter((node) => node.checkVisibility()
    && !node.closest(".hidden, .skip, svg, .name") && (node.getBoundingClientRect().right > innerWidth + 0.5
    || (node.matches(".scroll") && node.scrollWidth > node.clientWidth))).map((node) => node.outerHTML.slice(0, 80))"""
BACK = "getComputedStyle(document.querySelector(%s)).backgroundColor"
BORDER = "getComputedStyle(document.querySelector(%s)).borderTopWidth"


def test_a_narrow_window_and_forced_colours_lose_nothing() -> None:
    async def run() -> None:
        async with (
            SimulatedFleet(blocks=128, time_scale=40.0) as fleet,
            AsyncClient(fleet.endpoint, timeout_s=30) as kv,
            serving(fleet.runtime) as address,
            Browser() as page,
        ):
            await kv.submit(list(range(1, 100)), max_tokens=900, sampling=GREEDY)
            await kv.submit(list(range(2, 90)), max_tokens=900, tenant="a-team-of-a-long-name-indeed", sampling=GREEDY)
            await page.look(320, 800)
            await page.go(address)
            await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
            await page.until("document.documentElement.dataset.blocks === '128'")
            assert await page.run(TOO_WIDE) == []
            for dark in (False, True):
                await page.look(dark=dark, forced=True)
                await page.until("matchMedia('(forced-colors: active)').matches")
                paper = await page.run(BACK % "'.card'")
                for part in (
                    "#legend .swatch",
                    "#pools .bar span",
                    "#tenants .swatch",
                    "#tenants .track .used",
                    ".key.one",
                ):
                    assert await page.run(BACK % json.dumps(part)) not in (paper, "rgba(0, 0, 0, 0)"), part
                chosen = await page.run(BACK % "'#colouring input:checked + span'")
                assert chosen != await page.run(BACK % "'#colouring input:not(:checked) + span'")
                for state in (".pill", ".state"):
                    assert await page.run(BORDER % json.dumps(state)) != "0px"

    asyncio.run(run())


# What keyboards and pointers cannot reach: buttons beyond the edge of a list that scrolls.
HIDDEN_BUTTONS = """[...document.querySelectorAll(".requests button")].filter((node) =>
    node.getBoundingClientRect().right > node.closest(".scroll").getBoundingClientRect().right + 0.5).length"""
BROKEN_NAMES = """[...document.querySelectorAll(".tenant .name")].filter((node) =>
    node.querySelector("b").getBoundingClientRect().top > node.querySelector(".swatch").getBoundingClientRect().bottom
).map((node) => node.textContent)"""
UNREACHED_NUMBERS = """[...document.querySelectorAll("#latency td:nth-child(2)")].filter((node) =>
    node.getBoundingClientRect().right > node.closest(".scroll").getBoundingClientRect().right).length"""


def test_long_names_leave_room_and_stand_in_full_in_a_title() -> None:
    name = "x" * 100

    async def run() -> None:
        async with (
            SimulatedFleet(blocks=128, time_scale=40.0) as fleet,
            AsyncClient(fleet.endpoint, timeout_s=30) as kv,
            serving(fleet.runtime) as address,
            Browser() as page,
        ):
            await kv.submit(list(range(1, 600)), max_tokens=900, tenant=name, sampling=GREEDY)
            ended = await kv.submit(list(range(2, 90)), max_tokens=2, tenant=name, sampling=GREEDY)
            await ended.result(30)
            await page.look()
            await page.go(address)
            await page.until("document.querySelectorAll('#latency tbody tr').length === 1")
            await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
            for width in (360, 705, 800, 860, 1185, 1280, 1400):
                await page.look(width, 800)
                for broken in (HIDDEN_BUTTONS, UNREACHED_NUMBERS):
                    assert await page.run(broken) == 0, (width, broken)
                assert await page.run(BROKEN_NAMES) == [], width
            for place in ("#tenants .name", "#latency .name", ".requests .name"):
                assert await page.run(f"document.querySelector({json.dumps(place)}).title") == name
            label = await page.run("document.querySelector('.tenant button').getAttribute('aria-label')")
            assert label == f"details of tenant {name}"

    asyncio.run(run())


POOL = {
    **dict.fromkeys(documents.POOL, 0),
    "worker": "w0",
    "blocks": 1200,
    "referenced": 300,
    "cached": 100,
    "free": 800,
    "disk": None,
    "bytes_per_block": 1 << 20,
    "kv_dtype": "float16",
}
DISK = {
    **dict.fromkeys(DiskStats.__struct_fields__, 0),
    "blocks": 50,
    "cached": 7,
    "saved_total": 9,
    "failed_total": 2,
    "off": True,
}
TEXT_OF_POOL = "import('/page/pool_text.js').then(({ poolText }) => poolText(%s).replaceAll('\u00a0', ' '))"
ANNOUNCED = """import("/page/announcer.js").then(async ({ Announcer }) => {
  const announced = [];
  const announcer = new Announcer(() => announced.push(announcer.level), 40);
  const pause = () => new Promise((done) => setTimeout(done, 80));
  for (const level of %s) {
    if (level) announcer.see(level);
    await (level ? new Promise((done) => setTimeout(done, 5)) : pause());
  }
  return announced.map((level) => (level === "bad" ? level : "better"));
})"""
DRAFTS = """import("/page/workers.js").then(({ showWorkers }) => {
  showWorkers({ rows: [{ name: "w0", state: "ready", busy_s: 0, drafts: %s }], absent: [] });
  return document.querySelector("#workers .drafts").textContent.replaceAll("\\u00a0", " ");
})"""
# Explains a row that is shown, then hidden, then one without a connection; each for a few refresh intervals.
EXPLAINED = """import("/page/explainer.js").then(async ({ Explainer }) => {
  const place = document.createElement("div");
  let shown = true;
  const server = { live: true, asked: [], ask: async (path) => {
    server.asked.push(path);
    return { sentences: [`answer ${server.asked.length}`] };
  } };
  const counts = [];
  const explainer = new Explainer(server, (id) => `request=${id}`, () => (shown ? place : undefined), 10);
  const pause = () => new Promise((done) => setTimeout(done, 100));
  const grown = async () => {
    const before = server.asked.length;
    await pause();
    return server.asked.length > before;
  };
  explainer.open(7);
  counts.push(await grown(), place.textContent !== "answer 1", place.getAttribute("aria-live"));
  shown = false;
  counts.push(await grown());
  shown = true;
  server.live = false;
  counts.push(await grown());
  explainer.open(undefined);
  server.live = true;
  counts.push(await grown(), [...new Set(server.asked)]);
  return counts;
})"""


def test_a_gateway_that_is_full_is_no_silent_one_and_names_the_time_to_retry(tmp_path: Path) -> None:
    came_s: list[float] = []

    def full(_request: Request, _right: str) -> None:
        came_s.append(monotonic())
        raise QueueFull(32, 1500, "the live page")

    async def run() -> None:
        async with serving(tmp_path, allowed=full, timeout_s=0.2) as address, Browser() as page:
            await page.look()
            await page.go(address)
            await page.until(shows("#sentence", "The gateway cannot serve this page."))
            await page.until(shows("#notes", "the live page has its limit of 32"))
            while len(came_s) < 3:
                await asyncio.sleep(0.02)
        assert came_s[1] - came_s[0] >= 1.4 and came_s[2] - came_s[1] >= 1.4

    asyncio.run(run())


# Fills the page with a long name and many workers, without a coordinator; returns what moves other parts away.
CROWDED = """import("/page/workers.js").then(({ showWorkers }) => {
  const [about, drain, all] = ["#about", "#drain", "#all"].map((id) => document.querySelector(id));
  about.textContent = "a-model-of-a-long-name ".repeat(8);
  all.hidden = drain.hidden = false;
  showWorkers({ rows: [...Array(64).keys()].map((at) => ({ name: `w${at}`, state: "ready", busy_s: 0 })), absent: [] });
  const [left, right] = [about, drain].map((node) => node.getBoundingClientRect());
  const moved = [];
  if (right.top >= left.bottom || right.left < left.right) moved.push("#drain");
  if (document.querySelector("#workers").clientHeight > 700) moved.push("#chat");
  return moved;
})"""


def test_a_long_name_and_many_workers_push_nothing_out_of_sight(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, timeout_s=0.2) as address, Browser() as page:
            await page.go(address)
            for width in (800, 1000, 1400):
                await page.look(width)
                await page.until("document.readyState === 'complete' && document.querySelector('#tiles b')")
                assert await page.run(CROWDED) == [], width

    asyncio.run(run())


def test_the_logic_of_the_scripts(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, timeout_s=0.2) as address, Browser() as page:
            await page.look()
            await page.go(address)
            await page.until("document.readyState === 'complete' && document.querySelector('#tiles b')")
            for changes, text in (
                ({}, "300 of 1,200 blocks held (25 %), 100 cached, 800 free · 1.17 GiB, float16"),
                (
                    {"quarantined": 3, "free": 797, "state_blocks": 34, "window_blocks": 5},
                    "300 of 1,200 blocks held (25 %), 100 cached, 3 quarantined, 797 free · states 34 · windows 5"
                    " · 1.17 GiB, float16",
                ),
                (
                    {"disk": DISK},
                    "300 of 1,200 blocks held (25 %), 100 cached, 800 free · 1.17 GiB, float16 · disk tier (off): "
                    "7 of 50 blocks cached, 9 saved, 0 loaded, 0 missed, 2 failed",
                ),
            ):
                assert await page.run(TEXT_OF_POOL % json.dumps(POOL | changes)) == text
            for drafts, text in (
                (None, ""),
                ([8, 0, 0], "drafts: at most 8 for a request in a step, none verified yet"),
                ([8, 1450, 1430], "drafts: at most 8 for a request in a step, 1,430 of 1,450 accepted (99 %)"),
            ):
                assert await page.run(DRAFTS % json.dumps(drafts)) == text
            for levels, announced in (
                (["good", ""], ["better"]),
                (["good", "notice", "good", "notice", ""], []),  # they do not last
                (["good", "bad", "good", ""], ["bad", "better"]),
                (["good", "bad", "good", "bad", ""], ["bad"]),
                (["good", "", "notice", "good", "notice", ""], ["better", "better"]),
                (["bad", *["good", "notice"] * 40], ["bad", "better"]),  # not bad any more for more than 40 ms
            ):
                assert await page.run(ANNOUNCED % json.dumps(levels)) == announced, levels
            path = "/page/explain?request=7"
            assert await page.run(EXPLAINED) == [True, True, "off", False, False, False, [path]]

    asyncio.run(run())


def test_a_key_is_asked_for_and_no_coordinator_is_no_riddle(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, allowed=keyed, timeout_s=0.2) as address, Browser() as page:
            await page.look()
            await page.go(address)
            await page.until("!document.querySelector('#key').hidden && document.activeElement.id === 'key-value'")
            for key in ("wrong", "sesame"):
                await page.run("document.querySelector('#key-value').value = ''")
                await page.write(key)
                await page.press("Enter")
                await page.until(shows("#key-problem", "name a key of this gateway"))
            await page.until("document.querySelector('#key').hidden")
            await page.until(shows("#sentence", "No coordinator answers.") + " && " + shows("#notes", "kvforge up"))

    asyncio.run(run())
