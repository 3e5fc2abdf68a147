"""Release of mapped file pages: read pages are released, written ones are kept."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvforge.worker.device.device import Device
from kvforge.worker.device.file_pages import Mapping, mappings, release_library_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")

PAGE = mmap.PAGESIZE
CODE, NUMBERS = mmap.PROT_READ | mmap.PROT_EXEC, mmap.PROT_READ | mmap.PROT_WRITE


def mapped(path: Path) -> list[Mapping]:
    return [mapping for mapping in mappings() if mapping.path == str(path)]


@contextmanager
def library(path: Path) -> Iterator[tuple[mmap.mmap, mmap.mmap]]:
    """A file of two pages, mapped as by a loader: the first is executable; the second was written and then made
    read-only."""
    path.write_bytes(b"c" * PAGE + b"n" * PAGE)
    with path.open("rb") as file:
        code = mmap.mmap(file.fileno(), PAGE, flags=mmap.MAP_PRIVATE, prot=CODE)
        numbers = mmap.mmap(file.fileno(), PAGE, flags=mmap.MAP_PRIVATE, prot=NUMBERS, offset=PAGE)
    numbers[:9] = b"relocated"
    place = ctypes.c_char.from_buffer(numbers)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(ctypes.addressof(place), PAGE, mmap.PROT_READ) == 0
    del place
    assert code[:4] == b"cccc"
    try:
        yield code, numbers
    finally:
        code.close()
        numbers.close()


def test_what_was_written_before_it_became_read_only_stays(tmp_path: Path) -> None:
    """A library's addresses are relocated and then protected: releasing them causes a segmentation fault."""
    path = tmp_path / "library.so"
    with library(path) as (code, numbers):
        assert [(each.permissions, each.resident, each.own) for each in sorted(mapped(path), key=lambda m: m.own)] == [
            ("r-xp", PAGE, 0),
            ("r--p", PAGE, PAGE),
        ]
        assert release_library_pages() >= PAGE
        assert {each.permissions: each.resident for each in mapped(path)} == {"r-xp": 0, "r--p": PAGE}
        assert numbers[:12] == b"relocatednnn" and code[:4] == b"cccc"


def test_a_file_without_a_name_stays(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    with library(path):
        path.unlink()
        release_library_pages()
        gone = [each for each in mappings() if each.path.startswith(str(path))]
        assert sum(each.resident for each in gone) == 2 * PAGE


def test_a_file_that_is_no_library_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"w" * PAGE)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), PAGE, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as weights,
    ):
        assert weights[:1] == b"w"
        release_library_pages()
        assert [each.resident for each in mapped(path)] == [PAGE]


def test_torch_computes_as_before(cpu: Device) -> None:
    x = torch.arange(12.0).view(3, 4)
    before = x @ x.t()
    assert cpu.release_libraries() > 1 << 20
    assert torch.equal(x @ x.t(), before)
    assert cpu.release_libraries() > 0  # the used pages came back


def test_nothing_is_released_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/self/smaps")

    monkeypatch.setattr(Path, "read_text", missing)
    assert release_library_pages() == 0
