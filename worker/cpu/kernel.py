"""CPU kernels: compiled by Numba once, cached on disk, and run by torch's own threads.

A kernel is a function of one address, where its arguments are stored: an int64 that counts the tickets taken, one that
counts the threads that arrived, then the arguments declared to `cpu_kernel`. Threads take tickets until none are left
(see `vector.next_ticket`), so the number of threads does not matter, and a late thread delays no other.

The process has one thread pool: the OpenMP library that torch is linked with calls the kernel (`GOMP_parallel`, which
LLVM's and Intel's libraries provide too), so the kernel runs on the threads that just computed a product. A separate
pool of Numba's would compete for the cores.

Law: a kernel consists of its own file, vector.py, rows.py and the constants of random_constants.py; the cache key is
the contents of these files.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvforge.models.code_cache import code_folder
from kvforge.protocol.errors import KvforgeError

CAPABILITIES = ("AVX2", "AVX512")  # CPU capabilities by torch's names
SHARED_FILES = ("cpu/vector.py", "cpu/rows.py", "cpu/kernel.py", "random_constants.py")  # in the worker's package
OTHERS_S = 60.0  # the longest wait for another process that compiles kernels of the same file
OPTIONS = {"error_model": "numpy"}  # a kernel cannot raise
log = logging.getLogger("worker")


def cpu_kernels_problem() -> str:
    """Return why this process cannot run CPU kernels; "" if it can."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in CAPABILITIES:
        return f"kernels need AVX2 or AVX-512, this CPU has {capability}"
    try:
        import_module("numba")
    except ImportError as error:  # not installed, or incompatible with this numpy
        return f"Numba cannot be imported: {error}"
    return ""


class CpuKernel:
    """A CPU kernel, compiled on its first call."""

    def __init__(self, function: Callable[[int], None], arguments: str) -> None:
        self.function, self.name = function, function.__name__
        declared = [argument.partition(":") for argument in arguments.split()]
        self.names = tuple(name for name, _, _ in declared)
        self._in_order = itemgetter(*self.names)
        self.layout = struct.Struct("=qq" + "".join(kind or "q" for _, _, kind in declared))
        self._arguments = ctypes.create_string_buffer(self.layout.size)
        self._where = ctypes.addressof(self._arguments)

    def __call__(self, threads: int, **numbers: float) -> None:
        """Run the kernel to its end on at most `threads` threads. numbers: all its arguments, by name.

        Raises:
            TypeError: An argument is missing or unknown.
        """
        if len(numbers) != len(self.names):
            raise TypeError(f"CPU kernel {self.name}: expected {', '.join(self.names)}; got {', '.join(numbers)}")
        self.pack_into(self._arguments, 0, numbers)
        self.run(threads, self._where)

    def load(self) -> None:
        """Load the kernel from the cache, or compile it, before its first call."""
        self._alone  # noqa: B018 - a cached property

    def pack_into(self, buffer: Any, offset: int, numbers: Mapping[str, float]) -> None:
        """Write arguments into a buffer, with the two counters at 0.

        Raises:
            TypeError: An argument is missing.
        """
        try:
            self.layout.pack_into(buffer, offset, 0, 0, *self._in_order(numbers))
        except KeyError as error:
            raise TypeError(f"CPU kernel {self.name}: missing argument {error.args[0]!r}") from error

    def run(self, threads: int, where: int) -> None:
        """Run the kernel on arguments that are stored at the address `where`, with their two counters at 0."""
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
        log.debug("CPU kernel %s: %s in %.1f s", self.name, kept, time.perf_counter() - began)
        return compiled

    def _kept(self, folder: Path) -> Any | None:
        """Load the kernel from the cache folder, or compile and store it there; None if the folder cannot be used.

        A power failure leaves empty or truncated files. They are removed, and the kernel is compiled once more.
        """
        for _ in range(2):
            try:
                with _alone_in(folder):
                    return self._compile(folder)
            except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever it likes, a full disk OSError
                log.warning(
                    "cannot load or store CPU kernel %s in the cache: %s: %s", self.name, type(error).__name__, error
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


def cpu_kernel(arguments: str) -> Callable[[Callable[[int], None]], CpuKernel]:
    """Make a decorator that turns a function into a kernel.

    Args:
        arguments: Names of the arguments, in the order in which the function reads them: int64, or double as `name:d`.
            This is the only declaration: callers pass arguments by name.
    """
    return lambda function: CpuKernel(function, arguments)


class Calls:
    """Calls of one kernel with arguments packed in advance, to avoid the cost of packing at each call.

    Args:
        kernel: The kernel.
        calls: The arguments of each call by name. Those left out are 0 until `renew` or `run` sets them.

    Raises:
        TypeError: The kernel has no argument of that name.
    """

    def __init__(self, kernel: CpuKernel, calls: Sequence[Mapping[str, float]]) -> None:
        self._kernel, size = kernel, kernel.layout.size
        packed, unset = bytearray(size * len(calls)), dict.fromkeys(kernel.names, 0)
        for index, numbers in enumerate(calls):
            if unknown := numbers.keys() - unset.keys():
                raise TypeError(f"CPU kernel {kernel.name}: unknown arguments {sorted(unknown)}")
            kernel.pack_into(packed, size * index, unset | dict(numbers))
        self._numbers = np.frombuffer(packed, np.int64).reshape(len(calls), size // 8)
        self._rows = [memoryview(packed)[size * index : size * (index + 1)].cast("q") for index in range(len(calls))]
        self._where = [int(row.ctypes.data) for row in self._numbers]
        self._columns = {name: column for column, name in enumerate(kernel.names, 2)}  # behind the counters

    def renew(self, **numbers: int) -> None:
        """Prepare all calls for another run, with new values of these integer arguments in every call."""
        self._numbers[:, :2] = 0
        for name, number in numbers.items():
            self._numbers[:, self._columns[name]] = number

    def run(self, threads: int, index: int, **numbers: int) -> None:
        """Run one call to its end. numbers: integer arguments of this call to change first."""
        row = self._rows[index]
        for name, number in numbers.items():
            row[self._columns[name]] = number
        self._kernel.run(threads, self._where[index])


def part(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call."""
    import numba

    return numba.njit(**OPTIONS)(function)


def threads_for(microseconds: float) -> int:
    """Return the threads for work of this length on one thread: all of torch's if that outweighs waking them."""
    return torch.get_num_threads() if microseconds > _waking_us() and _parallel() is not None else 1


@lru_cache(maxsize=1)
def _waking_us() -> float:
    """Return the microseconds that more threads must save. Spinning ones (`kvforge.worker.cores`) need no wake-up."""
    spins = os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE" or os.environ.get("GOMP_SPINCOUNT", "0") != "0"
    return 20.0 if spins else 100.0


@lru_cache(maxsize=1)
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """Return GOMP_parallel of the OpenMP library that this torch is linked with; None if there is none."""
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            # dlsym also searches a library's dependencies: it finds the very function that torch calls.
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
        return found
    log.warning("torch is not linked with an OpenMP library: CPU kernels run on one thread")
    return None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder of kernels, so that of processes that start together one compiles and the others load.

    The lock saves work and guards nothing: after OTHERS_S, or where a file system has no locks, it is not waited for.
    """
    descriptor, deadline = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), time.monotonic() + OTHERS_S
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


@lru_cache(maxsize=16)
def _kept_in(path: Path) -> Path | None:
    """Return the cache folder for kernels of this file; None if nothing can be cached."""
    try:
        digest = hashlib.sha256()
        for part in (*(Path(__file__).parents[1] / name for name in SHARED_FILES), path):
            digest.update(part.read_bytes())
        cache = code_folder("numba")  # Numba unpickles its files: the folder must be trusted
        if cache is None:
            return None
        folder = cache / digest.hexdigest()[:16]
        folder.mkdir(exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
        log.info("CPU kernels are not cached: %s is not writable", folder)
    except (OSError, KvforgeError) as error:
        log.info("CPU kernels are not cached: %s", error)
    return None
