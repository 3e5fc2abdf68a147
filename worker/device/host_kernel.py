"""Kernels that run on the CPU: compiled by Numba once, kept on disk, and run by torch's own threads.

A kernel is a function of one address, where its arguments lie: an int64 that counts the tickets taken, one that counts
the threads that came, then what `host_kernel` was told of. Its threads take tickets until there are none left (see
`vector.take_ticket`), so it does not matter how many there are, and a thread that is late holds up nobody.

There is one pool of threads in the process: the kernel is called by the OpenMP library that torch is linked with
(`GOMP_parallel`, which LLVM's and Intel's have too), so the threads are those that just did a product. A pool of
Numba's own would fight them for the cores.

Law: a kernel is made of its own file, of vector.py and rows.py; what is kept is found by these files' contents.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvforge.models.code_cache import code_folder
from kvforge.protocol.errors import KvforgeError

CAPABILITIES = ("AVX2", "AVX512")  # of a CPU, as torch calls them
SHARED_FILES = ("vector.py", "rows.py", "host_kernel.py")
OPTIONS = {"error_model": "numpy"}  # nothing is raised: a kernel has nobody to tell
log = logging.getLogger("worker")


def host_kernel_problem() -> str:
    """Why this process cannot run such kernels; "" where it can."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in CAPABILITIES:
        return f"kernels are compiled for AVX2 and AVX-512, this CPU has {capability}"
    try:
        import_module("numba")
    except ImportError as error:  # not there, or it refuses this numpy
        return f"Numba cannot be imported: {error}"
    return ""


class HostKernel:
    """A kernel, compiled when it is first called."""

    def __init__(self, function: Callable[[int], None], layout: str, names: str = "") -> None:
        self.function, self.name, self.names = function, function.__name__, ("", "", *names.split())
        self.layout = struct.Struct(f"=qq{layout}")
        self._arguments = ctypes.create_string_buffer(self.layout.size)
        self._where = ctypes.addressof(self._arguments)

    def __call__(self, threads: int, *numbers: float) -> None:
        """Runs it to its end. threads: at most so many. numbers: as `layout` has them."""
        self.layout.pack_into(self._arguments, 0, 0, 0, *numbers)
        self.run(threads, self._where)

    def run(self, threads: int, where: int) -> None:
        """The same with arguments that lie at an address, their two counters at 0."""
        if threads == 1:
            self._alone(where)
        else:
            parallel = _parallel()
            assert parallel is not None, "more threads than `threads_for` allows"
            parallel(self._address, where, threads, 0)

    @cached_property
    def _compiled(self) -> Any:
        began, folder = time.perf_counter(), _kept_in(Path(self.function.__code__.co_filename))
        compiled = self._kept(folder) if folder is not None else None
        if compiled is None:
            compiled = self._compile(None)
        kept = "loaded" if compiled.cache_hits else "compiled"
        log.debug("the CPU's kernel %s was %s in %.1f s", self.name, kept, time.perf_counter() - began)
        return compiled

    def _kept(self, folder: Path) -> Any | None:
        """From what is kept in the folder, or compiled and kept there; None where it cannot be.

        A machine that lost its power leaves files that are empty or cut: they are removed, and made once more.
        """
        for _ in range(2):
            try:
                return self._compile(folder)
            except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes, a full disk OSError
                log.warning(
                    "the CPU's kernel %s cannot be kept as it is: %s: %s", self.name, type(error).__name__, error
                )
            with suppress(OSError):
                for path in folder.rglob(f"*.{self.name}-*.nb*"):
                    path.unlink()
        return None

    def _compile(self, folder: Path | None) -> Any:
        import numba
        from numba.core import config

        before, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
        try:
            return numba.cfunc("void(int64)", cache=folder is not None, **OPTIONS)(self.function)
        finally:
            config.CACHE_DIR = before

    @cached_property
    def _address(self) -> int:
        return int(self._compiled.address)

    @cached_property
    def _alone(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._address)


def host_kernel(layout: str, names: str = "") -> Callable[[Callable[[int], None]], HostKernel]:
    """Makes a kernel of a function. layout: of its arguments, as `struct` has it; q: int64, d: double. names: of the
    arguments, where `Calls` of it are made."""
    return lambda function: HostKernel(function, layout, names)


class Calls:
    """Many calls of one kernel, their arguments laid out beforehand: what packing all of them each time costs is saved.

    calls: the arguments of each. Errors: what `struct` raises for arguments that are not as the kernel's layout.
    """

    def __init__(self, kernel: HostKernel, calls: Sequence[Sequence[float]]) -> None:
        self._kernel, size = kernel, kernel.layout.size
        packed = bytearray(size * len(calls))
        for index, numbers in enumerate(calls):
            kernel.layout.pack_into(packed, size * index, 0, 0, *numbers)
        self._numbers = np.frombuffer(packed, np.int64).reshape(len(calls), size // 8)
        self._rows = [memoryview(packed)[size * index : size * (index + 1)].cast("q") for index in range(len(calls))]
        self._where = [int(row.ctypes.data) for row in self._numbers]
        self._columns = {name: kernel.names.index(name) for name in kernel.names if name}

    def renew(self, **numbers: int) -> None:
        """Each call may be made once more; these arguments, integers, are other ones now, in all of them."""
        self._numbers[:, :2] = 0
        for name, number in numbers.items():
            self._numbers[:, self._columns[name]] = number

    def run(self, threads: int, index: int, **numbers: int) -> None:
        """Makes one of the calls, to its end. numbers: arguments that are integers, of this one alone."""
        row = self._rows[index]
        for name, number in numbers.items():
            row[self._columns[name]] = number
        self._kernel.run(threads, self._where[index])


def part(function: Callable[..., Any]) -> Any:
    """Makes a function that kernels are made of."""
    import numba

    return numba.njit(**OPTIONS)(function)


def threads_for(microseconds: float) -> int:
    """Threads for work that takes one of them so long: all that torch has, where that gains more than waking them."""
    return torch.get_num_threads() if microseconds > _waking_us() and _parallel() is not None else 1


@lru_cache(maxsize=1)
def _waking_us() -> float:
    """What more threads must gain: those that spin (see `worker.cores`) see work at once, others have to be woken."""
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE" or os.environ.get("GOMP_SPINCOUNT", "0") != "0"
    return 20.0 if spins else 100.0


@lru_cache(maxsize=1)
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel of the OpenMP library that this torch is linked with; None where there is none."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # dlsym looks through what a library is linked with too: it finds the very one that torch calls.
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return found
    log.warning("torch is linked with no OpenMP library: the CPU's kernels run on one thread")
    return None


@lru_cache(maxsize=16)
def _kept_in(path: Path) -> Path | None:
    """The folder for what is compiled of this file; None where nothing can be kept."""
    try:
        digest = hashlib.sha256()
        for part in (*(Path(__file__).with_name(name) for name in SHARED_FILES), path):
            digest.update(part.read_bytes())
        cache = code_folder("numba")  # Numba unpickles what it finds there
        if cache is None:
            return None
        folder = cache / digest.hexdigest()[:16]
        folder.mkdir(exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
        log.info("the CPU's kernels are not kept: %s cannot be written", folder)
    except (OSError, KvforgeError) as error:
        log.info("the CPU's kernels are not kept: %s", error)
    return None
