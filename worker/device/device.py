"""One interface for CPU, CUDA and HIP. No code outside this package asks which one it runs on.

torch names both CUDA and HIP devices "cuda"; `Device.kind` distinguishes them for people.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvforge.protocol.errors import GpuError, InvalidConfiguration, KernelError, WorkerError
from kvforge.worker.cpu.kernel import cpu_kernels_problem

from .capture import Captured, CudaArray, GraphMemory, captured_on
from .file_pages import release_library_pages
from .products import keep_from_tiles, sum_in_one_go

KINDS = ("cpu", "cuda", "hip", "auto")
WAY_OUT = "set kernels = 'reference' to serve without Triton's kernels"
COMPILE_THREADS_MAX = 8  # the part of a compilation in Python, about a fifth, runs in one thread at a time
KERNEL_COPY_MAX = 1 << 18  # in numbers; larger copies use a copy engine. The break-even was not measured
# torch's caching allocator (kMinLargeAlloc, kRoundLarge): allocations from OWN_SEGMENT_BYTES up have a segment of their
# own, rounded up to a multiple of SEGMENT_BYTES.
OWN_SEGMENT_BYTES, SEGMENT_BYTES = 10 << 20, 2 << 20
# MKL multiplies 16 rows by a large vocabulary matrix in half the time it takes for 8 (49152 x 576 float32, 2 cores:
# 9.8 ms against 18.1 ms).
CPU_PRODUCT_ROWS = 16
PACKING_CAPABILITIES = ("AVX2", "AVX512")  # CPU capabilities by torch's names


@dataclass(frozen=True)
class Device:
    """The device that holds a worker's tensors.

    Attributes:
        kind: cpu, cuda or hip.
        torch_device: torch's device.
        name: Name for people ("NVIDIA H200").
        kernels: False if no Triton kernel may run, whatever the device can do.
        steady: Whether the result of a row must depend on that row alone, bit by bit, and not on the size of the batch.
    """

    kind: str
    torch_device: torch.device
    name: str
    kernels: bool = True
    steady: bool = True

    @property
    def described(self) -> dict[str, str]:
        """Kind and name, for people."""
        return {"kind": self.kind, "device": self.name}

    @property
    def queues(self) -> bool:
        """Whether calls are queued and run later, as on every GPU."""
        return self.kind != "cpu"

    @property
    def computes_on_cores(self) -> bool:
        """Whether the model computes on the host's cores rather than on a GPU."""
        return not self.queues

    @property
    def runs_kernels(self) -> bool:
        """Whether Triton kernels can run here, are installed, and are enabled."""
        return self.kernels and self.queues and importlib.util.find_spec("triton") is not None

    @property
    def compile_threads(self) -> int:
        """How many threads may compile kernels; 1 where none are compiled. Triton's interpreter has one thread."""
        compiles = self.queues and self.runs_kernels
        return min(COMPILE_THREADS_MAX, len(os.sched_getaffinity(0))) if compiles else 1

    @property
    def widens_products(self) -> bool:
        """Whether torch multiplies 16-bit numbers without rounding the result to 16 bits (CUDA, from torch 2.8 on)."""
        return self.kind == "cuda" and "dtype_out" in torch.ops.aten.mm.overloads()

    @property
    def gains_from_graphs(self) -> bool:
        """Whether replaying captured work is faster than queueing it again."""
        return self.queues

    @property
    def owns_memory(self) -> bool:
        """Whether the device has its own memory. Its free memory then bounds the pool; a CPU's memory is shared."""
        return self.queues

    @property
    def half_dtype(self) -> torch.dtype:
        """The default 16-bit dtype: bfloat16, or float16 if this GPU only emulates bfloat16."""
        emulated = self.kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulated else torch.bfloat16

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 natively. CPUs need avx512_bf16 or amx."""
        if self.queues:
            return self.half_dtype == torch.bfloat16
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())

    @property
    def architecture(self) -> tuple[str, int]:
        """Name (sm_90, gfx942, cpu) and number of multiprocessors or compute units (CPU: 0)."""
        if not self.queues:
            return "cpu", 0
        properties = torch.cuda.get_device_properties(self.torch_device)
        count = int(properties.multi_processor_count)
        if self.kind == "hip":
            return str(properties.gcnArchName).split(":")[0], count
        return f"sm_{properties.major}{properties.minor}", count

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one block in bytes, as the driver reports it; 0 if it does not."""
        if self.kind != "cuda":
            return 0
        properties = torch.cuda.get_device_properties(self.torch_device)
        return int(getattr(properties, "shared_memory_per_block_optin", 0))

    @property
    def pci_address(self) -> str:
        """The PCI address of the GPU, such as `0000:3b:00.0`; "" on a CPU, or if torch does not name it."""
        if not self.queues:
            return ""
        properties: Any = torch.cuda.get_device_properties(self.torch_device)
        if not hasattr(properties, "pci_bus_id"):
            return ""
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    @property
    def toolkit(self) -> str:
        """Version of CUDA or ROCm that torch was built with; "" without."""
        return str(torch.version.hip or torch.version.cuda or "")

    def product_rows(self, rows: int) -> int:
        """Return the row count, at least `rows`, for which a product with a large matrix is fastest."""
        return CPU_PRODUCT_ROWS if not self.queues and CPU_PRODUCT_ROWS // 4 < rows < CPU_PRODUCT_ROWS else rows

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Isolate torch's random generators: draws inside do not affect draws outside."""
        with torch.random.fork_rng(devices=[self.torch_device] if self.queues else []):
            yield

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy a host array to the device, with the same shape and dtype. The copy never shares its memory."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if not self.queues:
            return host.clone()
        self.refuse_capture("an upload")
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def copy_numbers(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue target = source.

        Args:
            target: [n] int32, contiguous, on the device, or a lasting `host_buffer`.
            source: Likewise; exactly one of the two is on the device.
        """
        if self.runs_kernels and source.numel() <= KERNEL_COPY_MAX:
            from .copies import copy_numbers  # imports triton

            copy_numbers(target, source)
        else:
            target.copy_(source, non_blocking=True)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a contiguous tensor of unspecified contents.

        Its memory is released with the last reference (on a GPU, at the next `release_cached`). On the CPU it is a
        separate
        mapping: pages are committed as they are written, and the C allocator, which keeps freed memory, is bypassed.
        On a GPU it fills its segment of torch's allocator. Otherwise other tensors would take the rest of the segment
        and keep it from being released.
        """
        size = math.prod(shape) * dtype.itemsize
        if self.queues:
            whole = size if size < OWN_SEGMENT_BYTES else -(-size // SEGMENT_BYTES) * SEGMENT_BYTES
            held = torch.empty(whole, dtype=torch.uint8, device=self.torch_device)
            return held[:size].view(dtype).view(shape)
        try:
            memory = mmap.mmap(-1, size)
        except OSError as error:
            raise MemoryError(str(error)) from error
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def host_buffer(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate [size] in host memory that the device copies asynchronously; unspecified contents."""
        return torch.empty(size, dtype=dtype, pin_memory=self.queues)

    def enter_thread(self) -> None:
        """Make this the current device of another thread than the one that opened it."""
        if self.queues:
            torch.cuda.set_device(self.torch_device)

    def release_host_buffers(self) -> None:
        """Release unused `host_buffer` memory that torch keeps for the next one."""
        release = getattr(torch._C, "_host_emptyCache", None)
        if self.queues and release is not None:
            release()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory that does not keep it alive, for tensors in the memory of graphs.

        On a CPU, return the tensor itself.
        """
        return torch.as_tensor(CudaArray(tensor), device=self.torch_device) if self.queues else tensor

    def graph_memory(self) -> GraphMemory | None:
        """Return memory that several `capture` calls can share; None on a CPU.

        Graphs captured with the same memory must not be replayed at the same time, and keep nothing between replays.
        """
        if not self.queues:
            return None
        return GraphMemory.of(self.torch_device)

    def capture(self, run: Callable[[], None], memory: GraphMemory | None) -> Captured:
        """Call `run` twice; the second call only records the work that it queues. `run` must not wait for the device.

        Raises:
            RuntimeError: torch failed to capture; nothing is left behind.
        """
        if memory is None:
            run()
            return Captured(run, None)
        return captured_on(self.torch_device, run, memory)

    def refuse_capture(self, what: str) -> None:
        """Reject a copy from the host inside a graph, which would copy the same data at every replay.

        Raises:
            RuntimeError: A capture is running.
        """
        if self.queues and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{what} cannot be part of a graph")

    def survives(self) -> bool:
        """Return False if the device fails every call from now on, so that only a new process helps."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    def synchronize(self) -> None:
        """Wait until everything queued on the device is done."""
        if self.queues:
            torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated (CPU: available memory as the kernel reports it)."""
        if self.queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def total_bytes(self) -> int:
        """Return the bytes of the whole device (CPU: all memory of the machine)."""
        if self.queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def release_cached(self) -> None:
        """Release unused memory that the allocator caches: torch's on a GPU, the C library's on a CPU."""
        if self.queues:
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # only in glibc
            trim(0)

    def release_libraries(self) -> int:
        """Unmap resident library pages, which return on use. Return the number of bytes; 0 on a GPU."""
        return 0 if self.queues else release_library_pages()

    @property
    def cpu_kernels_problem(self) -> str:
        """Why Numba's CPU kernels cannot run on this device; "" if they can."""
        if self.queues:
            return f"{self.name} is not a CPU"
        return cpu_kernels_problem() if self.kernels else "kernels = 'reference'"

    def packing_problem(self, dtype: torch.dtype) -> str:
        """Return why oneDNN's products with packed weights of `dtype` cannot run on this device; "" if they can."""
        if self.queues:
            return f"{self.name} runs no kernels"
        if not torch.backends.mkldnn.is_available():
            return "this torch has no oneDNN"
        capability = torch.backends.cpu.get_cpu_capability()
        if capability not in PACKING_CAPABILITIES:
            return f"packed products were not measured on {capability} CPUs"
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return f"oneDNN has no bfloat16 products for {self.name}"
        return ""

    def quantising_problem(self, kind: str) -> str:
        """Return why products with "int8" or "int4" weights cannot run on this CPU; "" if they can."""
        if self.queues:
            return f"{self.name} multiplies quantised weights by kernels of Triton, which is not installed"
        if kind == "int8" and not torch.cpu._is_vnni_supported():  # otherwise sums of two products overflow 16 bits
            return f"{self.name} has no instructions for exact 8-bit products (avx512_vnni)"
        if kind == "int4" and not (torch.cpu._is_avx512_supported() and self.multiplies_bfloat16):
            return f"{self.name} has no instructions for bfloat16 products (avx512_bf16)"
        return ""

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Convert failures of torch or Triton while `doing` something, as `as_worker_error` does."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise as_worker_error(error, doing, self) from error
        except Exception as error:
            if not _is_tritons(error):
                raise
            raise as_worker_error(error, doing, self) from error


def as_worker_error(error: BaseException, doing: str, device: Device) -> WorkerError:
    """Return the typed error for an exception of torch or Triton.

    Returns:
        GpuError for a failure of the device, KernelError for a kernel that does not compile, else WorkerError.
    """
    if _is_tritons(error):
        return KernelError(f"{doing} failed on {device.name}: {compilers_words(error)}; {WAY_OUT}")
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    message = f"{doing} failed on {device.name}: {type(error).__name__}: {first_line}"
    accelerator_error: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
    device_failed = isinstance(error, (torch.OutOfMemoryError, accelerator_error))  # a CPU raises neither
    no_memory = first_line.startswith("Triton Error [") and "out of memory" in first_line  # no memory to load a kernel
    return GpuError(message) if device_failed or no_memory else WorkerError(message)


def compilers_words(error: BaseException) -> str:
    """Return the error's class and last line: a compiler quotes the source before it names the fault."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" \t^")]
    return ": ".join([type(error).__name__, *lines[-1:]])


def _is_tritons(error: BaseException) -> bool:
    """Return whether the error comes from Triton: its compiler, or a launch beyond the device's resources."""
    return type(error).__module__.partition(".")[0] == "triton"


def built_for_gpus() -> bool:
    """Return whether this build of torch supports GPUs, with or without a GPU present."""
    return torch.version.cuda is not None or torch.version.hip is not None


def open_device(kind: str = "auto", index: int = 0, kernels: bool = True, steady: bool = True) -> Device:
    """Open a device.

    A GPU becomes the process's current device and must stay it, because streams, graphs and Triton's launches use the
    current device.

    Args:
        kind: "cpu", "cuda", "hip", or "auto" (a GPU if this torch sees one, else the CPU).
        index: Which of several GPUs.
        kernels: See Device.
        steady: See Device; it also configures torch's products in this process.

    Raises:
        InvalidConfiguration: Names `device` if this torch has no such device, `device_index` past the last one.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("device", f"{kind!r} is not one of {', '.join(KINDS)}")
    gpu_kind = "hip" if torch.version.hip else "cuda"
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and gpu_count == 0):
        if steady:
            keep_from_tiles()
        return Device("cpu", torch.device("cpu"), _cpu_name(), kernels, steady)
    if gpu_count == 0:
        raise InvalidConfiguration("device", f"torch {torch.__version__} sees no {kind} device; use device = 'cpu'")
    if kind not in ("auto", gpu_kind):
        raise InvalidConfiguration("device", f"torch {torch.__version__} is built for {gpu_kind}, not {kind}")
    if not 0 <= index < gpu_count:
        problem = f"{index} must be less than the number of devices, {gpu_count}: each worker needs its own"
        raise InvalidConfiguration("device_index", f"{problem}; start fewer workers, or set the device of each")
    torch.cuda.set_device(index)  # Triton launches on the current device, wherever the tensors are
    sum_in_one_go(steady)
    return Device(gpu_kind, torch.device("cuda", index), torch.cuda.get_device_name(index), kernels, steady)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as cpuinfo:  # noqa: PTH123
            for line in cpuinfo:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "CPU"
