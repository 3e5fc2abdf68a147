"""Page-locking of host memory piece by piece: before serving, before a copy, in idle time; refusals and the end."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from kvforge.worker.device.host_memory import PAGE, LockedPieces
from tests.worker.device.registrar import FakeRegistrar

WAIT_S = 60.0


def memory_of(pages: int) -> npt.NDArray[np.uint8]:
    """Return memory on whole pages."""
    whole = np.zeros((pages + 1) * PAGE, np.uint8)
    at = -whole.ctypes.data % PAGE
    return whole[at : at + pages * PAGE]


def pieces_of(
    registrar: FakeRegistrar, pages: int = 8, block_bytes: int = PAGE // 2, piece: int = PAGE
) -> LockedPieces:
    memory = memory_of(pages)
    registrar.base = memory.ctypes.data
    pieces = LockedPieces(registrar, memory, block_bytes, piece)
    registrar.memory = memory  # outlives the pieces
    return pieces


# behaviour: pieces have whole blocks on whole pages, none overlaps another, and together they are all of the memory
@pytest.mark.parametrize("block_bytes", [256, 3 * 512, PAGE, PAGE + 1024, 3 * PAGE])
@pytest.mark.parametrize("piece", [1, PAGE, 5 * PAGE])
def test_pieces_have_whole_blocks_on_whole_pages(block_bytes: int, piece: int) -> None:
    registrar = FakeRegistrar()
    pieces = pieces_of(registrar, 3 * block_bytes // 64, block_bytes, piece)
    while pieces.lock_next():
        pass
    assert pieces.whole and pieces.piece_blocks * block_bytes % PAGE == 0
    assert pieces.piece_blocks * block_bytes >= piece
    ends = [at + size for at, size in registrar.calls]
    assert [at for at, _ in registrar.calls] == [0, *ends[:-1]] and ends[-1] == 3 * block_bytes // 64 * PAGE
    assert all(size == pieces.piece_blocks * block_bytes for _, size in registrar.calls[:-1])
    pieces.close()
    assert not registrar.locked


# behaviours: the thread locks in order, and ends with the piece that it is at; the rest is locked before its copies
def test_the_thread_ends_in_the_middle_and_the_rest_follows() -> None:
    registrar = FakeRegistrar(stop_at=2)
    pieces = pieces_of(registrar)
    pieces.begin_ahead()
    assert registrar.reached.wait(WAIT_S)
    ending = threading.Thread(target=pieces.end_ahead)
    ending.start()
    assert pieces._ending.wait(WAIT_S)
    registrar.go_on.set()
    ending.join(WAIT_S)
    assert not ending.is_alive() and registrar.places == [0, 1, 2] and registrar.entered == 1
    assert pieces.lock(np.array([0, 5, 13, 12, 9])) and registrar.places == [0, 1, 2, 4, 6]
    assert pieces.lock(np.array([13, 9])) and registrar.places == [0, 1, 2, 4, 6]
    assert pieces.lock_next() and registrar.places[-1] == 3
    assert pieces.lock_next() and registrar.places[-1] == 5
    assert not pieces.lock_next() and pieces.whole and registrar.places[-1] == 7
    assert not pieces.lock_next() and len(registrar.calls) == 8
    pieces.close()
    pieces.close()
    assert not registrar.locked and registrar.unlocked == 8


def test_a_thread_that_has_locked_all_ends_by_itself() -> None:
    registrar = FakeRegistrar()
    pieces = pieces_of(registrar)
    pieces.begin_ahead()
    thread = pieces._thread
    assert thread is not None
    thread.join(WAIT_S)
    pieces.end_ahead()
    assert pieces.whole and pieces.counts == (8, 8) and pieces.lock(np.arange(16)) and not pieces.lock_next()
    pieces.close()
    assert not registrar.locked


# behaviour: after a refusal nothing more is tried, and what is locked is unlocked at the end
@pytest.mark.parametrize("ahead", [True, False])
def test_nothing_is_tried_after_a_refusal(ahead: bool) -> None:
    registrar = FakeRegistrar(refused={3})
    pieces = pieces_of(registrar)
    if ahead:
        pieces.begin_ahead()
        thread = pieces._thread
        assert thread is not None
        thread.join(WAIT_S)
        pieces.end_ahead()
    else:
        assert pieces.lock(np.arange(6)) and not pieces.lock(np.array([7, 15]))
    assert pieces.problem == "refused" and registrar.places == [0, 1, 2, 3]
    assert not pieces.lock(np.array([0])) and not pieces.lock_next() and not pieces.whole
    assert registrar.places == [0, 1, 2, 3]
    pieces.close()
    assert not registrar.locked and registrar.unlocked == 3


def test_closing_ends_the_thread() -> None:
    registrar = FakeRegistrar(stop_at=0)
    pieces = pieces_of(registrar)
    pieces.begin_ahead()
    assert registrar.reached.wait(WAIT_S)
    closing = threading.Thread(target=pieces.close)
    closing.start()
    assert pieces._ending.wait(WAIT_S)
    registrar.go_on.set()
    closing.join(WAIT_S)
    assert registrar.places == [0] and not registrar.locked


# behaviour: where copies need no locked memory, nothing is locked
def test_without_a_registrar_everything_is_ready() -> None:
    pieces = LockedPieces(None, memory_of(2), 256)
    pieces.begin_ahead()
    pieces.end_ahead()
    assert pieces.whole and pieces.lock(np.arange(3)) and not pieces.lock_next() and not pieces.piece_blocks
    pieces.close()
