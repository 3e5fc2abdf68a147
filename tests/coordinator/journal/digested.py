"""python -m tests.coordinator.journal.digested FOLDER: prints the digest and the time of a journal's machine."""

from __future__ import annotations

import sys
from pathlib import Path

from kvforge.coordinator.journal.recovery import recover
from tools.simulation.digest import state_digest

if __name__ == "__main__":
    found = recover(Path(sys.argv[1]))
    assert found is not None
    found.machine.check_invariants()
    print(state_digest(found.machine), found.now_us)
