"""python -m tests.coordinator.journal.stored: rewrites tests/data/journal after STATE_VERSION was raised.

The data are a journal of a simulated world and a snapshot from its middle, written by this version of the state, with
the digest of the state after some numbers of records. A change that yields a different state, or that cannot read these
files, needs a new state version; otherwise the next release would continue a running service from a wrong state.

tests/data/snapshots keeps the snapshot under its version, beside the previous version's; both must stay readable.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from kvforge.coordinator.journal.entries import STATE_VERSION
from kvforge.coordinator.journal.identity import ACKNOWLEDGED
from kvforge.coordinator.journal.log import SEGMENT, segments, states
from kvforge.coordinator.journal.recovery import Recovered, recover
from tests.coordinator.journal.files import acknowledge, records_of
from tests.coordinator.journal.test_recovery import cut_by_a_snapshot, lived
from tools.simulation.digest import state_digest

FOLDER = Path(__file__).parents[2] / "data" / "journal"
SNAPSHOTS = Path(__file__).parents[2] / "data" / "snapshots"  # snapshots of this version and the previous one
SEED, DIGESTS = 6, 8
WHOLE, FACTS = "records.gz", "digests.json"


def unpacked(folder: Path, names: dict[str, str]) -> None:
    """Unpack stored files under other names."""
    folder.mkdir(parents=True)
    for stored, name in names.items():
        (folder / name).write_bytes(gzip.decompress((FOLDER / stored).read_bytes()))


def after(records: int, folder: Path) -> str:
    """The digest of the state after the first `records` records of the stored journal."""
    unpacked(folder, {WHOLE: SEGMENT.format(1)})
    path = folder / SEGMENT.format(1)
    last = records_of(path)[records - 1]
    path.write_bytes(path.read_bytes()[: last.end])
    acknowledge(folder, last)
    return digest_of(recover(folder))


def digest_of(found: Recovered | None) -> str:
    """The digest of the recovered state."""
    assert found is not None
    found.machine.check_invariants()
    return state_digest(found.machine)


def main() -> int:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="kvf-") as made:
        folder = Path(made)
        lived(SEED, folder)
        (path,) = segments(folder / "journal").values()
        records = len(records_of(path))
        cut = cut_by_a_snapshot(folder / "journal", records // 2)
        (FOLDER / WHOLE).write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        for part in (*states(cut).values(), *segments(cut).values(), cut / ACKNOWLEDGED):
            (FOLDER / f"{part.name}.gz").write_bytes(gzip.compress(part.read_bytes(), mtime=0))
        counts = [records * (i + 1) // DIGESTS for i in range(DIGESTS)]
        digests = {str(count): after(count, folder / str(count)) for count in counts}
        (snapshot,) = states(cut).values()
        SNAPSHOTS.mkdir(exist_ok=True)
        (SNAPSHOTS / f"{STATE_VERSION}.gz").write_bytes(gzip.compress(snapshot.read_bytes(), mtime=0))
    for old in SNAPSHOTS.iterdir():
        if int(old.stem) < STATE_VERSION - 1:
            old.unlink()
    facts = {"state_version": STATE_VERSION, "digest_after_records": digests}
    (FOLDER / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
