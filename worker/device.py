"""One face for CPU, CUDA and HIP. Nothing outside this file asks which of them it runs on.

torch names both CUDA and HIP devices "cuda"; `Device.kind` tells them apart where a person reads it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.errors import GpuError, InvalidConfiguration, WorkerError

KINDS = ("cpu", "cuda", "hip", "auto")


@dataclass(frozen=True)
class Device:
    """A place where tensors live.

    kind: cpu, cuda or hip. torch_device: what torch calls it. name: for people ("NVIDIA H200").
    """

    kind: str
    torch_device: torch.device
    name: str

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies a host array here: same shape and dtype. Never shares memory with `array`."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if not self.is_gpu:
            return host.clone()
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of unspecified contents, whose memory goes back when the last reference to it does.

        On the CPU it is a mapping of its own: pages are committed as they are written, and the C allocator, which
        keeps freed memory for later, is not asked.
        """
        if self.is_gpu:
            return torch.empty(shape, dtype=dtype, device=self.torch_device)
        try:
            memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        except OSError as error:
            raise MemoryError(str(error)) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def synchronize(self) -> None:
        """Waits until everything queued on the device is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch_device)

    def allocated_bytes(self) -> int:
        """Bytes in use by this process as the device allocator counts them (CPU: resident set size)."""
        if self.is_gpu:
            return int(torch.cuda.memory_allocated(self.torch_device))
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - a kernel file, not a path of ours
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        """Bytes that could still be allocated here (CPU: memory the kernel calls available)."""
        if self.is_gpu:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def release_cached(self) -> None:
        """Returns memory that torch's caching allocator keeps but nobody uses."""
        if self.is_gpu:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turns a failure of torch while `doing` something into WorkerError, or GpuError where the device failed."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise as_worker_error(error, doing, self) from error


def as_worker_error(error: BaseException, doing: str, device: Device) -> WorkerError:
    """The typed error for what torch raised: GpuError for a device's own failures, else WorkerError."""
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    message = f"{doing} failed on {device.name}: {type(error).__name__}: {first_line}"
    accelerator_error: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    device_failed = device.is_gpu and isinstance(error, (torch.OutOfMemoryError, accelerator_error))
    return GpuError(message) if device_failed else WorkerError(message)


def open_device(kind: str = "auto", index: int = 0) -> Device:
    """Opens the device: "cpu", "cuda", "hip", or "auto" (a GPU if this torch sees one, else the CPU).

    `index` picks among several GPUs. Errors: InvalidConfiguration names `device` when this torch has no such device.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("device", f"{kind!r} is not one of {', '.join(KINDS)}")
    gpu_kind = "hip" if torch.version.hip else "cuda"
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and gpu_count == 0):
        return Device("cpu", torch.device("cpu"), _cpu_name())
    if gpu_count == 0:
        raise InvalidConfiguration("device", f"torch {torch.__version__} sees no {kind} device; use device = 'cpu'")
    if kind not in ("auto", gpu_kind):
        raise InvalidConfiguration("device", f"torch {torch.__version__} is built for {gpu_kind}, not {kind}")
    if not 0 <= index < gpu_count:
        raise InvalidConfiguration("device_index", f"{index} is not below the number of devices, {gpu_count}")
    return Device(gpu_kind, torch.device("cuda", index), torch.cuda.get_device_name(index))


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:  # noqa: PTH123
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"
