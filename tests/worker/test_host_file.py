"""The host file: what one process wrote the next one finds, unless anything that its meaning depends on differs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidConfiguration, WorkerError
from kvforge.worker import host_file
from kvforge.worker.host_file import PAGE, HostFile, find_file, host_path

LAYOUT, BLOCKS, SIZE = "layout", 5, 48


def opened(path: Path, layout: str = LAYOUT, blocks: int = BLOCKS, size: int = SIZE) -> HostFile:
    return HostFile(path, layout, blocks, size, lock_wait_s=0.0)


# behaviour: a successor maps the file and finds its content
def test_a_successor_finds_the_content_under_the_same_identity(tmp_path: Path) -> None:
    first = opened(tmp_path / "file")
    first.data[3], first.tags[3] = 7, (1 << 64) - 1
    identity, found = first.identity, first.found
    first.close()
    second = opened(tmp_path / "file")
    assert (found, second.found, second.identity) == (False, True, identity)
    assert (second.data[3] == 7).all() and second.tags.tolist() == [0, 0, 0, (1 << 64) - 1, 0]
    assert second.data.shape == (BLOCKS, SIZE)
    second.close()


# behaviour: another layout, size or boot of the host misses
@pytest.mark.parametrize("change", [{"layout": "other"}, {"blocks": 6}, {"size": 56}, {"boot": "other"}])
def test_a_file_of_another_layout_is_emptied_and_has_another_identity(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path / "file")
    first.tags[:], first.data[:] = 9, 9
    identity = first.identity
    first.close()
    if "boot" in change:
        monkeypatch.setattr(host_file, "_host_boot", lambda: "other")
    second = opened(tmp_path / "file", **{k: v for k, v in change.items() if k != "boot"})  # type: ignore[arg-type]
    assert second.identity != identity and not second.found
    assert not second.tags.any() and not second.data.any()
    second.close()


@pytest.mark.parametrize("at", [0, 8, 24, 40, 56, 64])
def test_a_damaged_head_makes_another_file(at: int, tmp_path: Path) -> None:
    first = opened(tmp_path / "file")
    identity = first.identity
    first.close()
    with (tmp_path / "file").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    second = opened(tmp_path / "file")
    assert second.identity != identity
    second.close()


# behaviour: the file of a version with another layout is not read as this one's
def test_a_file_of_an_earlier_layout_is_emptied(tmp_path: Path) -> None:
    first = opened(tmp_path / "file")
    first.tags[:], first.data[:] = 9, 9
    first.close()
    with (tmp_path / "file").open("r+b") as file:
        assert file.read(8) == b"kvfHost3"
        file.seek(0)
        file.write(b"kvfHost2")
    assert find_file(tmp_path / "file") is None
    second = opened(tmp_path / "file")
    assert not second.found and not second.tags.any() and not second.data.any()
    second.close()


def test_a_file_that_was_cut_off_is_another_one(tmp_path: Path) -> None:
    first = opened(tmp_path / "file")
    identity = first.identity
    first.close()
    os.truncate(tmp_path / "file", PAGE)
    second = opened(tmp_path / "file")
    assert second.identity != identity and second.data.shape == (BLOCKS, SIZE)
    second.close()


# behaviour: two processes never have one file
def test_a_file_that_another_process_has_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path / "file")
    with pytest.raises(WorkerError, match="another process still has the host file"):
        opened(tmp_path / "file")
    first.close()
    opened(tmp_path / "file").close()


def test_a_file_that_does_not_fit_is_refused_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _at: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidConfiguration, match=r"host_bytes.*No space left on device"):
        opened(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == 0


def test_a_link_is_not_followed_and_others_cannot_read_the_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(InvalidConfiguration, match="host_dir"):
        opened(tmp_path / "link")
    opened(tmp_path / "file").close()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "target").exists()


def test_each_worker_of_each_service_has_its_own_file(tmp_path: Path) -> None:
    paths = {host_path(str(tmp_path), Path(runtime), name) for runtime in ("/a", "/b") for name in ("w0", "w1")}
    assert len(paths) == 4 and {path.parent for path in paths} == {tmp_path}
    with pytest.raises(InvalidConfiguration, match="host_dir"):
        host_path(str(tmp_path / "none"), Path("/a"), "w0")


def test_tags_and_blocks_are_apart_on_their_pages(tmp_path: Path) -> None:
    file = opened(tmp_path / "file", blocks=600)
    file.tags[:], file.sums[:], file.data[:] = 1, 3, 2
    assert (tmp_path / "file").stat().st_size == PAGE + 2 * 2 * PAGE + 600 * SIZE
    whole = np.fromfile(tmp_path / "file", np.uint8)
    assert (whole[5 * PAGE :] == 2).all() and (whole[PAGE : PAGE + 4800].view(np.uint64) == 1).all()
    assert (whole[3 * PAGE : 3 * PAGE + 4800].view(np.uint64) == 3).all()
    file.close()


# behaviour: a file can be opened before its layout is known, by one process, and is then found with its content
def test_a_file_is_found_before_its_layout_is_known(tmp_path: Path) -> None:
    assert find_file(tmp_path / "file") is None
    first = opened(tmp_path / "file")
    first.tags[2], identity = 5, first.identity
    assert find_file(tmp_path / "file") is None, "a process has it"
    first.close()
    found = find_file(tmp_path / "file")
    assert found is not None and (found.blocks, found.block_bytes) == (BLOCKS, SIZE)
    assert found.fits(LAYOUT, BLOCKS, SIZE)
    assert not any((found.fits("other", BLOCKS, SIZE), found.fits(LAYOUT, 4, SIZE), found.fits(LAYOUT, BLOCKS, 56)))
    second = HostFile(tmp_path / "file", LAYOUT, BLOCKS, SIZE, opened=found)
    assert second.found and second.identity == identity and second.tags[2] == 5
    with pytest.raises(WorkerError, match="another process"):
        opened(tmp_path / "file")
    second.close()
    found = find_file(tmp_path / "file")
    assert found is not None
    found.close()
    opened(tmp_path / "file").close()


@pytest.mark.parametrize("at", [0, 56, 64])
def test_a_file_with_another_head_is_not_found(at: int, tmp_path: Path) -> None:
    opened(tmp_path / "file").close()
    with (tmp_path / "file").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert find_file(tmp_path / "file") is None
    opened(tmp_path / "file").close()
