"""One face for CPU, CUDA and HIP. Nothing outside this file asks which of them it runs on.

torch names both CUDA and HIP devices "cuda"; `Device.kind` tells them apart where a person reads it.

A GPU is a queue: what is called here is queued, in order, and done later. `Mark` is a point in that queue, `Staging`
the way in and `Fetched` the way out, neither of which waits. On a CPU everything is done when the call returns, and
the same calls copy, or do nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError, WorkerError

KINDS = ("cpu", "cuda", "hip", "auto")
WAY_OUT = "set kernels = 'reference' to serve without Triton's kernels"
# Two steps are under way at most, and a third is being packed.
STAGING_RING = 3
KERNEL_COPY_MAX = 1 << 18  # numbers; more go by a copy engine. Where that is the faster one was not measured
# Of torch's caching allocator (kMinLargeAlloc, kRoundLarge): from the one on, each allocation has a segment of its own,
# a multiple of the other.
OWN_SEGMENT_BYTES, SEGMENT_BYTES = 10 << 20, 2 << 20
# MKL multiplies 16 rows by a large vocabulary matrix in half the time it takes for 8 (49152 x 576 float32, 2 cores:
# 9.8 ms against 18.1 ms).
CPU_PRODUCT_ROWS = 16


class Mark:
    """A point in the device's queue. On a CPU it has always been passed."""

    def __init__(self, device: Device, timed: bool = False) -> None:
        """Puts the mark at the end of the queue. timed: `ms_since` will be asked."""
        self._event: torch.cuda.Event | None = None
        self._at_ns = 0 if device._queues else time.perf_counter_ns()
        if device._queues:
            self._event = torch.cuda.Event(enable_timing=timed)
            self._event.record()

    def passed(self) -> bool:
        """True once everything queued before the mark is done. Errors: what the device raises for that work."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits until it is passed. Errors: what the device raises for the work before it."""
        if self._event is not None:
            self._event.synchronize()

    def ms_since(self, earlier: Mark) -> float:
        """Milliseconds of device time between two timed marks that are passed."""
        if self._event is None or earlier._event is None:
            return (self._at_ns - earlier._at_ns) / 1e6
        return float(earlier._event.elapsed_time(self._event))


class Staging:
    """A fixed place on the device that is filled once a step, in one copy that nobody waits for.

    on_device: [size] int32 device; its address never changes, so captured graphs may read it. What is queued before a
    `send` reads the old contents, what is queued after it the new ones.
    """

    def __init__(self, device: Device, size: int) -> None:
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._sent: list[Mark | None] = [None] * STAGING_RING
        self._next = 0

    def host(self) -> npt.NDArray[np.int32]:
        """The host's side of the next `send`: [size] int32 with old contents. Waits for the last copy out of it."""
        sent = self._sent[self._next]
        if sent is not None:
            sent.wait()
        array: npt.NDArray[np.int32] = self._ring[self._next].numpy()
        return array

    def send(self, count: int) -> None:
        """Queues the copy of the first `count` numbers of what `host` gave."""
        self._device.refuse_capture("filling a staging buffer")
        self._device.copy_numbers(self.on_device[:count], self._ring[self._next][:count])
        self._sent[self._next] = Mark(self._device)
        self._next = (self._next + 1) % STAGING_RING


class Fetched:
    """A device tensor on its way to the host."""

    def __init__(self, device: Device, tensor: torch.Tensor, host: torch.Tensor | None = None) -> None:
        """Queues the copy; what is queued later may overwrite the tensor. host: [n] int32 of a Landing."""
        if host is not None:
            self._host = host
            device.copy_numbers(host, tensor)
        else:
            self._host = device.host_buffer(tensor.numel(), tensor.dtype).view(tensor.shape)
            self._host.copy_(tensor, non_blocking=True)

    def array(self) -> npt.NDArray[Any]:
        """The contents, same shape and dtype. A mark that was made after this object must have been passed."""
        array: npt.NDArray[Any] = self._host.numpy()
        return array


class Landing:
    """Fixed places on the host, taken in turn, for what is fetched once a step."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._ring = [device.host_buffer(size, torch.int32) for _ in range(STAGING_RING)]
        self._next = 0

    def fetch(self, tensor: torch.Tensor) -> Fetched:
        """tensor: [n] int32 device. What comes of it is to be read before STAGING_RING more are fetched."""
        host = self._ring[self._next][: tensor.numel()]
        self._next = (self._next + 1) % STAGING_RING
        return Fetched(self._device, tensor, host)


@dataclass(frozen=True)
class GraphMemory:
    """What graphs share: the memory of their intermediate results, and the stream on which they are captured (torch's
    libraries keep a workspace for each stream)."""

    pool: Any
    stream: torch.cuda.Stream


class _Place:
    """Memory on a GPU, as the protocol that torch and others share describes it (`__cuda_array_interface__`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


class Captured:
    """Work that was queued once and can be queued again in one call, reading and writing the same places.

    A captured graph on a GPU; on a CPU the function itself.
    """

    def __init__(self, run: Callable[[], None], graph: torch.cuda.CUDAGraph | None) -> None:
        self._run, self._graph = run, graph

    def replay(self) -> None:
        """Queues the work."""
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


@dataclass(frozen=True)
class Device:
    """A place where tensors live.

    kind: cpu, cuda or hip. torch_device: what torch calls it. name: for people ("NVIDIA H200"). kernels: False where
    none of Triton's kernels may run, whatever the device can.
    """

    kind: str
    torch_device: torch.device
    name: str
    kernels: bool = True

    @property
    def _queues(self) -> bool:
        return self.kind != "cpu"

    @property
    def runs_kernels(self) -> bool:
        """Whether Triton's kernels run here, and Triton is installed, and they are wanted."""
        return self.kernels and self._queues and importlib.util.find_spec("triton") is not None

    @property
    def widens_products(self) -> bool:
        """Whether torch has products of 16-bit numbers that are never rounded to 16 bits (CUDA, from torch 2.8 on)."""
        return self.kind == "cuda" and "dtype_out" in torch.ops.aten.mm.overloads()

    @property
    def gains_from_graphs(self) -> bool:
        """Whether replaying captured work is faster than queueing it again."""
        return self._queues

    @property
    def owns_memory(self) -> bool:
        """Whether its memory is its own, so that what is free tells what a pool may take; a CPU's is everyone's."""
        return self._queues

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16 bits to serve in where nobody says which: bfloat16, unless this GPU only emulates it."""
        emulated = self.kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulated else torch.bfloat16

    @property
    def architecture(self) -> tuple[str, int]:
        """Name (sm_90, gfx942, cpu) and number of multiprocessors or compute units (CPU: 0)."""
        if not self._queues:
            return "cpu", 0
        properties = torch.cuda.get_device_properties(self.torch_device)
        count = int(properties.multi_processor_count)
        if self.kind == "hip":
            return str(properties.gcnArchName).split(":")[0], count
        return f"sm_{properties.major}{properties.minor}", count

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block of a kernel may use, as its driver says; 0 where it does not say."""
        if self.kind != "cuda":
            return 0
        properties = torch.cuda.get_device_properties(self.torch_device)
        return int(getattr(properties, "shared_memory_per_block_optin", 0))

    @property
    def toolkit(self) -> str:
        """Version of CUDA or ROCm that torch was built with; "" without."""
        return str(torch.version.hip or torch.version.cuda or "")

    def product_rows(self, rows: int) -> int:
        """How many rows a product with a large matrix takes the least time for, of those that hold `rows`."""
        return CPU_PRODUCT_ROWS if not self._queues and CPU_PRODUCT_ROWS // 4 < rows < CPU_PRODUCT_ROWS else rows

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """What is drawn from torch's own generators inside does not show in what is drawn outside."""
        with torch.random.fork_rng(devices=[self.torch_device] if self._queues else []):
            yield

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies a host array here: same shape and dtype. Never shares memory with `array`."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if not self._queues:
            return host.clone()
        self.refuse_capture("an upload")
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def copy_numbers(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues target = source, both [n] int32, contiguous, one here and one a `host_buffer` that stays."""
        if self.runs_kernels and source.numel() <= KERNEL_COPY_MAX:
            from .copies import copy_numbers  # imports triton

            copy_numbers(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of unspecified contents, whose memory goes back when the last reference to it does (on a
        GPU, with the next `release_cached`).

        On the CPU it is a mapping of its own: pages are committed as they are written, and the C allocator, which
        keeps freed memory for later, is not asked. On a GPU it fills its segment of torch's allocator, which gives
        what is left of one to others, and cannot return it as long as they hold that.
        """
        size = math.prod(shape) * dtype.itemsize
        if self._queues:
            whole = size if size < OWN_SEGMENT_BYTES else -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
            held = torch.empty(whole, dtype=torch.uint8, device=self.torch_device)
            return held[:size].view(dtype).view(shape)
        try:
            memory = mmap.mmap(-1, size)
        except OSError as error:
            raise MemoryError(str(error)) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """[size] in host memory that the device copies from and to without waiting; unspecified contents."""
        return torch.empty(size, dtype=dtype, pin_memory=self._queues)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, but this does not keep it: for what lies in the memory of graphs, which outlives its owner.

        On a CPU: the tensor itself.
        """
        return torch.as_tensor(_Place(tensor), device=self.torch_device) if self._queues else tensor

    def graph_memory(self) -> GraphMemory | None:
        """What several `capture` calls pass to share memory; None on a CPU.

        Work captured with the same one must not be replayed at the same time, and keeps nothing between replays.
        """
        if not self._queues:
            return None
        return GraphMemory(torch.cuda.graph_pool_handle(), _capture_stream(self.torch_device))

    def capture(self, run: Callable[[], None], memory: GraphMemory | None) -> Captured:
        """Calls `run` twice, the second time only noting what it queues. It must not wait for the device.

        Errors: what torch raises; nothing stays behind then.
        """
        if memory is None:
            run()
            return Captured(run, None)
        current, side = torch.cuda.current_stream(self.torch_device), memory.stream
        side.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                run()  # compiles, tunes and allocates what stays
                self.synchronize()
                graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
                try:
                    run()
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # a capture that was broken says so again when it ends
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            current.wait_stream(side)
        return Captured(run, graph)

    def refuse_capture(self, what: str) -> None:
        """A graph must not hold a copy from the host: it would copy the same again at every replay. RuntimeError."""
        if self._queues and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{what} cannot be part of a graph")

    def survives(self) -> bool:
        """False where the device answers every call with an error from now on: only a new process helps."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def synchronize(self) -> None:
        """Waits until everything queued on the device is done."""
        if self._queues:
            torch.cuda.synchronize(self.torch_device)

    def allocated_bytes(self) -> int:
        """Bytes in use by this process as the device allocator counts them (CPU: resident set size)."""
        if self._queues:
            return int(torch.cuda.memory_allocated(self.torch_device))
        with open("/proc/self/statm", encoding="ascii") as statm:  # noqa: PTH123 - a kernel file, not a path of ours
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def free_bytes(self) -> int:
        """Bytes that could still be allocated here (CPU: memory the kernel calls available)."""
        if self._queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def total_bytes(self) -> int:
        """Bytes of the whole device (CPU: all memory of the machine)."""
        if self._queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def release_cached(self) -> None:
        """Returns memory that torch's caching allocator keeps but nobody uses."""
        if self._queues:
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Turns a failure of torch or of Triton while `doing` something into what `as_worker_error` says."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise as_worker_error(error, doing, self) from error
        except Exception as error:
            if not _is_tritons(error):
                raise
            raise as_worker_error(error, doing, self) from error


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process: a GPU on which more streams have ever worked is slower between two kernels of
    any graph (H200: 70 us a decode step of 290 kernels; see benchmarks/NOTES.md)."""
    return torch.cuda.Stream(device)


def as_worker_error(error: BaseException, doing: str, device: Device) -> WorkerError:
    """The typed error for what torch or Triton raised: GpuError for a device's own failures, KernelError for a kernel
    that does not compile, else WorkerError."""
    if _is_tritons(error):
        return KernelError(f"{doing} failed on {device.name}: {compilers_words(error)}; {WAY_OUT}")
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    message = f"{doing} failed on {device.name}: {type(error).__name__}: {first_line}"
    accelerator_error: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    device_failed = isinstance(error, (torch.OutOfMemoryError, accelerator_error))  # a CPU raises neither
    no_memory = first_line.startswith("Triton Error [") and "out of memory" in first_line  # to load a kernel into
    return GpuError(message) if device_failed or no_memory else WorkerError(message)


def compilers_words(error: BaseException) -> str:
    """Its class, and its last line: a compiler quotes the source first, and then says what is wrong with it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return ": ".join([type(error).__name__, *lines[-1:]])


def _is_tritons(error: BaseException) -> bool:
    """What its compiler raises, and a launch that asks for more than the device has."""
    return type(error).__module__.partition(".")[0] == "triton"


def open_device(kind: str = "auto", index: int = 0, kernels: bool = True) -> Device:
    """Opens the device: "cpu", "cuda", "hip", or "auto" (a GPU if this torch sees one, else the CPU).

    kernels: see Device. `index` picks among several GPUs. The GPU becomes the process's current device and has to stay
    it, as streams, graphs and Triton's launches follow that: a process works with the GPU that it opened last.
    Errors: InvalidConfiguration names `device` when this torch has no such device, `device_index` past the last one.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("device", f"{kind!r} is not one of {', '.join(KINDS)}")
    gpu_kind = "hip" if torch.version.hip else "cuda"
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and gpu_count == 0):
        return Device("cpu", torch.device("cpu"), _cpu_name(), kernels)
    if gpu_count == 0:
        raise InvalidConfiguration("device", f"torch {torch.__version__} sees no {kind} device; use device = 'cpu'")
    if kind not in ("auto", gpu_kind):
        raise InvalidConfiguration("device", f"torch {torch.__version__} is built for {gpu_kind}, not {kind}")
    if not 0 <= index < gpu_count:
        problem = f"{index} is not below the number of devices, {gpu_count}: each worker takes one of its own"
        raise InvalidConfiguration("device_index", f"{problem}; start fewer, or say which device each one takes")
    torch.cuda.set_device(index)  # Triton launches on the current device, wherever the tensors are
    return Device(gpu_kind, torch.device("cuda", index), torch.cuda.get_device_name(index), kernels)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:  # noqa: PTH123
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"
