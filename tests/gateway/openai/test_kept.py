"""The next turn of a stored response names the sequence that the response left in the coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvforge.gateway.config import Settings, StorageSection
from kvforge.gateway.openai.kept import KeptSequence, kept_of
from kvforge.gateway.replicas.stream import MovingStream
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import Ended, Timings
from tests.gateway.scripted import Script

from .test_stored import LEASE_S, World, ended, play, respond

KEPT = 10_000  # the script's sequences have the numbers of their requests, and this more


def asked(world: World) -> list[tuple[int, float]]:
    """The sequence that each submission continues, and how long it keeps its own."""
    return [(options.continues, options.keep_s) for _, _, options in world.script.asked]


def test_a_turn_continues_the_sequence_of_the_response_before(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http)
        second = await respond(http, previous_response_id=first.id)
        await respond(http, previous_response_id=first.id, store=False)
        await respond(http, previous_response_id=second.id, stream=False)
        left = [KEPT + world.script.next_id - 4 + at for at in range(4)]
        assert asked(world) == [(0, 600.0), (left[0], 600.0), (left[0], 0.0), (left[1], 600.0)]

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_streamed_response_leaves_its_sequence_too(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        answer = await http.post("/v1/responses", json={"input": "Hi", "stream": True})
        name = answer.text.split('"id":"')[1].split('"')[0]
        await respond(http, previous_response_id=name)
        assert asked(world)[1][0] == KEPT + world.script.next_id - 2

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_conversation_continues_the_sequence_of_its_last_response(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        talk = (await http.post("/v1/conversations", json={})).json()["id"]
        for _ in range(3):
            await respond(http, conversation=talk)
        last = KEPT + world.script.next_id - 1
        assert [continues for continues, _ in asked(world)] == [0, last - 2, last - 1]

    play(tmp_path, Script(keeps=KEPT), work)


def test_a_background_response_continues_it_also_after_the_death_of_its_gateway(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http, other = world.gateway(), world.gateway()
        first = await respond(http)
        world.script.hang = True
        second = await respond(http, previous_response_id=first.id, background=True)
        await world.kill(0)
        await asyncio.sleep(2 * LEASE_S)
        world.script.resume()
        await ended(other, second.id)
        third = await respond(other, previous_response_id=second.id)
        assert third.status == "completed"
        left = KEPT + world.script.next_id - 3
        assert set(asked(world)[1:-1]) == {(left, 600.0)}
        assert asked(world)[-1][0] == left + 1

    play(tmp_path, Script(keeps=KEPT), work)


def test_nothing_is_kept_where_the_setting_is_zero(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        await respond(world.gateway())
        assert asked(world) == [(0, 0.0)]

    play(tmp_path, Script(), work, Settings(storage=StorageSection(sequence_s=0.0)))


def test_a_coordinator_that_keeps_nothing_is_sent_an_ordinary_prompt(tmp_path: Path) -> None:
    async def work(world: World) -> None:
        http = world.gateway()
        first = await respond(http)
        await respond(http, previous_response_id=first.id)
        assert [continues for continues, _ in asked(world)] == [0, 0]

    play(tmp_path, Script(), work)


def test_the_replica_of_a_sequence_is_remembered() -> None:
    stream = MovingStream(lambda: None)
    assert kept_of(stream) is None
    stream.replica = "east"
    ended_ = Ended(request_id=1, reason="stop", generated_tokens=1, prompt_tokens=1, cached_tokens=0, timings=Timings())
    stream.ended = ended_
    assert kept_of(stream) is None
    stream.ended = msgspec.structs.replace(ended_, sequence_id=5)
    assert kept_of(stream) == KeptSequence(sequence_id=5, replica="east", tokens=2)


@pytest.mark.parametrize("value", [-1.0, 31 * 86_400.0])
def test_a_time_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(InvalidConfiguration, match=r"storage\.sequence_s"):
        StorageSection(sequence_s=value)
