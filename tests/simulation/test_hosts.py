"""Worlds in which workers have host files: every promise is kept, and planted faults of the host tier are found."""

from __future__ import annotations

import msgspec
import pytest

from kvforge.coordinator.core.limits import Quota
from tests.amount import examples
from tests.pairs import every_pair
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.faults import plant
from tools.simulation.faults_of_hosts import FAULTS_OF_HOSTS
from tools.simulation.runner import Outcome, digest_seed, drawn, play, run_seed
from tools.simulation.settings import Settings

EVENTS, SEEDS, SEEDS_MAX = 800, 12, 30
# Small pools beside a large file, and steps that take long, so that many workers die with copies in flight.
HOSTED = Settings(
    block_size=2,
    context_blocks=8,
    sequences_max=12,
    queue_max=12,
    step_rows_max=6,
    step_tokens_max=16,
    steps_in_flight_max=3,
    workers=(16,),
    clients=3,
    vocabulary=12,
    host_blocks=48,
    writeback=2,
    learn=0,
    quotas={"cat": Quota(host_ceiling=9)},
    flip_share=0.2,
    step_us=2000,
    gap_us=100,
    turn_us=20,
    long_share=0.0,
    half_share=0.05,
    wipe_gap_us=15_000,
)
# Here, most blocks that were used once are not copied.
LEARNING = msgspec.structs.replace(HOSTED, learn=6)
OF_LEARNING = {"yield_of_host_copies_never_counted", "skipped_blocks_are_not_recognised"}
LIKELY = {
    "copies_in_flight_survive_a_wipe": 1,
    "entries_of_another_file_hit": 1,
    "host_copies_left_out_of_repeated_steps": 11,
    "damaged_host_entries_stay_hits": 1,
    "load_survives_the_sequence": 10,
    "readers_of_host_blocks_forgotten": 27,
}


def run_hosted(seed: int, settings: Settings = HOSTED) -> Outcome:
    """Run a crowded world with actions drawn from the seed."""
    return play(seed, settings, ActionDrawer(settings, Draws(f"hosted/{seed}")).actions(), EVENTS, check_every=4)


def test_every_promise_is_kept() -> None:
    for seed in range(examples(SEEDS)):
        outcome = run_seed(seed, EVENTS, check_every=16, states=0.0, windows=0.0, hosts=1.0)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize(("seed", "settings"), every_pair(sorted({0, *LIKELY.values()}), [HOSTED, LEARNING]))
def test_a_crowded_world_without_faults_passes(seed: int, settings: Settings) -> None:
    outcome = run_hosted(seed, settings)
    assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


@pytest.mark.parametrize("name", FAULTS_OF_HOSTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    likely, settings = LIKELY.get(name, 0), LEARNING if name in OF_LEARNING else HOSTED
    with plant(name, FAULTS_OF_HOSTS):
        for seed in (likely, *(seed for seed in range(SEEDS_MAX) if seed != likely)):
            if run_hosted(seed, settings).error:
                break
        else:
            pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')


def test_worlds_without_host_files_stay_as_they_were() -> None:
    seed = next(seed for seed in range(100) if not drawn(seed)[0].host_blocks and drawn(seed, hosts=1.0)[0].host_blocks)
    assert digest_seed(seed, 200) == digest_seed(seed, 200, hosts=0.0) != digest_seed(seed, 200, hosts=1.0)
