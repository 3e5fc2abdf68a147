"""Cost of the live page: bytes a second to a viewer, the browser's time for a frame, the gateway's processor time.

    python -m benchmarks.page [--seconds 20] [--json FILE]
    python -m benchmarks.page --pictures docs/pictures

A coordinator with two workers without a model (kvforge.loadtest.fleet), a load of several tenants that keeps the
blocks moving, the page's server as a process of its own, and a headless Chromium without a GPU, all on this machine.
Bytes are those of the event stream as the page counts them: until a page opened under load has the whole map, and for
a second after that. `draw` is the page's own time to paint a frame of the maps, `frame` the time between displayed
frames. --pictures renders the README's pictures without measuring.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from kvforge import AsyncClient, SamplingParams
from kvforge.loadtest.fleet.simulated import SimulatedFleet
from kvforge.protocol.errors import KvforgeError
from tests.gateway.page.browser import Browser

from .report import report

SIZES = (10_000, 100_000)
WORKERS = 2
TENANTS = {"search": 5, "assistant": 4, "agents": 3, "batch": 2, "evals": 1}
VOCABULARY = 32_000
SYSTEM_TOKENS = 800
READY = "document.documentElement.dataset.blocks === '%d'"
INTERVALS = """new Promise((done) => {
  const times = [];
  const tick = (now) => {
    times.push(now);
    if (now - times[0] > %d) done(times);
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""
ONE_WAITING = (
    "document.querySelector('tr:nth-child(4) .state[data-state=pending]').closest('tr').querySelector('button')"
)
WAITING = "document.querySelector('#sentence').textContent.includes('ceiling')"
PALETTE = 256  # colours of a picture: the page has few


async def work(kv: AsyncClient, rng: Random, tokens: int) -> None:
    """Submit one request after the other, with a shared prefix for each tenant. tokens: longest prompt."""
    names, weights = list(TENANTS), list(TENANTS.values())
    for number in count():
        tenant = rng.choices(names, weights)[0]
        beginning = Random(tenant).choices(range(VOCABULARY), k=SYSTEM_TOKENS)
        prompt = beginning + rng.choices(range(VOCABULARY), k=rng.randrange(20, tokens))
        with suppress(KvforgeError):
            request = await kv.submit(
                prompt,
                max_tokens=rng.randrange(40, 700),
                tenant=tenant,
                sampling=SamplingParams(temperature=0.0, seed=number),
            )
            await request.result(timeout_s=600)


@asynccontextmanager
async def world(
    blocks: int, users: int, tokens: int, time_scale: float, ceiling: int
) -> AsyncIterator[tuple[SimulatedFleet, str, int]]:
    """Run a fleet under load; yield the page's address and its server's process. blocks: of all workers. ceiling: of
    one tenant."""
    quotas = {"quotas": {"batch": {"ceiling": ceiling}, "search": {"floor": blocks // WORKERS // 8}}}
    each = blocks // WORKERS
    async with SimulatedFleet(
        workers=WORKERS, blocks=each, time_scale=time_scale, coordinator_settings=quotas
    ) as fleet:
        command = [sys.executable, "-m", "tests.gateway.page.serving", str(fleet.runtime), "0"]
        server = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert server.stdout is not None
        try:
            address = (await asyncio.wait_for(server.stdout.readline(), 30)).decode().strip()
            async with AsyncClient(fleet.endpoint, timeout_s=60) as kv:
                load = [asyncio.create_task(work(kv, Random(user), tokens)) for user in range(users)]
                try:
                    yield fleet, address, server.pid
                finally:
                    for task in load:
                        task.cancel()
                    await asyncio.gather(*load, return_exceptions=True)
        finally:
            server.kill()
            await server.wait()


async def measure(blocks: int, seconds: float) -> dict[str, Any]:
    """Measure one viewer of `blocks` blocks."""
    users, tokens = (100, 1200) if blocks <= SIZES[0] else (250, 5000)
    async with world(blocks, users, tokens, 1.0, blocks) as (_, address, pid), Browser() as page:
        await page.look(1440, 1000)
        await page.go(address)
        await page.until(READY % blocks)
        await asyncio.sleep(seconds)
        await page.go(address)
        await page.until(READY % blocks)
        whole_bytes = int(await page.run("document.documentElement.dataset.bytes"))
        await asyncio.sleep(2)
        bytes_then, cpu_then = int(await page.run("document.documentElement.dataset.bytes")), processor_s(pid)
        times = await page.run(INTERVALS % int(1000 * seconds))
        bytes_now, cpu_now = int(await page.run("document.documentElement.dataset.bytes")), processor_s(pid)
        passed_s = (times[-1] - times[0]) / 1000
        frames = sorted(after - before for before, after in pairwise(times))
        drawn = await page.run("({ ...document.documentElement.dataset })")
        held = await page.run("document.querySelector('.pool .told').textContent")
    return {
        "blocks": blocks,
        "first_bytes": whole_bytes,
        "bytes_per_s": round((bytes_now - bytes_then) / passed_s),
        "draw_ms": float(drawn["drawMs"]),
        "draw_ms_max": float(drawn["drawMsMax"]),
        "frame_ms": round(median(frames), 1),
        "frame_ms_p99": round(frames[int(0.99 * len(frames))], 1),
        "gateway_cpu": round((cpu_now - cpu_then) / passed_s, 4),
        "pool": held.replace("\u00a0", " "),
    }


def processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def pictures(folder: Path) -> None:
    """Render page-light.png, page-dark.png and page-phone.png."""
    folder.mkdir(parents=True, exist_ok=True)
    async with world(10_000, 90, 1200, 2.0, 380) as (_, address, _pid), Browser() as page:
        await page.look(1440, 1060)
        await page.go(address)
        await asyncio.sleep(60)
        await page.until(WAITING)
        await page.until(f"Boolean({ONE_WAITING})")
        await page.run(f"{ONE_WAITING}.click()")
        await page.until("document.querySelector('.detail .why')?.textContent.includes('ceiling')")
        await page.run("scrollTo(0, 0)")
        await save_picture(page, folder / "page-light.png")
        await page.run("document.querySelector('[value=tenant]').click()")
        await page.look(1440, 1060, dark=True)
        await asyncio.sleep(1)
        await save_picture(page, folder / "page-dark.png")
        await page.run("document.querySelector('[value=state]').click()")
        await page.look(375, 812, ratio=2)
        await asyncio.sleep(1)
        await save_picture(page, folder / "page-phone.png")


async def save_picture(page: Browser, path: Path) -> None:
    """Save a small picture of the window."""
    from PIL import Image

    await page.picture(path)
    with Image.open(path) as image:
        few = image.convert("RGB").quantize(PALETTE)
    few.save(path, optimize=True)
    print(path, path.stat().st_size)


def main() -> None:
    """Measures, or takes pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json")
    parser.add_argument("--pictures", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.pictures is not None:
        asyncio.run(pictures(options.pictures))
        return
    found = [asyncio.run(measure(blocks, options.seconds)) for blocks in SIZES]
    header = list(found[0])
    report("The live page", header, [list(one.values()) for one in found], found, options.json)


if __name__ == "__main__":
    main()
