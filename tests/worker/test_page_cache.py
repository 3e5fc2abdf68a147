"""Files that are read into the page cache before the load, within the memory that is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvforge.worker import page_cache
from kvforge.worker.page_cache import PageCacheReader, is_cached, memory_available

SEGMENT = 1 << 16


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with two files of three and two segments, and one that holds no weights."""
    monkeypatch.setattr(page_cache, "SEGMENT_BYTES", SEGMENT)
    (tmp_path / "a.safetensors").write_bytes(b"x" * (2 * SEGMENT + 5))
    (tmp_path / "b.safetensors").write_bytes(b"y" * (2 * SEGMENT))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offsets and bytes that the system is asked to read; nothing is in the page cache."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(page_cache, "is_cached", lambda *_: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, offset, size, _how: found.append((offset, size)))
    return found


def read(model: Path, available: int = 1 << 30) -> PageCacheReader:
    reader = PageCacheReader(model, available)
    reader.start()
    reader.wait()
    return reader


def test_every_byte_of_the_weights_is_asked_for_once(model: Path, asked: list[tuple[int, int]]) -> None:
    assert read(model).asked_bytes == 4 * SEGMENT + 5
    wanted = [(0, SEGMENT), (0, SEGMENT), (SEGMENT, SEGMENT), (SEGMENT, SEGMENT), (2 * SEGMENT, 5)]
    assert sorted(asked) == wanted
    asked.clear()
    read(model / "b.safetensors")
    assert sorted(asked) == [(0, SEGMENT), (SEGMENT, SEGMENT)]


def test_what_is_in_memory_is_left_alone(
    model: Path, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "is_cached", lambda _file, offset: offset != SEGMENT)
    assert read(model).asked_bytes == 2 * SEGMENT
    assert asked == [(SEGMENT, SEGMENT)] * 2


def test_no_more_is_read_than_half_of_the_available_memory(model: Path, asked: list[tuple[int, int]]) -> None:
    assert read(model, available=7 * SEGMENT).asked_bytes == 3 * SEGMENT + 5
    assert read(model, available=0).asked_bytes == 0


def test_a_file_that_cannot_be_read_is_left_to_the_load(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise PermissionError("planted")

    monkeypatch.setattr(os, "open", fail)
    assert read(model).asked_bytes == 0


def test_it_can_be_stopped(model: Path, asked: list[tuple[int, int]]) -> None:
    reader = PageCacheReader(model, 1 << 30)
    reader.stop()
    reader.start()
    reader.wait()
    assert asked == []


def test_a_file_that_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    """Where the file system answers at all: both answers only cost time."""
    file = tmp_path / "new"
    file.write_bytes(b"z" * 4096)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert is_cached(descriptor, 0) in (True, False)
        assert not is_cached(descriptor, 1 << 30), "past its end"
    finally:
        os.close(descriptor)
    assert memory_available() > 0
