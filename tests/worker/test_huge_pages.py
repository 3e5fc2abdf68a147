"""Files in huge pages: their addresses, the requests to the kernel, and its refusals."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.worker import host_file, huge_pages
from kvforge.worker.host_file import HostFile, MappedBlocks, find_file
from kvforge.worker.huge_pages import HUGE_BYTES, HUGETLBFS, TMPFS, AlignedMap, file_system_of, fill, page_bytes
from tests.worker.memory_files import MEMORY, kernel_huge_bytes, memory_file, memory_folder

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for as Linux has them"),
    pytest.mark.skipif(not Path(MEMORY).is_dir(), reason="there is no folder in memory"),
]

PR_SET_THP_DISABLE, MFD_HUGETLB = 41, 4
COLLAPSE, POPULATE = 25, 23


def settings(folder: Path, shmem: str = "always [never] deny") -> Path:
    """The settings of a kernel with huge pages of 2 MiB."""
    (folder / "hpage_pmd_size").write_text(f"{HUGE_BYTES}\n")
    (folder / "shmem_enabled").write_text(f"{shmem}\n")
    return folder


class Kernel:
    """Stands in for madvise: counts requests, and answers those for huge pages with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, collapse: int = 0, populate: int = 0) -> None:
        self._errors = {COLLAPSE: collapse, POPULATE: populate}
        self.calls: list[tuple[int, int, int]] = []
        monkeypatch.setattr(huge_pages, "_advise", self._advise)

    def _advise(self, address: int, size: int, advice: int) -> int:
        self.calls.append((address, size, advice))
        return self._errors.get(advice, 0)

    def asked(self, advice: int) -> list[tuple[int, int]]:
        """Where and for how many bytes something was asked."""
        return [(address, size) for address, size, given in self.calls if given == advice]


# behaviour: a whole file in memory is allocated, and the bytes in huge pages are those that the kernel counts
def test_a_file_in_memory_is_in_huge_pages_or_says_why_not() -> None:
    with memory_file(4, mmap.PAGESIZE) as (fd, mapped):
        assert file_system_of(fd) == TMPFS and page_bytes(fd) == 1
        problem = fill(fd, mapped)
        assert mapped.address % HUGE_BYTES == 0
        assert os.fstat(fd).st_blocks * 512 >= mapped.octets.nbytes
        assert not mapped.octets.any()
        mapped.octets[::HUGE_BYTES].max()
        found = kernel_huge_bytes(mapped.address)
        assert found == huge_pages.whole_pieces(mapped.octets.nbytes) or problem
        mapped.octets[-1] = 7
        assert os.pread(fd, 1, mapped.octets.nbytes - 1) == b"\7"


# behaviour: a process that opted out of huge pages gets small ones, with the reason
@pytest.mark.skipif(not huge_pages.whole_pieces(HUGE_BYTES), reason="the kernel has no transparent huge pages of 2 MiB")
def test_huge_pages_that_are_not_wanted_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch)
    with memory_file(4, mmap.PAGESIZE) as (fd, mapped):
        assert fill(fd, mapped, False) == "host_huge_pages is false"
        assert kernel.calls == [] and os.fstat(fd).st_blocks * 512 >= mapped.octets.nbytes


def test_a_process_without_huge_pages_says_so() -> None:
    control = ctypes.CDLL(None).prctl
    assert control(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        with memory_file(2) as (fd, mapped):
            problem = fill(fd, mapped)
            assert kernel_huge_bytes(mapped.address) == 0
            assert os.fstat(fd).st_blocks * 512 == mapped.octets.nbytes
    finally:
        assert control(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0
    denied = "[deny]" in (huge_pages._SETTINGS / "shmem_enabled").read_text()
    assert ("'deny'" if denied else "PR_SET_THP_DISABLE") in problem


@pytest.mark.parametrize(
    ("shmem", "code", "words"),
    [
        ("never [deny]", errno.EINVAL, "is 'deny': write 'never' to it"),
        ("[never] deny", errno.EINVAL, "mount the folder with huge=within_size"),
        (
            "[never] deny",
            errno.ENOMEM,
            "here or on its node: write 1 to /proc/sys/vm/compact_memory",
        ),
        ("[never] deny", errno.EAGAIN, "unavailable"),
    ],
)
def test_a_refusal_names_its_reason_and_leaves_a_whole_file(
    shmem: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", settings(tmp_path, shmem))
    monkeypatch.setattr(huge_pages, "_STATUS", tmp_path / "none")
    with memory_file(3) as (fd, mapped):
        Kernel(monkeypatch, collapse=code)
        assert words in fill(fd, mapped)
        assert os.fstat(fd).st_blocks * 512 == mapped.octets.nbytes


# behaviour: each piece has a page before it is asked for; a kernel that refuses for good is asked once, one that is
# short of memory a few times
@pytest.mark.parametrize(("code", "times"), [(0, 6), (errno.EINVAL, 1), (errno.ENOMEM, 2)])
def test_requests_for_huge_pages(code: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", settings(tmp_path))
    monkeypatch.setattr(huge_pages, "STRIDE_BYTES", 2 * HUGE_BYTES)
    monkeypatch.setattr(huge_pages, "REFUSALS_MAX", 2)
    with memory_file(11, 4096) as (fd, mapped):
        kernel = Kernel(monkeypatch, collapse=code)
        fill(fd, mapped)
        strides = [(mapped.address + 2 * at * HUGE_BYTES, (1 if at == 5 else 2) * HUGE_BYTES) for at in range(6)]
        assert kernel.asked(COLLAPSE) == strides[:times]
        assert [at - mapped.address for at, _ in kernel.asked(POPULATE)] == [at * HUGE_BYTES for at in range(11)]
        first = kernel.calls.index((*strides[0], COLLAPSE))
        assert all(call[2] != COLLAPSE for call in kernel.calls[:first]) and first >= 2


# behaviour: a page that is held for a moment costs no huge page: the kernel is asked again, four times in all
@pytest.mark.parametrize(("refusals", "requests"), [(1, 7), (3, 9), (9, 9)])
def test_a_page_that_is_held_for_a_moment(
    refusals: int, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", settings(tmp_path))
    monkeypatch.setattr(huge_pages, "STRIDE_BYTES", 2 * HUGE_BYTES)
    with memory_file(11, 4096) as (fd, mapped):
        kernel = Kernel(monkeypatch)
        held = mapped.address + 4 * HUGE_BYTES  # the third of six strides
        answer = kernel._advise

        def advise(address: int, size: int, advice: int) -> int:
            answer(address, size, advice)
            times = [at for at, _ in kernel.asked(COLLAPSE)].count(held)
            return errno.EAGAIN if advice == COLLAPSE and address == held and times <= refusals else 0

        monkeypatch.setattr(huge_pages, "_advise", advise)
        assert fill(fd, mapped) == ("" if refusals < 4 else os.strerror(errno.EAGAIN))
        assert len(kernel.asked(COLLAPSE)) == requests


def test_a_full_file_system_is_reported_and_gives_the_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _at: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huge_pages, "_SETTINGS", settings(tmp_path))
    kernel = Kernel(monkeypatch, populate=errno.EFAULT)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with memory_folder() as folder:
        with pytest.raises(InvalidConfiguration, match=r"host_bytes.*No space left on device; lower it"):
            HostFile(folder / "file", "layout", 70, 1 << 20, lock_wait_s=0.0)
        assert (folder / "file").stat().st_size == 0
    assert len(kernel.asked(POPULATE)) == 1 and not kernel.asked(COLLAPSE)


def test_a_kernel_without_huge_pages_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    with memory_file(2) as (fd, mapped):
        kernel = Kernel(monkeypatch)
        assert fill(fd, mapped) == "this kernel has no transparent huge pages"
        assert not kernel.calls and os.fstat(fd).st_blocks * 512 == mapped.octets.nbytes


def test_a_file_below_a_huge_page_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", settings(tmp_path))
    with memory_file(0, 8192) as (fd, mapped):
        assert fill(fd, mapped) == "the file is smaller than a huge page"
        assert mapped.octets.nbytes == 8192


# behaviour: where no addresses can be reserved, the file is mapped at any address
def test_a_refused_reservation_leaves_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_map_aligned", lambda *_: None)
    with memory_file(2) as (fd, mapped):
        mapped.octets[HUGE_BYTES] = 5
        assert os.pread(fd, 1, HUGE_BYTES) == b"\5" and mapped.octets.nbytes == 2 * HUGE_BYTES


# behaviour: a mapping with a view is not unmapped, so that no view can read memory of others
def test_a_mapping_with_a_view_stays() -> None:
    with memory_file(2) as (fd, mapped):
        mapped.octets[3] = 9
        view = mapped.octets[2:5]
        with pytest.raises(BufferError):
            mapped.close()
        assert view.tolist() == [0, 9, 0]
        del view
        assert os.pread(fd, 1, 3) == b"\t"


# behaviour: blocks from 64 MiB on begin with a huge page, also for a successor
def test_the_blocks_of_a_large_file_begin_with_a_huge_page() -> None:
    with memory_folder() as folder:
        for found in (False, True):
            file = HostFile(folder / "file", "layout", 65, 1 << 20, lock_wait_s=0.0)
            assert file.found == found and file.memory.ctypes.data % HUGE_BYTES == 0
            assert (folder / "file").stat().st_size == 68 << 20, "2 MiB before the blocks, the last MiB filled up"
            assert (file.data[64] == (5 if found else 0)).all()
            file.data[64], file.sums[64], file.tags[64] = 5, 2, 3
            assert (file.whole.nbytes, file.memory.nbytes) == (68 << 20, 65 << 20)
            file.close()
        raw = np.fromfile(folder / "file", np.uint8)
        assert (raw[66 << 20 : 67 << 20] == 5).all() and not raw[67 << 20 :].any()


# behaviour: on hugetlbfs a file of any size ends with a huge page, and its successor finds it
def test_a_file_that_grows_by_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "page_bytes", lambda _fd: HUGE_BYTES)
    monkeypatch.setattr(os, "pwrite", None)  # it has none
    with memory_folder() as folder:
        first = HostFile(folder / "file", "layout", 5, 48, lock_wait_s=0.0)
        first.data[4], first.tags[4] = 3, 8
        identity = first.identity
        first.close()
        assert (folder / "file").stat().st_size == HUGE_BYTES
        found = find_file(folder / "file")
        assert found is not None and found.fits("layout", 5, 48)
        second = HostFile(folder / "file", "layout", 5, 48, opened=found)
        assert second.identity == identity and (second.data[4] == 3).all() and second.tags[4] == 8
        second.close()


def hugetlb_file() -> int:
    try:
        return os.memfd_create("kvforge-test", MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"the kernel has no huge pages of a pool: {error.strerror}")


def test_a_pool_with_too_few_huge_pages_is_an_error_with_its_remedy() -> None:
    fd, blocks = hugetlb_file(), 1 << 20  # 1 TiB
    each = page_bytes(fd)
    assert file_system_of(fd) == HUGETLBFS and each >= HUGE_BYTES
    path, size = Path("/huge/file"), host_file.Layout.of(blocks, 1 << 20, each).size
    host_file._empty(fd, path, size)
    words = rf"host_bytes.*{size} bytes cannot be reserved in /huge: .*raise vm.nr_hugepages by {size // each} pages"
    with pytest.raises(InvalidConfiguration, match=words):
        host_file._map(fd, path, blocks, 1 << 20)
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_a_file_of_a_pool_of_huge_pages() -> None:
    fd = hugetlb_file()
    each = page_bytes(fd)
    os.ftruncate(fd, each)
    try:
        mapped = AlignedMap(fd, each)
    except OSError:
        os.close(fd)
        pytest.skip("the pool has no free huge page")
    assert fill(fd, mapped) == "" and kernel_huge_bytes(mapped.address) == each
    mapped.close()
    blocks = MappedBlocks(fd, 5, 48)
    blocks.write_head(b"head")
    blocks.data[4], blocks.tags[1] = 6, 9
    assert os.pread(fd, 4, 0) == b"head" and os.fstat(fd).st_size == each
    blocks.close()
    os.close(fd)
