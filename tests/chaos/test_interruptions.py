"""Every process is killed and stopped early in a run, and a seed always draws the same faults."""

from __future__ import annotations

from itertools import islice

from tools.chaos.interruptions import COORDINATOR, DISK, KILL, STOP, TERM, draw

WORKERS, CLIENTS = ("w0", "w1"), ("p0", "p1", "p2")
KINDS = 18  # common kinds; each occurs once before any occurs twice


def test_each_kind_of_process_soon_dies_and_is_stopped() -> None:
    for seed in range(100):
        first = [interruption for _, interruption in islice(draw(seed, WORKERS, CLIENTS, 2.0, 10.0), KINDS)]
        seen = {(interruption.kind, member[0]) for interruption in first for member in interruption.members}
        assert seen >= {
            *((kind, member) for kind in (KILL, STOP) for member in "cgwp"),
            *((TERM, member) for member in "cgw"),
        }
        # The coordinator restarts while a worker is dead.
        assert any(interruption.down_s and COORDINATOR in interruption.members for interruption in first)


def test_processes_of_disk_tiers_are_killed_where_there_are_any() -> None:
    for seed in range(20):
        drawn = islice(draw(seed, WORKERS, CLIENTS, 2.0, 10.0, disks=True), KINDS + 1)
        killed = {member for _, each in drawn if each.kind == KILL for member in each.members}
        assert killed & {f"{worker}{DISK}" for worker in WORKERS}
        plain = islice(draw(seed, WORKERS, CLIENTS, 2.0, 10.0), 200)
        assert not any(member.endswith(DISK) for _, each in plain for member in each.members)


def test_the_same_seed_draws_the_same() -> None:
    first, again, other = (list(islice(draw(seed, WORKERS, CLIENTS, 2.0, 10.0), 40)) for seed in (1, 1, 2))
    assert first == again != other
    assert all(interruption.members[0] == COORDINATOR for _, interruption in first if interruption.down_s)


def test_a_longer_pause_draws_the_same_faults_further_apart() -> None:
    drawn = [list(islice(draw(3, WORKERS, CLIENTS, 2.0, 10.0, pause_s), 400)) for pause_s in (2.5, 10.0)]
    means = [sum(pause for pause, _ in each) / len(each) for each in drawn]
    assert all(abs(mean - wanted) < 0.15 * wanted for mean, wanted in zip(means, (2.5, 10.0), strict=True))
    assert [fault for _, fault in drawn[0]] == [fault for _, fault in drawn[1]]
