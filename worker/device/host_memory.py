"""Host memory that was not allocated for the device, page-locked piece by piece so that the device copies directly.

The driver takes about 90 ms to lock 1 GiB. So a worker begins while it starts, in a thread that ends before it serves
(`begin_ahead`, `end_ahead`); graphs are captured meanwhile in the mode that other threads do not disturb. Pieces that
are left then are locked before their first copy, or while the worker has nothing to do. A piece is locked once and
stays locked until `close`, so none changes while a copy uses it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .device import Device

PIECE_BYTES = 32 << 20  # about 3 ms
PAGE = 4096
Indices = npt.NDArray[np.int64]


class Registrar(Protocol):
    """Locks and unlocks memory for a device."""

    def enter_thread(self) -> None:
        """Prepare another thread for `register`."""

    def register(self, address: int, size: int) -> str:
        """Lock memory; return why that was refused, or ""."""

    def unregister(self, address: int) -> None:
        """Unlock memory that `register` locked."""


class DeviceRegistrar:
    """Registers memory with the driver of a GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def enter_thread(self) -> None:
        """See `Registrar`."""
        self._device.enter_thread()

    def register(self, address: int, size: int) -> str:
        """See `Registrar`. The call does not hold Python's lock."""
        runtime: Any = torch.cuda.cudart()
        result = int(runtime.cudaHostRegister(address, size, 0))
        if not result:
            return ""
        with contextlib.suppress(RuntimeError):  # the next launch reports the refusal once more, and clears it
            torch.zeros(1, device=self._device.torch_device)
        return f"cudaHostRegister of {size} bytes failed with error {result}"

    def unregister(self, address: int) -> None:
        """See `Registrar`."""
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)


def registrar_of(device: Device) -> Registrar | None:
    """Return what locks memory for a device; None where copies need no locked memory."""
    return DeviceRegistrar(device) if device.queues else None


class LockedPieces:
    """Blocks in memory that is page-locked piece by piece. A piece has whole blocks on whole pages.

    Args:
        registrar: Locks a piece; None: nothing needs to be locked.
        memory: [blocks * block_bytes] uint8 on whole pages, contiguous. It must outlive this object.
        block_bytes: Bytes of a block.
        piece_bytes: A piece has at least this much, except the last one.

    Attributes:
        piece_blocks: Blocks of a piece; 0 where nothing needs to be locked.
        problem: Why a piece was refused, "" if none was. No more are tried then.
    """

    def __init__(
        self,
        registrar: Registrar | None,
        memory: npt.NDArray[np.uint8],
        block_bytes: int,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._registrar, self._address, self._bytes = registrar, memory.ctypes.data, memory.nbytes
        step = PAGE // np.gcd(block_bytes, PAGE).item()  # so many blocks end with a page
        blocks = -(-piece_bytes // (step * block_bytes)) * step
        self.piece_blocks = blocks if registrar is not None else 0
        self._piece_bytes = blocks * block_bytes
        self._pieces = -(-self._bytes // self._piece_bytes) if registrar is not None else 0
        self._locked: set[int] = set()
        self._first_open = 0  # all pieces before it are locked
        self.problem = ""
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @property
    def whole(self) -> bool:
        """Whether all pieces are locked."""
        return len(self._locked) == self._pieces

    @property
    def counts(self) -> tuple[int, int]:
        """The number of locked pieces, and of all."""
        return len(self._locked), self._pieces

    # -------------------------------------------------------------------------------------------------- before serving

    def begin_ahead(self) -> None:
        """Lock pieces in order in a thread, until `end_ahead`. Until then nothing else may be called."""
        if self._registrar is not None:
            self._thread = threading.Thread(target=self._run_ahead, name="page-locking", daemon=True)
            self._thread.start()

    def end_ahead(self) -> bool:
        """End the thread, which finishes its piece first. Return whether there was one."""
        self._ending.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None

    def _run_ahead(self) -> None:
        assert self._registrar is not None
        self._registrar.enter_thread()
        while not self._ending.is_set() and self._lock_next():
            pass

    # --------------------------------------------------------------------------------------------------- while serving

    def lock(self, blocks: Indices) -> bool:
        """Lock the pieces of some blocks, [n]. Return whether the device can copy from and to all these blocks."""
        if self.problem:
            return False
        if not self.whole:
            for piece in np.unique(blocks // self.piece_blocks).tolist():
                if piece not in self._locked and not self._lock_piece(piece):
                    return False
        return True

    def lock_next(self) -> bool:
        """Lock a piece that is not locked yet. Return whether there is another one."""
        return self._lock_next() and not self.whole

    def close(self) -> None:
        """Unlock everything. No copy may be under way. Closing twice is harmless."""
        self.end_ahead()
        while self._locked and self._registrar is not None:
            self._registrar.unregister(self._address + self._locked.pop() * self._piece_bytes)

    def _lock_next(self) -> bool:
        """Lock the first open piece. Return False if there is none, or if it was refused."""
        while self._first_open in self._locked:
            self._first_open += 1
        return not self.problem and self._first_open < self._pieces and self._lock_piece(self._first_open)

    def _lock_piece(self, piece: int) -> bool:
        """Lock a piece; return whether that was possible."""
        assert self._registrar is not None and piece not in self._locked
        at = piece * self._piece_bytes
        self.problem = self._registrar.register(self._address + at, min(self._piece_bytes, self._bytes - at))
        if self.problem:
            return False
        self._locked.add(piece)
        return True
