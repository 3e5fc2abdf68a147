"""The largest supported configuration: 4,096 sequences, a million blocks, a context of a million tokens."""

from __future__ import annotations

import msgspec
import numpy as np

from kvforge.coordinator.core.events import Boot, ClientCame, FromClient, FromWorker, ToClient, ToWorker, Turn
from kvforge.coordinator.core.machine import Machine
from kvforge.protocol.messages import Accepted, Step, StepResult, Stream, Submit, WorkerHello, WorkerReady
from tests.coordinator.driver import GREEDY, model_info
from tools.simulation.limits import make_limits

BLOCKS = 1_000_000
LARGEST = make_limits(
    block_size=16,
    sequences_max=4096,
    blocks_max=BLOCKS,
    blocks_per_sequence_max=62_500,
    queue_max=8192,
    step_rows_max=4096,
    step_tokens_max=16_384,
)
PROMPT, ANSWER = 300_000, 3


def test_the_largest_configuration_serves_a_long_prompt_beside_short_ones() -> None:
    assert LARGEST.context_tokens_max == 1_000_000
    machine = Machine(Boot("boot", b"key", LARGEST), 0)
    model = msgspec.structs.replace(model_info(), context_tokens_max=1_000_000)
    ready = WorkerReady(rid=2, model=model, blocks=BLOCKS, bytes_per_block=1, kv_dtype="float32", device="none")
    machine.apply(ClientCame(2), 0)
    machine.apply(FromWorker(1, WorkerHello(rid=1, name="w", pid=1)), 0)
    machine.apply(FromWorker(1, ready), 0)
    prompts = [np.arange(PROMPT, dtype=np.int32) % 97, *(np.array([i, i + 1], np.int32) for i in range(20))]
    for i, prompt in enumerate(prompts):
        command = Submit(rid=i, prompt=prompt, max_tokens=ANSWER, sampling=GREEDY)
        (accepted,) = machine.apply(FromClient(2, command), 1).effects
        assert isinstance(accepted, ToClient)
        assert isinstance(accepted.message, Accepted)
    ended, now_us, computed = [], 1, 0
    effects = machine.apply(Turn(), now_us).effects
    steps = [effect.message for effect in effects if isinstance(effect, ToWorker)]
    while steps:
        step = steps.pop(0)
        assert isinstance(step, Step)
        assert int(step.counts.sum()) <= LARGEST.schedule.step_tokens_max
        computed += int(step.counts.sum())
        slots = step.slots[step.samples != 0]
        tokens, logprobs = np.full(slots.size, 5, np.int32), np.zeros(slots.size, np.float32)
        result = StepResult(step_id=step.step_id, epoch=1, slots=slots, tokens=tokens, logprobs=logprobs)
        now_us += 1000
        effects = [*machine.apply(FromWorker(1, result), now_us).effects, *machine.apply(Turn(), now_us).effects]
        steps += [effect.message for effect in effects if isinstance(effect, ToWorker)]
        streams = [effect.message for effect in effects if isinstance(effect, ToClient)]
        ended += [end for stream in streams if isinstance(stream, Stream) for end in stream.ended]
    assert [end.reason for end in ended] == ["length"] * len(prompts)
    assert {end.prompt_tokens for end in ended} == {PROMPT, 2}
    assert computed >= sum(prompt.size + ANSWER - 1 for prompt in prompts)
    (group,) = machine.cache.groups.values()
    assert (group.pool.free + group.pool.cached, group.pool.referenced) == (BLOCKS, 0)
    assert group.pool.cached == (PROMPT + ANSWER - 1) // 16
    machine.check_invariants()
