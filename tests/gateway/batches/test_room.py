"""How many lines run, by the load of the service."""

from __future__ import annotations

import asyncio

from kvforge.gateway.batches.room import QUIET_S, START, Room
from kvforge.gateway.generate.service import Load


def test_a_free_service_is_filled_but_for_a_spare() -> None:
    async def work() -> None:
        room = Room(1000, 0.125)
        for _ in range(200):
            await fill(room)
            room.adjust(Load(running=room.used, pending=0, rows_free=256 - room.used), room.used, 0.0)
        assert room.limit == 256 - 256 // 8

    asyncio.run(work())


def test_beside_other_requests_a_share_is_left_to_batches() -> None:
    async def work() -> None:
        room = Room(1000, 0.125)
        await fill(room)
        room.adjust(Load(running=room.used + 1, pending=0, rows_free=255 - room.used), room.used, 5.0)
        assert room.limit <= 32
        for _ in range(100):
            await fill(room)
            room.adjust(Load(running=room.used, pending=0, rows_free=256 - room.used), room.used, 4.0 + QUIET_S)
        assert room.limit == 32, "the others are not forgotten at once"
        room.adjust(Load(running=room.used, pending=0, rows_free=256 - room.used), room.used, 5.0 + QUIET_S)
        assert room.limit > 32

    asyncio.run(work())


def test_requests_of_others_that_ended_between_two_looks_count() -> None:
    room = Room(1000, 0.125)
    room.used = 20
    room.meet_others(5.0)
    room.adjust(Load(running=20, pending=0, rows_free=44), 20, 5.1)
    assert room.limit == 8


def test_prompts_that_wait_hold_back_batches_beside_others() -> None:
    room = Room(1000, 0.125)
    room.used = 20
    room.adjust(Load(running=21, pending=0, rows_free=235, queued_tokens=5000), 20, 0.0)
    assert room.limit == 10
    room.adjust(Load(running=21, pending=0, rows_free=235, queued_tokens=500), 20, 0.0)
    assert room.limit == 25
    room.adjust(Load(running=20, pending=0, rows_free=236, queued_tokens=5000), 20, QUIET_S)
    assert room.limit == 25, "alone, prompts may fill the steps"


def test_a_busy_process_holds_back_batches_beside_others() -> None:
    room = Room(1000, 1.0)
    room.used = 20
    room.adjust(Load(running=21, pending=0, rows_free=235), 20, 0.0, busy=0.9)
    assert room.limit == 10
    room.adjust(Load(running=20, pending=0, rows_free=236), 20, QUIET_S, busy=0.9)
    assert room.limit == 25, "alone, they may use all of it"


def test_waiting_requests_end_the_growth_and_one_line_always_runs() -> None:
    room = Room(1000, 1.0)
    room.used = 40
    room.adjust(Load(running=30, pending=10, rows_free=100), 40, 0.0)
    assert room.limit == 30
    room.adjust(Load(running=256, pending=50, rows_free=0), 40, 0.0)
    assert room.limit == 1
    Room(4, 1.0).adjust(Load(running=0, pending=0, rows_free=1), 0, 0.0)


def test_places_are_taken_in_order_and_given_back() -> None:
    async def work() -> None:
        room = Room(2, 1.0)
        order: list[int] = []

        async def line(number: int, count: int) -> None:
            async with room.place(count):
                order.append(number)
                await asyncio.sleep(0)

        lines = [asyncio.ensure_future(line(at, count)) for at, count in enumerate((1, 1, 9, 1))]
        lost = asyncio.ensure_future(line(9, 1))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(*lines)
        assert order == [0, 1, 2, 3] and room.used == 0, "also a line that needs more places than there are"

    asyncio.run(work())


async def fill(room: Room) -> None:
    """Take all places that there are."""
    assert room.limit >= 1 and START >= 1
    while room.used < room.limit:
        await room.reserve(1)
