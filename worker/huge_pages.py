"""Files in huge pages: mappings at addresses that allow them, and their request.

A huge page takes one entry in the processor's table of pages instead of 512, and one page fault. The kernel uses it
only where address and place in the file are multiples of its size, so `AlignedMap` chooses the address.

In a file of tmpfs, `fill` touches one page of each piece of 2 MiB, and then asks the kernel to make the piece a huge
page (MADV_COLLAPSE, since Linux 6.1). This needs no privilege, and does not depend on the `huge=` that the file system
was mounted with. The kernel refuses it if `shmem_enabled` is `deny`, or if the process opted out. Older kernels give
the touched piece a huge page if the mount has `huge=`.

A file of hugetlbfs has huge pages of a pool that the administrator has reserved, and no others.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20  # a huge page on x86-64, and on ARM with pages of 4 KiB
STRIDE_BYTES = 64 << 20  # bytes of one request
AGAIN_MAX = 4  # requests for a stride with a held page
REFUSALS_MAX = 8  # the kernel may search all memory before it refuses
TMPFS, HUGETLBFS = "tmpfs", "hugetlbfs"
_FILE_SYSTEMS = {0x01021994: TMPFS, 0x958458F6: HUGETLBFS}
_STATFS_BYTES = 256  # more than the structure has on any architecture
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_STATUS = Path("/proc/self/status")
_LIBC = ctypes.CDLL(None, use_errno=True)


class AlignedMap:
    """A shared mapping of a whole file, at a multiple of the size of a huge page where the system allows it.

    Args:
        fd: The file.
        size: Its size in bytes.

    Attributes:
        octets: [size] uint8, the file.

    Raises:
        OSError: The file cannot be mapped: ENOMEM on hugetlbfs if its pool has too few pages.
    """

    def __init__(self, fd: int, size: int) -> None:
        mapped = _map_aligned(fd, size, max(HUGE_BYTES, _piece_bytes(), page_bytes(fd)))
        self._map, at = mapped if mapped is not None else (mmap.mmap(fd, size), 0)
        self.octets: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)[at : at + size]

    @property
    def address(self) -> int:
        """The address of the file's first byte."""
        return self.octets.ctypes.data

    def close(self) -> None:
        """Unmap the file.

        Raises:
            BufferError: Another object has a view.
        """
        self.octets = np.zeros(0, np.uint8)
        self._map.close()


def file_system_of(fd: int) -> str:
    """Return `tmpfs` or `hugetlbfs` for a file in one of these, else ""."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.fstatfs(fd, found):
        return ""
    return _FILE_SYSTEMS.get(ctypes.c_ulong.from_buffer(found).value & 0xFFFFFFFF, "")


def page_bytes(fd: int) -> int:
    """Return the unit of a file's size in bytes: a huge page on hugetlbfs, else 1."""
    return os.fstatvfs(fd).f_bsize if file_system_of(fd) == HUGETLBFS else 1


def fill(fd: int, mapped: AlignedMap, wanted: bool = True) -> str:
    """Allocate all memory of an empty file, in huge pages where the system gives them.

    Args:
        fd: The file, which has its size.
        mapped: It as a whole.
        wanted: Whether huge pages are asked for. A file of hugetlbfs has no others.

    Returns:
        Why some memory may not be in huge pages, with the remedy; "" if the kernel refused nothing.

    Raises:
        OSError: There is not enough memory.
    """
    size, kind, problem = mapped.octets.nbytes, file_system_of(fd), ""
    if kind == HUGETLBFS:
        _advise(mapped.address, size, _MADV_POPULATE_WRITE)  # posix_fallocate does not follow a NUMA policy there
    elif not wanted:
        problem = "host_huge_pages is false"
    elif kind == TMPFS:
        problem = _collapse(mapped)
    else:
        problem = "the file is on a disk: name a folder in memory (tmpfs) as host_dir"
    os.posix_fallocate(fd, 0, size)
    return problem


def whole_pieces(size: int) -> int:
    """Return how many of so many bytes huge pages can hold in a file of tmpfs."""
    piece = _piece_bytes()
    return size // piece * piece if piece else 0


def _collapse(mapped: AlignedMap) -> str:
    """Make each whole piece of an empty file a huge page. Return why that failed, or ""."""
    piece, end, problem, refusals = _piece_bytes(), whole_pieces(mapped.octets.nbytes), "", 0
    if not end:
        return "the file is smaller than a huge page" if piece else "this kernel has no transparent huge pages"
    _advise(mapped.address, end, _MADV_HUGEPAGE)
    stride = -(-STRIDE_BYTES // piece) * piece
    for start in range(0, end, stride):
        there = range(start, min(start + stride, end), piece)
        if any(_advise(mapped.address + at, mmap.PAGESIZE, _MADV_POPULATE_WRITE) == errno.EFAULT for at in there):
            break  # the file system is full: posix_fallocate reports it
        if refusals < REFUSALS_MAX:
            code = _collapse_stride(mapped.address + start, len(there) * piece)
            if code:
                problem, refusals = _remedy(code), REFUSALS_MAX if code == errno.EINVAL else refusals + 1
    return problem


def _collapse_stride(address: int, size: int) -> int:
    """Make each piece of a stride a huge page. Return the error, 0 for none.

    EAGAIN means that a page is held for a moment (it is locked, or on a list of one CPU), and that the kernel has done
    the other pieces. The next call finds those done.
    """
    for _ in range(AGAIN_MAX):
        code = _advise(address, size, _MADV_COLLAPSE)
        if code != errno.EAGAIN:
            return code
    return code


def _remedy(code: int) -> str:
    """Return why the kernel refused huge pages, and the remedy."""
    if code == errno.ENOMEM:
        return (
            "no more huge pages are free, here or on its node: write 1 to /proc/sys/vm/compact_memory, remove the "
            "file, and start the worker again"
        )
    if code != errno.EINVAL:
        return os.strerror(code)
    place = _SETTINGS / "shmem_enabled"
    if "[deny]" in _text(place):
        return f"{place} is 'deny': write 'never' to it, remove the file, and start the worker again"
    if "THP_enabled:\t0" in _text(_STATUS):
        return "huge pages are disabled for this process (PR_SET_THP_DISABLE): start it without that setting"
    return "the kernel has no MADV_COLLAPSE (Linux 6.1): mount the folder with huge=within_size, and remove the file"


def _piece_bytes() -> int:
    """Return the bytes of a transparent huge page; 0 where the kernel has none."""
    return int(_text(_SETTINGS / "hpage_pmd_size") or 0)


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _advise(address: int, size: int, advice: int) -> int:
    """Return the error of madvise for these bytes, 0 for none."""
    call = _LIBC.madvise
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return ctypes.get_errno() if call(address, size, advice) else 0


def _map_aligned(fd: int, size: int, unit: int) -> tuple[mmap.mmap, int] | None:
    """Map a file over a part of a larger reservation of addresses, which begins at a multiple of `unit`.

    The standard library cannot choose an address, but unmaps whatever lies in its reservation.

    Returns:
        The reservation, and where in it the file begins; None if it is smaller than `unit`, or the system refuses.
    """
    if size < unit:
        return None
    try:
        area = mmap.mmap(-1, size + unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError:
        return None
    address = np.frombuffer(area, np.uint8).ctypes.data
    place = -(-address // unit) * unit
    call = _LIBC.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if call(place, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) != place:
        area.close()
        return None
    return area, place - address
