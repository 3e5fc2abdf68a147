"""How a kernel is judged at a worker's start: beside its plain-torch reference, and refused by name where it is wrong.

A compiler can refuse a kernel for one chip, or ask more of the chip than it has, as well as compile it wrongly. What
then comes out of it says little to whoever starts a worker: here it becomes one sentence, with what to do.
"""

from __future__ import annotations

from collections.abc import Callable

from kvforge.protocol.errors import GpuError, KernelError, KvforgeError

from .device import Device, as_worker_error, compilers_words

# What a kernel that is wrong makes a GPU report: a new start would end in the same way.
KERNEL_FAULTS = (
    "illegal memory access",
    "illegal address",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "device-side assert",
)


def require_right(device: Device, kernel: str, configuration: str, check: Callable[[], str], way_out: str) -> None:
    """Runs `check`, which says what is wrong ("" where nothing is).

    kernel, configuration: for people. way_out: what to do. Errors: KernelError names all of them where the kernel is
    wrong, or does not compile, or cannot be launched; GpuError where the device itself fails.
    """
    try:
        problem = check()
    except KvforgeError:
        raise
    except Exception as error:
        failure = as_worker_error(error, f"the self-test of the {kernel} kernel", device)
        if isinstance(failure, GpuError) and not any(fault in str(error) for fault in KERNEL_FAULTS):
            raise failure from error
        what = f"the {kernel} kernel cannot be compiled or launched for {configuration}"
        raise KernelError(f"self-test on {device.name}: {what}: {compilers_words(error)}; {way_out}") from error
    if problem:
        what = f"the {kernel} kernel is wrong for {configuration}"
        raise KernelError(f"self-test on {device.name}: {what}: {problem}; {way_out}")
