"""The tier of every test, by its folder: unit, torch, process or soak.

| tier | its tests | run by |
|---|---|---|
| unit | pure code, and servers in the test's own process | `make test`, `make test-all` |
| torch | the worker, with torch and Triton's interpreter | `make test`, `make test-all` |
| process | real processes over real sockets | `make test`, `make test-all` |
| soak | minutes each: chaos, Ray, systemd, planted faults, kernel compilation, fresh seeds | `make test-all` |

A folder without a tier is an error at collection. EXCEPTIONS holds the files and tests that differ from their folder.
`pytest.param(..., marks=pytest.mark.soak)` makes a single case of a test a soak test: one of a product of parameters,
where the other cases have each value of each parameter. `pairs.every_pair` does so for a product of two, and
`tests.worker.loading.covering.by_parts` for families of models: the other families have their parts.
"""

from __future__ import annotations

import pytest

# All tests of a run, those that `-m` leaves out included: `make test` finds a wrong tier of a soak test too.
COLLECTED = pytest.StashKey[list[pytest.Item]]()
FOLDERS = {
    "unit": (
        "tests",
        "tests/benchmarks",
        "tests/chaos",
        "tests/coordinator",
        "tests/coordinator/journal",
        "tests/coordinator/kv_events",
        "tests/coordinator/transport",
        "tests/gateway",
        "tests/gateway/access",
        "tests/gateway/anthropic",
        "tests/gateway/batches",
        "tests/gateway/chat",
        "tests/gateway/generate",
        "tests/gateway/metrics",
        "tests/gateway/openai",
        "tests/gateway/openapi",
        "tests/gateway/page",
        "tests/gateway/parse",
        "tests/kvforge",
        "tests/kvforge/client",
        "tests/kvforge/commands",
        "tests/kvforge/deploy",
        "tests/kvforge/fleet",
        "tests/kvforge/launch",
        "tests/kvforge/models",
        "tests/kvforge/routing",
        "tests/kvforge/text",
        "tests/loadtest/chaos",
        "tests/loadtest/drive",
        "tests/loadtest/fleet",
        "tests/loadtest/load",
        "tests/loadtest/measure",
        "tests/loadtest/report",
        "tests/protocol",
        "tests/scenarios",
        "tests/simulation",
        "tests/simulation/fleet",
        "tests/tools",
    ),
    "torch": (
        "tests/worker",
        "tests/worker/attention",
        "tests/worker/cpu",
        "tests/worker/device",
        "tests/worker/disk",
        "tests/worker/drafts",
        "tests/worker/kernels",
        "tests/worker/loading",
        "tests/worker/sampling",
        "tests/worker/step",
    ),
    "process": (
        "tests/examples",
        "tests/gateway/clients",
        "tests/gateway/replicas",
        "tests/gateway/serve",
        "tests/gateway/storage",
        "tests/gateway/text",
        "tests/hostile",
        "tests/integration",
        "tests/kvforge/process",
        "tests/loadtest/command",
    ),
    "soak": ("tests/amdgcn", "tests/ptx"),
}
EXCEPTIONS = {
    "tests/amdgcn/test_machine.py": "torch",
    "tests/ptx/test_machine.py": "torch",
    "tests/chaos/test_background.py": "soak",
    "tests/chaos/test_chaos.py": "soak",
    "tests/chaos/test_conversations.py": "soak",
    "tests/chaos/test_planted.py": "soak",
    # Their requests are recorded, and sent by test_recorded.py.
    "tests/gateway/clients/test_coding_agents.py": "soak",
    "tests/gateway/clients/test_libraries.py": "soak",
    "tests/gateway/page/test_browser.py": "process",
    "tests/gateway/page/test_served.py": "process",
    "tests/gateway/storage/test_sqlite.py": "unit",
    # Chaos. Process tests have a death of each kind: of a coordinator and a worker in test_recovery.py, of a rank in
    # test_ranks.py, of a gateway in test_clients.py, of a client in test_lost_client.py, of a replica in
    # test_served.py, and a worker that hangs in test_unresponsive.py.
    "tests/gateway/test_background_deaths.py": "soak",
    "tests/gateway/test_batch_deaths.py": "soak",
    "tests/integration/test_disk_ranks.py::test_ranks_are_killed_while_they_copy": "soak",
    "tests/integration/test_draft_bits.py::test_no_bit_differs_though_the_worker_is_killed": "soak",
    "tests/integration/test_lost_worker.py": "soak",
    "tests/integration/test_ranks.py::test_four_ranks_that_divide_experts_lose_one": "soak",
    "tests/integration/test_structured.py::test_a_shaped_answer_survives_kills_preemption_and_has_company": "soak",
    "tests/integration/test_up.py::test_a_worker_that_stands_still_is_killed_and_its_successor_serves": "soak",
    "tests/integration/test_up.py::test_two_installations_and_a_killed_supervisor": "soak",
    "tests/loadtest/chaos/test_kill.py": "soak",
    "tests/loadtest/fleet/test_fleet.py::test_a_fleet_answers_the_same_though_processes_die": "soak",
    "tests/gateway/test_batches_guide.py": "process",
    "tests/gateway/test_clients.py": "process",
    # Chats of this model come through HTTP in the same file, and these prompts without HTTP in test_conformance.py.
    "tests/gateway/test_clients.py::test_the_conformance_prompts_through_http": "soak",
    # With a tiny model: test_thousand.py, test_cluster.py and test_sequences.py.
    "tests/integration/test_conformance.py::test_preempted_forked_cached_and_split_over_two_workers": "soak",
    # Heads, with another draft and other keys and values, are process tests of the same checks.
    "tests/integration/test_draft_model.py::test_preempted_requests_and_those_of_a_killed_worker_go_on": "soak",
    "tests/integration/test_draft_model.py::test_the_host_tier_keeps_the_draft_model_and_another_one_is_a_miss": "soak",
    # An EAGLE-3 head's K and V come back from the disk too, and another head's are a miss on the host.
    "tests/integration/test_draft_model.py::test_the_disk_tier_keeps_the_draft_model_and_another_one_is_a_miss": "soak",
    # The real model once more; test_up.py interrupts a service with a tiny one.
    "tests/integration/test_demo.py::test_interrupted_while_it_answers": "soak",
    # Models with states have drafts in test_hybrids.py, and by heads in test_heads.py.
    "tests/integration/test_drafts.py::test_a_model_with_recurrent_states_gives_the_bits_without_drafts": "soak",
    # A model with states and an EAGLE-3 head comes back from the disk in a process test.
    "tests/integration/test_eagle.py::test_a_head_drafts_for_a_model_with_recurrent_states": "soak",
    # tests/worker/step/test_heads.py rejects drafts of heads, test_draft_bits.py finds one that is accepted wrongly.
    "tests/integration/test_eagle.py::test_a_head_that_is_mostly_wrong_changes_nothing": "soak",
    # A head with states comes back from the disk in a process test, and another head is a miss on the host.
    "tests/integration/test_eagle.py::test_the_disk_tier_keeps_what_a_head_stores_and_another_head_is_a_miss": "soak",
    # An EAGLE-3 head stores the same, and is a process test.
    "tests/integration/test_heads.py::test_preempted_requests_and_those_of_a_killed_worker_go_on": "soak",
    # Modules draft over states in tests/worker/step/test_heads.py, other drafts over states in test_hybrids.py.
    "tests/integration/test_heads.py::test_a_module_drafts_over_recurrent_states": "soak",
    "tests/integration/test_heads.py::test_the_disk_tier_keeps_what_heads_store_and_other_workers_miss": "soak",
    "tests/integration/test_heads.py::test_the_host_tier_keeps_what_heads_store_and_other_workers_miss": "soak",
    # test_host_tier.py writes running sequences back; windows and states come back from the host in this file.
    "tests/integration/test_host_kinds.py::test_running_sequences_go_on_if_they_are_written_back": "soak",
    # Hits, forks, rewinds and deaths are a story of test_hybrids.py, and tests/worker/step/test_states.py compares the
    # bits behind prompts of any length.
    "tests/integration/test_hybrid_recipes.py": "soak",
    # With drafts and two ranks the same is a process test.
    "tests/integration/test_hybrids.py::test_states_through_hits_forks_rewinds_preemption_and_deaths": "soak",
    "tests/integration/test_hybrids.py::test_the_same_with_other_families": "soak",
    "tests/integration/test_sequences.py::test_ten_thousand_cycles_leave_memory_flat": "soak",
    # Two starts of a benchmark in fresh interpreters.
    "tests/integration/test_startup.py::test_each_start_is_split_into_phases": "soak",
    "tests/integration/test_systemd_boot.py": "soak",
    "tests/integration/test_systemd_stop.py": "soak",
    "tests/integration/test_windows.py": "soak",
    "tests/kvforge/client/test_interrupted.py::test_ctrl_c_at_any_step_of": "soak",
    "tests/kvforge/fleet/test_on_ray.py": "soak",
    "tests/loadtest/report/test_browser.py": "process",
    "tests/simulation/test_bites.py": "soak",
    "tests/simulation/fleet/test_fleet.py::test_the_simulator_finds_a_planted_fault": "soak",
    "tests/simulation/test_disks.py::test_the_simulator_finds_a_planted_fault": "soak",
    "tests/simulation/test_fresh.py": "soak",
    "tests/simulation/test_host_parts.py::test_the_simulator_finds_a_planted_fault": "soak",
    "tests/simulation/test_hosts.py::test_the_simulator_finds_a_planted_fault": "soak",
    "tests/simulation/test_simulation.py::test_every_promise_is_kept_with_more_seeds": "soak",
    "tests/test_resolution.py::test_a_worker_resolves": "soak",
    "tests/test_resolution.py::test_all_extras_resolve": "soak",
    "tests/tools/test_process_deaths.py": "process",
    "tests/worker/attention/test_prefill.py::test_hopper_kernel_uses_groups_of_warps_and_the_copy_engine": "soak",
    "tests/worker/kernels/test_aot.py": "soak",
    "tests/worker/kernels/test_layers_aot.py": "soak",
    # Three of the kinds are torch tests of test_split.py.
    "tests/worker/loading/test_composite.py::test_two_ranks_divide_every_text_part": "soak",
    # In float32 a sixth of these changes are torch tests, and in 16 bits those that a weaker check misses first.
    "tests/worker/loading/test_families.py::test_any_other_wrong_part_is_caught_in_32_bits": "soak",
    "tests/worker/loading/test_families.py::test_any_other_wrong_part_is_caught_in_16_bits": "soak",
    # In company a covering set of its kinds are torch tests.
    "tests/worker/loading/test_expert_parallel.py::test_other_kinds_have_the_same_bits_in_company": "soak",
    # It imports transformers twice. test_after_an_error_transformers_is_imported_again is a torch test.
    "tests/worker/loading/test_lazy_compiler.py::test_a_version_that_needs_all_of_torch_gets_it": "soak",
    # Two of its plans, and all plans with two ranks, are torch tests.
    "tests/worker/loading/test_four_ranks.py::test_with_other_plans_too": "soak",
    "tests/worker/loading/test_hybrid_ranks.py::test_the_same_with_other_families": "soak",
    "tests/worker/step/test_company.py::test_company_changes_no_bit_of_any_described_family": "soak",
    # A random model in bfloat16 is a torch test, and the real one in float32.
    "tests/worker/step/test_company.py::test_the_held_prompts_have_one_answer_in_bfloat16": "soak",
}
# Files with a test or fixture of eight CPU seconds or more: they come first, so that none alone remains at the end.
LONG = frozenset(
    (
        "tests/gateway/test_clients.py",
        "tests/integration/test_conformance.py",
        "tests/integration/test_demo.py",
        "tests/integration/test_hybrids.py",
        "tests/integration/test_ranks.py",
        "tests/integration/test_rolling.py",
        "tests/integration/test_sequences.py",
        "tests/integration/test_startup.py",
        "tests/integration/test_thousand.py",
        "tests/integration/test_up.py",
        "tests/test_resolution.py",
        "tests/worker/loading/test_expert_parallel.py",
        "tests/worker/loading/test_four_ranks.py",
        "tests/worker/loading/test_lazy_compiler.py",
        "tests/worker/step/test_company.py",
        "tests/worker/step/test_conformance.py",
    )
)
TIERS = tuple(FOLDERS)
_TIER_OF_FOLDER = {folder: tier for tier, folders in FOLDERS.items() for folder in folders}


def tier_of(node_id: str) -> str | None:
    """Return the tier of a test.

    Args:
        node_id: `FILE::TEST`, relative to the root of the repository, with or without parameters in brackets.

    Returns:
        The tier, or None where the folder has none.
    """
    file, _, test = node_id.partition("::")
    exception = EXCEPTIONS.get(f"{file}::{test.partition('[')[0]}") or EXCEPTIONS.get(file)
    return exception or _TIER_OF_FOLDER.get(file.rpartition("/")[0])
