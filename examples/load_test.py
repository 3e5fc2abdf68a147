"""Requests at random times, and percentiles of their latencies.

    kvforge up --model smollm2-135m
    python examples/load_test.py --rate 5 --requests 50 --input 128 --output 32

Arrivals are a Poisson process and do not wait for earlier answers. Latencies count from the intended arrival, so that a
stalled service is charged for its queue. `kvforge loadtest` has traces, sweeps, reports and a check of its driver.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from statistics import quantiles
from time import perf_counter

from kvforge import AsyncClient, SamplingParams


async def ask(kv: AsyncClient, due: float, prompt: list[int], output: int) -> tuple[float, float]:
    """Submit one request at its time.

    Returns:
        Seconds from `due` to the first token, and to the last one.
    """
    await asyncio.sleep(max(0.0, due - perf_counter()))
    request = await kv.submit(prompt, max_tokens=output, sampling=SamplingParams(ignore_eos=True), retry_s=60)
    times = [perf_counter() - due async for _ in request]
    return times[0], times[-1]


async def main() -> None:
    """Run the load and print the percentiles."""
    parser = argparse.ArgumentParser(description="Put a load on a service.")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of an answer")
    options = parser.parse_args()
    draw = random.Random(1)
    async with AsyncClient() as kv:
        await kv.wait_ready(timeout_s=120)
        due, began = perf_counter(), perf_counter()
        tasks = []
        for _ in range(options.requests):
            due += draw.expovariate(options.rate)
            prompt = [draw.randrange(3, 200) for _ in range(options.input)]
            tasks.append(ask(kv, due, prompt, options.output))
        firsts, lasts = zip(*await asyncio.gather(*tasks), strict=True)
        seconds = perf_counter() - began
    print(f"{options.requests} requests, {options.requests * options.output / seconds:.1f} tokens/s")
    for name, values in (("first token", firsts), ("last token", lasts)):
        cuts = quantiles(values, n=100, method="inclusive")
        print(f"{name}: p50 {1000 * cuts[49]:.1f} ms, p99 {1000 * cuts[98]:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main())
