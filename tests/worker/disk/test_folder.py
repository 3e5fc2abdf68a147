"""The folder of the disk tier: one process has it, and all identities together keep its bound."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidConfiguration, WorkerError
from kvforge.worker.disk.folder import USED, DiskFolder
from kvforge.worker.disk.records import Entry
from kvforge.worker.disk.sealing import Sealer, read_key
from kvforge.worker.disk.segments import Geometry, Segments

GEOMETRY = Geometry(block_bytes=40, block_tokens=4, segment_bytes=3 * 4096)
SLOTS = GEOMETRY.slots


def fill(store: Segments, slot: int) -> None:
    store.write(slot, Entry(slot + 1, 3, True, bytes(16)), 0, np.zeros(40, np.uint8))


def opened(folder: DiskFolder, layout: str, segments: int = 2, at: int = 0) -> Segments:
    store = folder.open(layout, GEOMETRY, segments * GEOMETRY.size)
    if at:
        os.utime(store.folder / USED, (at, at))
    return store


def names(root: Path) -> set[str]:
    return {path.parent.name for path in root.rglob("segment-*")}


# behaviour: another model's blocks are never read, and its folder waits for its return
def test_identities_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "gpu0")
    one = opened(folder, "one")
    fill(one, 0)
    assert opened(folder, "two").recover().records == {}
    assert set(opened(folder, "one").recover().records) == {0}
    assert folder.open("one", GEOMETRY, 1 << 20, Sealer(bytes(32))).recover().records == {}
    folder.close()


# behaviour: the least recently used identities give way, and not before space is needed
def test_the_bound_holds_for_all_identities_together(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "gpu0")
    kept = {}
    for at, layout in enumerate(("one", "two"), 1):
        fill(opened(folder, layout, at=at), 0)
        kept[layout] = names(tmp_path) - set().union(*kept.values())
    store = opened(folder, "three", segments=3, at=3)
    assert names(tmp_path) == kept["one"] | kept["two"]
    fill(store, 0)
    assert names(tmp_path) == kept["one"] | kept["two"] | {store.folder.name}
    fill(store, SLOTS)
    assert names(tmp_path) == kept["two"] | {store.folder.name}
    fill(store, 2 * SLOTS)
    assert names(tmp_path) == {store.folder.name}


def test_a_lower_bound_deletes_at_the_start(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "gpu0")
    store = opened(folder, "one", at=1)
    fill(store, 0)
    fill(store, SLOTS)
    opened(folder, "two", segments=1)
    assert names(tmp_path) == set()


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, "gpu0")
    with pytest.raises(WorkerError, match="another process still has"):
        DiskFolder(tmp_path, "gpu0", lock_wait_s=0.0)
    DiskFolder(tmp_path, "gpu1", lock_wait_s=0.0).close()
    folder.close()
    DiskFolder(tmp_path, "gpu0", lock_wait_s=0.0).close()


def test_bad_settings_are_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"disk_dir.*is no folder: create it"):
        DiskFolder(tmp_path / "none", "gpu0")
    folder = DiskFolder(tmp_path, "gpu0")
    with pytest.raises(InvalidConfiguration, match=r"disk_bytes.*100 bytes hold no segment; one takes"):
        folder.open("one", GEOMETRY, 100)
    folder.close()


def test_a_key_file_holds_64_hex_digits_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"{bytes(range(32)).hex()}\n")
    path.chmod(0o600)
    assert read_key(str(path)) == bytes(range(32)) and read_key("") == b""
    path.chmod(0o640)
    with pytest.raises(InvalidConfiguration, match=r"disk_key_file.*mode 0640\): chmod 600"):
        read_key(str(path))
    path.chmod(0o600)
    path.write_text("00")
    with pytest.raises(InvalidConfiguration, match=r"does not hold 64 hex digits: write a key"):
        read_key(str(path))
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        read_key(str(tmp_path / "none"))
