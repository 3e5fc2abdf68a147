"""Self-tests at a worker's start: each kernel is compared with its plain-torch reference and rejected by name if wrong.

A compiler may reject a kernel for one chip, request more resources than the chip has, or miscompile it. The resulting
errors rarely help the operator: this module turns them into one sentence with a remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kvforge.protocol.errors import GpuError, KernelError, KvforgeError

from .device import Device, as_worker_error, compilers_words

log = logging.getLogger("worker")
# Errors that a wrong kernel causes on a GPU: a restart would end in the same way.
KERNEL_FAULTS = (
    "illegal memory access",
    "illegal address",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "device-side assert",
)


def require_all_right(device: Device, checks: Sequence[Callable[[], None]]) -> None:
    """Run checks, on a GPU in several threads, because most of their time is the compilation of kernels.

    Triton's compiler runs outside of Python's lock for most of the time. The first check runs alone: it loads
    Triton. One that fails beside others is repeated alone, and only that result counts.

    Args:
        device: The device under test.
        checks: Checks that share no memory and raise if a kernel is wrong.

    Raises:
        KernelError: The first kernel, in the order of `checks`, that is wrong, does not compile, or cannot be launched.
        GpuError: The device itself fails.
    """
    threads = min(device.compile_threads, len(checks) - 1)
    if threads <= 1:
        for check in checks:
            check()
        return
    checks[0]()
    inference = torch.is_inference_mode_enabled()

    def run(check: Callable[[], None]) -> None:
        with torch.inference_mode(inference):
            check()

    with ThreadPoolExecutor(threads, "kernels", device.enter_thread) as pool:
        running: list[Future[None]] = [pool.submit(run, check) for check in checks[1:]]
        failures = [each.exception() for each in running]
    for check, failure in zip(checks[1:], failures, strict=True):
        if failure is not None:
            log.info("a check of kernels failed beside others, and is repeated alone: %s", failure)
            check()


def require_right(device: Device, kernel: str, configuration: str, check: Callable[[], str], way_out: str) -> None:
    """Run a kernel's self-test.

    Args:
        device: The device under test.
        kernel: Name of the kernel, for people.
        configuration: Configuration of the kernel, for people.
        check: Returns a description of the fault; "" if there is none.
        way_out: The remedy that the error suggests.

    Raises:
        KernelError: The kernel is wrong, does not compile, or cannot be launched.
        GpuError: The device itself fails.
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
