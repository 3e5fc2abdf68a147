"""This code reads a stored journal and rebuilds the same state, or has a higher STATE_VERSION."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvforge.coordinator.journal.entries import SNAPSHOTS_SINCE, STATE_VERSION
from kvforge.coordinator.journal.recovery import recover
from kvforge.coordinator.journal.snapshot import Snapshot
from tests.coordinator.journal.stored import FACTS, FOLDER, SNAPSHOTS, after, digest_of, unpacked

STORED = json.loads((FOLDER / FACTS).read_text())
DIGESTS: dict[str, str] = STORED["digest_after_records"]
ANEW = "rewrite tests/data/journal: python -m tests.coordinator.journal.stored"
OTHERWISE = "the same events now yield a different state: raise STATE_VERSION in coordinator/journal/entries.py, and "


def test_it_is_of_this_version() -> None:
    stored = STORED["state_version"]
    assert stored == STATE_VERSION, f"the state is of version {STATE_VERSION}, tests/data/journal of {stored}: {ANEW}"


@pytest.mark.parametrize("records", DIGESTS)
def test_its_events_make_the_state_that_they_made_when_it_was_written(records: str, tmp_path: Path) -> None:
    assert after(int(records), tmp_path / "journal") == DIGESTS[records], OTHERWISE + ANEW


def test_so_does_a_snapshot_of_the_middle_of_it_with_the_events_behind_it(tmp_path: Path) -> None:
    parts = [path.name for path in FOLDER.iterdir() if path.name.startswith(("state-", "records-0", "acknowledged"))]
    assert len(parts) == 3
    unpacked(tmp_path / "journal", {name: name.removesuffix(".gz") for name in parts})
    assert digest_of(recover(tmp_path / "journal")) == list(DIGESTS.values())[-1], OTHERWISE + ANEW


@pytest.mark.parametrize("version", range(max(SNAPSHOTS_SINCE, STATE_VERSION - 1), STATE_VERSION + 1))
def test_a_snapshot_of_this_version_and_of_the_one_before_is_read(version: int, tmp_path: Path) -> None:
    path = tmp_path / "state-0000000000000120"
    path.write_bytes(gzip.decompress((SNAPSHOTS / f"{version}.gz").read_bytes()))
    snapshot = Snapshot(path)
    assert snapshot.head.version == version
    machine = snapshot.machine()
    machine.check_invariants()
    assert machine.requests.accepted_total > 0 and machine.cache.groups
