"""How a kernel is judged at a worker's start: beside its plain-torch reference, and refused by name where it is wrong.

A compiler can refuse a kernel for one chip, or ask more of the chip than it has, as well as compile it wrongly. What
then comes out of it says little to whoever starts a worker: here it becomes one sentence, with what to do.
"""

from __future__ import annotations

from collections.abc import Callable

from kvforge.protocol.errors import GpuError, KvforgeError, WorkerError
from worker.device import Device, as_worker_error

WAY_OUT = "set kernels = 'reference' to serve without Triton's kernels"


def require_right(device: Device, kernel: str, configuration: str, check: Callable[[], str], way_out: str) -> None:
    """Runs `check`, which says what is wrong ("" where nothing is).

    kernel, configuration: for people. way_out: what to do. Errors: WorkerError names all of them where the kernel is
    wrong, or does not compile, or cannot be launched; GpuError where the device itself fails.
    """
    try:
        problem = check()
    except KvforgeError:
        raise
    except Exception as error:
        failure = as_worker_error(error, f"the self-test of the {kernel} kernel", device)
        if isinstance(failure, GpuError):
            raise failure from error
        what = f"the {kernel} kernel cannot be compiled or launched for {configuration}"
        raise WorkerError(f"self-test on {device.name}: {what}: {_said(error)}; {way_out}") from error
    if problem:
        what = f"the {kernel} kernel is wrong for {configuration}"
        raise WorkerError(f"self-test on {device.name}: {what}: {problem}; {way_out}")


def _said(error: Exception) -> str:
    """Its class, and its last line: a compiler quotes the source first, and then says what is wrong with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return ": ".join([type(error).__name__, *lines[-1:]])
