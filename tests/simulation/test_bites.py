"""The simulator finds every planted fault within a bounded number of seeds."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kvforge.coordinator.core.limits import Quota
from tools.simulation.actions import ActionDrawer
from tools.simulation.draws import Draws
from tools.simulation.faults import FAULTS, plant
from tools.simulation.faults_of_death import FAULTS_OF_DEATH
from tools.simulation.faults_of_drafted_states import FAULTS_OF_DRAFTED_STATES
from tools.simulation.faults_of_drafts import FAULTS_OF_DRAFTS
from tools.simulation.faults_of_states import FAULTS_OF_STATES
from tools.simulation.faults_of_windows import FAULTS_OF_WINDOWS
from tools.simulation.runner import Outcome, drawn, play, run_seed
from tools.simulation.settings import Settings, with_crashes, with_ranks

EVENTS = 800
MORTAL_EVENTS = 1200
SEEDS_MAX = 60
MORTAL_SEEDS_MAX = STATES_SEEDS_MAX = WINDOWS_SEEDS_MAX = DRAFTS_SEEDS_MAX = 30
MORTALS_SOUND = 6
STOPPED_AFTER_A_START = 30  # a seed that stops a coordinator before its first turn, while a deadline is over
SEEDS_SOUND = 4
# Seeds to try first: they found the fault when this was written. A change of the core or the simulator can outdate
# them, which only costs time. `pytest -rP` prints better ones.
LIKELY = {
    "tokens_behind_a_stop_token_kept": 3,
    "draft_of_another_row": 2,
    "step_planned_behind_one_that_asks": 2,
    "draft_model_learns_nothing_in_a_restart": 12,
    "next_step_of_a_batch_not_due": 6,
    "proposal_outlives_its_row": 38,
    "step_planned_behind_drafts": 2,
    "drafts_sent_as_prompt_tokens": 1,
    "proposals_not_restored": 56,
    "drafts_beyond_a_ceiling": 27,
    "more_drafts_than_states": 7,
    "fork_behind_the_window": 1,
    "hit_without_windows": 1,
    "windows_not_copied": 5,
    "part_of_a_window_evicted": 2,
    "pages_of_a_window_swapped": 2,
    "windows_of_another_block_indexed": 3,
    "window_released_for_what_is_planned": 2,
    "time_away_by_the_wall_clock": 10,
    "acknowledged_what_was_not": 1,
    "group_goes_on_with_the_first_rank_that_is_back": 1,
    "rank_of_an_earlier_life_accepted": 3,
    "stored_records_not_added": 5,
    "floor_spares_nobody": 6,
    "blocks_that_came_back_not_told": 4,
    "copy_not_sent": 2,
    "cut_off_while_it_stood_is_gone": 2,
    "ranks_cut_off_are_not_waited_for": 4,
    "kinds_not_told_apart_in_hits": 18,
    "computed_again_as_a_prompt": 18,
    "kept_sequence_without_its_kinds": 3,
    "continued_beyond_what_is_equal": 3,
    "rewound_while_it_runs": 3,
    "pins_beyond_their_share": 0,
    "tail_of_a_sequence_that_was_cut_off": 22,
    "tail_written_into_a_shared_block": 40,
    "ahead_beside_others": 40,
    "marks_not_sent": 1,
    "what_follows_stays_in_mirrors": 1,
    "generated_tokens_told_as_a_prompts": 1,
    "copy_one_token_short": 2,
    "slot_reused_early": 2,
    "appended_token_lost": 3,
    "stream_repeated_after_preemption": 0,
    "sequence_settles_while_its_row_is_read": 2,
    "preempted_sequence_not_busy": 16,
    "first_token_timer_lost": 1,
    "lease_never_ends": 2,
    "lease_survives_an_attach": 8,
    "end_of_a_drain_not_due": 2,
    "paused_stream_not_due": 2,
    "one_round_a_turn": 3,
    "drain_without_end": 23,
    "attach_replays_from_the_next": 4,
    "paused_stream_goes_on": 2,
    "end_told_while_paused": 2,
    "pause_not_told": 2,
    "taken_told_to_who_has_it_back": 3,
    "oldest_may_be_the_victim": 4,
    "end_of_a_row_not_told": 6,
    "row_that_cannot_go_on_kept": 5,
    "passed_never_counted": 4,
    "sibling_never_released": 5,
    "cut_not_told": 1,
    "cut_not_made": 1,
    "prompt_read_from_behind": 30,
    "tops_of_another_row": 2,
    "tops_lost_in_a_replay": 1,
    "crash_never_counted": 19,
    "suspect_runs_among_others": 19,
    "suspect_alone_beyond_its_crash_point": 15,
    "requests_of_others_found": 4,
    "sequences_of_others_found": 5,
    "blocks_of_others_found": 4,
    "list_of_all_tenants": 2,
    "purge_of_all_tenants": 18,
    "tenant_taken_from_the_message": 2,
    "anybody_drains": 2,
    "explanation_names_others": 2,
    "salt_ignored": 1,
    "error_names_others": 5,
    "ended_rows_left_out_of_the_new_tables": 5,
    "steps_not_sent_again": 2,
    "stale_epoch_accepted": 3,
    "whoever_is_away_is_streamed_to": 3,
    "command_done_again": 1,
    "torn_record_taken": 3,
    "rights_not_written": 2,
    "effects_before_the_journal": 8,
    "row_of_an_earlier_run_accepted": 2,
    "settled_a_step_early": 1,
    "quarantine_skipped": 1,
    "settled_by_the_first_rank": 4,
    "group_outlives_a_rank": 14,
    "ranks_that_disagree_believed": 16,
    "steps_for_the_first_rank_alone": 22,
    "checkpoint_never_acknowledged": 2,
    "checkpoint_one_block_off": 4,
    "state_not_restored_after_a_rewind": 3,
    "kept_state_taken_at_another_position": 19,
    "state_beyond_the_last_token_kept": 12,
    "fork_shares_its_parents_state": 1,
    "checkpoint_outlives_its_block": 1,
    "part_of_a_checkpoint_evicted": 2,
}
# A world for situations that drawn worlds rarely reach: many rows in a pool that is too small for them, and floors.
CROWDED = Settings(
    block_size=1,
    context_blocks=16,
    sequences_max=12,
    queue_max=12,
    step_rows_max=6,
    step_tokens_max=24,
    workers=(26,),
    clients=3,
    quotas={"ant": Quota(floor=9), "bee": Quota(floor=4)},
    long_us=5_000,
    gap_us=250,
)
IN_A_CROWD = {"floor_spares_nobody"}
# A busy world of a model with recurrent states, in which requests start while checkpoints are being copied.
STATEFUL = Settings(
    block_size=2,
    context_blocks=12,
    sequences_max=10,
    queue_max=12,
    step_rows_max=6,
    step_tokens_max=8,
    steps_in_flight_max=3,
    workers=(44,),
    clients=3,
    vocabulary=12,
    kinds=True,
    state_blocks=2,
    prompt_chunk=2,
    checkpoint_tokens=4,
    step_us=2000,
    gap_us=100,
    turn_us=20,
    long_share=0.0,
)
# A coordinator that often dies while long steps of two pools are in flight, and rows of these have ended.
TWO_POOLS = Settings(
    block_size=2,
    context_blocks=8,
    sequences_max=8,
    step_rows_max=6,
    step_tokens_max=24,
    steps_in_flight_max=3,
    workers=(20, 30),
    clients=3,
    short_us=50,
    long_us=5_000,
    long_share=0.1,
    step_us=2000,
    gap_us=100,
    lease_us=20_000,
    crash_gap_us=8_000,
)
IN_TWO_POOLS = {"ended_rows_left_out_of_the_new_tables"}
IN_A_BUSY_WORLD = {"checkpoint_never_acknowledged", "part_of_a_checkpoint_evicted", "checkpoint_outlives_its_block"}
# Needs a prompt whose log-probabilities are still being read when its client attaches anew: rare beside conversations.
WITHOUT_TALKS = {"prompt_read_from_behind"}


def run_crowded(seed: int) -> Outcome:
    """Run the crowded world with actions drawn from the seed."""
    drawer = ActionDrawer(CROWDED, Draws(f"crowded/{seed}"))
    return play(seed, CROWDED, drawer.actions(), EVENTS, check_every=4)


def run_of(name: str, seed: int) -> Outcome:
    """The world in which a planted fault is looked for."""
    if name in WITHOUT_TALKS:
        settings = replace(drawn(seed, states=0.0, windows=0.0)[0], kinds=False, scores=True)
        drawer = ActionDrawer(settings, Draws(f"actions/{seed}"), Draws(f"deaths/{seed}"))
        return play(seed, settings, drawer.actions(), EVENTS, check_every=4)
    if name in IN_A_CROWD:
        return run_crowded(seed)
    return run_seed(seed, EVENTS, check_every=4, states=0.0, windows=0.0)


def run_mortal(seed: int, name: str) -> Outcome:
    """Run a seed's world with deaths of the coordinator, even if its settings have none, and as it was first drawn.

    It has no conversations, no states and no log-probabilities of prompts, so that the seeds in LIKELY stay likely.

    For a fault of ranks, some workers have several.
    """
    settings = TWO_POOLS if name in IN_TWO_POOLS else drawn(seed, states=0.0, windows=0.0)[0]
    settings = replace(settings, kinds=False, ranks=(), scores=False)
    settings = with_ranks(settings, Random(f"ranks/{seed}"), share=1.0 if "rank" in name else 0.0)
    settings = replace(settings, disk_blocks=0) if settings.ranks else settings
    mortal = settings if settings.crash_gap_us else with_crashes(settings, Random(f"mortal/{seed}"), share=1.0)
    drawer = ActionDrawer(mortal, Draws(f"actions/{seed}"), Draws(f"deaths/{seed}"))
    return play(seed, mortal, drawer.actions(), MORTAL_EVENTS)


def found_by(name: str) -> tuple[int | None, str]:
    """Return the seed that showed the fault, and the violation; (None, "") if no seed did."""
    likely = LIKELY.get(name, 0)
    with plant(name):
        for seed in (likely, *(seed for seed in range(SEEDS_MAX) if seed != likely)):
            outcome = run_of(name, seed)
            if outcome.error:
                return seed, outcome.error
    return None, ""


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulator_finds_a_planted_fault(name: str) -> None:
    seed, error = found_by(name)
    assert seed is not None, f"{name} was not found in {SEEDS_MAX} seeds"
    assert error
    if seed != LIKELY.get(name, 0):
        print(f'faster with LIKELY["{name}"] = {seed}')


@pytest.mark.parametrize("name", FAULTS_OF_DEATH)
def test_the_simulator_finds_a_planted_fault_of_who_goes_on(name: str) -> None:
    likely = LIKELY.get(name, 0)
    seeds = (likely, *(seed for seed in range(MORTAL_SEEDS_MAX) if seed != likely))
    with plant(name, FAULTS_OF_DEATH):
        found = next((seed for seed in seeds if run_mortal(seed, name).error), None)
    assert found is not None, f"{name} was not found in {MORTAL_SEEDS_MAX} seeds"
    if found != likely:
        print(f'faster with LIKELY["{name}"] = {found}')


def run_with_states(name: str, seed: int) -> Outcome:
    """The world in which a planted fault of recurrent states is looked for."""
    if name not in IN_A_BUSY_WORLD:
        return run_seed(seed, EVENTS, check_every=4, states=1.0, windows=0.0, hosts=0.0)
    drawer = ActionDrawer(STATEFUL, Draws(f"stateful/{seed}"))
    return play(seed, STATEFUL, drawer.actions(), EVENTS, check_every=4)


@pytest.mark.parametrize("name", FAULTS_OF_STATES)
def test_the_simulator_finds_a_planted_fault_of_recurrent_states(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with plant(name, FAULTS_OF_STATES):
        for seed in (likely, *(seed for seed in range(STATES_SEEDS_MAX) if seed != likely)):
            if run_with_states(name, seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {STATES_SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')


def test_worlds_with_states_without_faults_pass_the_same_seeds() -> None:
    for seed in sorted({*range(SEEDS_SOUND), *(LIKELY.get(name, 0) for name in FAULTS_OF_STATES)}):
        for name in ("", min(IN_A_BUSY_WORLD)):
            outcome = run_with_states(name, seed)
            assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


def run_with_windows(seed: int) -> Outcome:
    """The world in which a planted fault of windows is looked for."""
    return run_seed(seed, EVENTS, check_every=4, states=0.0, windows=1.0, hosts=0.0)


@pytest.mark.parametrize("name", FAULTS_OF_WINDOWS)
def test_the_simulator_finds_a_planted_fault_of_windows(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with plant(name, FAULTS_OF_WINDOWS):
        for seed in (likely, *(seed for seed in range(WINDOWS_SEEDS_MAX) if seed != likely)):
            if run_with_windows(seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {WINDOWS_SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')


def test_worlds_with_windows_without_faults_pass_the_same_seeds() -> None:
    for seed in sorted({*range(SEEDS_SOUND), *(LIKELY.get(name, 0) for name in FAULTS_OF_WINDOWS)}):
        outcome = run_with_windows(seed)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
    outcome = run_seed(0, EVENTS, check_every=4, states=1.0, windows=1.0)
    assert not outcome.error, f"with states: {outcome.error}\n{outcome.where}"


def run_with_drafts(seed: int) -> Outcome:
    """The world in which a planted fault of drafts is looked for."""
    return run_seed(seed, EVENTS, check_every=4, states=0.0, windows=0.0, drafts=1.0)


@pytest.mark.parametrize("name", FAULTS_OF_DRAFTS)
def test_the_simulator_finds_a_planted_fault_of_drafts(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with plant(name, FAULTS_OF_DRAFTS):
        for seed in (likely, *(seed for seed in range(DRAFTS_SEEDS_MAX) if seed != likely)):
            if run_with_drafts(seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {DRAFTS_SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')


def test_worlds_with_drafts_without_faults_pass_the_same_seeds() -> None:
    for seed in sorted({*range(SEEDS_SOUND), *(LIKELY.get(name, 0) for name in FAULTS_OF_DRAFTS)}):
        outcome = run_with_drafts(seed)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


def run_with_drafted_states(seed: int) -> Outcome:
    """The world in which a planted fault of drafts over recurrent states is looked for."""
    return run_seed(seed, EVENTS, check_every=4, states=1.0, windows=0.0, drafts=1.0)


@pytest.mark.parametrize("name", FAULTS_OF_DRAFTED_STATES)
def test_the_simulator_finds_a_planted_fault_of_drafts_over_states(name: str) -> None:
    likely = LIKELY.get(name, 0)
    with plant(name, FAULTS_OF_DRAFTED_STATES):
        for seed in (likely, *(seed for seed in range(DRAFTS_SEEDS_MAX) if seed != likely)):
            if run_with_drafted_states(seed).error:
                break
        else:
            pytest.fail(f"{name} was not found in {DRAFTS_SEEDS_MAX} seeds")
    if seed != likely:
        print(f'faster with LIKELY["{name}"] = {seed}')


def test_worlds_with_drafts_over_states_without_faults_pass_the_same_seeds() -> None:
    for seed in sorted({*range(SEEDS_SOUND), *(LIKELY.get(name, 0) for name in FAULTS_OF_DRAFTED_STATES)}):
        outcome = run_with_drafted_states(seed)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


def test_mortals_without_faults_pass_the_same_seeds() -> None:
    for seed in range(MORTALS_SOUND):
        outcome = run_mortal(seed, min(IN_TWO_POOLS))
        assert not outcome.error, f"two pools, seed {seed}: {outcome.error}\n{outcome.where}"
    for seed in (*range(MORTALS_SOUND), STOPPED_AFTER_A_START):
        outcome = run_mortal(seed, "rank" if seed % 2 else "")
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"


def test_seeds_that_are_tried_first_are_of_faults_that_exist() -> None:
    special = set(FAULTS_OF_STATES) | set(FAULTS_OF_WINDOWS) | set(FAULTS_OF_DRAFTS) | set(FAULTS_OF_DRAFTED_STATES)
    assert set(LIKELY) <= set(FAULTS) | set(FAULTS_OF_DEATH) | special
    assert max(LIKELY.values()) < SEEDS_MAX


def test_the_core_without_faults_passes_the_same_seeds() -> None:
    for seed in sorted({*range(SEEDS_SOUND), *(LIKELY[name] for name in LIKELY if name not in FAULTS_OF_DRAFTS)}):
        outcome = run_seed(seed, EVENTS, check_every=4)
        assert not outcome.error, f"seed {seed}: {outcome.error}\n{outcome.where}"
    for seed in range(4):
        outcome = run_crowded(seed)
        assert not outcome.error, f"crowded, seed {seed}: {outcome.error}\n{outcome.where}"
