"""One face for CPU, CUDA and HIP. Nothing outside this room asks which of them it runs on.

torch names both CUDA and HIP devices "cuda"; `Device.kind` tells them apart where a person reads it.
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

from .capture import Captured, GraphMemory, Place, captured_on
from .file_pages import release_library_pages
from .host_kernel import host_kernel_problem
from .products import sum_in_one_go

KINDS = ("cpu", "cuda", "hip", "auto")
WAY_OUT = "set kernels = 'reference' to serve without Triton's kernels"
KERNEL_COPY_MAX = 1 << 18  # numbers; more go by a copy engine. Where that is the faster one was not measured
# Of torch's caching allocator (kMinLargeAlloc, kRoundLarge): from the one on, each allocation has a segment of its own,
# a multiple of the other.
OWN_SEGMENT_BYTES, SEGMENT_BYTES = 10 << 20, 2 << 20
# MKL multiplies 16 rows by a large vocabulary matrix in half the time it takes for 8 (49152 x 576 float32, 2 cores:
# 9.8 ms against 18.1 ms).
CPU_PRODUCT_ROWS = 16
PACKING_CAPABILITIES = ("AVX2", "AVX512")  # of a CPU, as torch calls them


@dataclass(frozen=True)
class Device:
    """A place where tensors live.

    kind: cpu, cuda or hip. torch_device: what torch calls it. name: for people ("NVIDIA H200"). kernels: False where
    none of Triton's kernels may run, whatever the device can. steady: what is computed of a row is to depend on that
    row alone, bit by bit, and not on how many others are beside it.
    """

    kind: str
    torch_device: torch.device
    name: str
    kernels: bool = True
    steady: bool = True

    @property
    def described(self) -> dict[str, str]:
        """kind and name, for whoever reads."""
        return {"kind": self.kind, "device": self.name}

    @property
    def queues(self) -> bool:
        """Whether what is called is queued and done later, as on every GPU."""
        return self.kind != "cpu"

    @property
    def computes_on_cores(self) -> bool:
        """Whether a model's computing takes the cores of the host, and not a GPU."""
        return not self.queues

    @property
    def runs_kernels(self) -> bool:
        """Whether Triton's kernels run here, and Triton is installed, and they are wanted."""
        return self.kernels and self.queues and importlib.util.find_spec("triton") is not None

    @property
    def widens_products(self) -> bool:
        """Whether torch has products of 16-bit numbers that are never rounded to 16 bits (CUDA, from torch 2.8 on)."""
        return self.kind == "cuda" and "dtype_out" in torch.ops.aten.mm.overloads()

    @property
    def gains_from_graphs(self) -> bool:
        """Whether replaying captured work is faster than queueing it again."""
        return self.queues

    @property
    def owns_memory(self) -> bool:
        """Whether its memory is its own, so that what is free tells what a pool may take; a CPU's is everyone's."""
        return self.queues

    @property
    def half_dtype(self) -> torch.dtype:
        """The 16 bits to serve in where nobody says which: bfloat16, unless this GPU only emulates it."""
        emulated = self.kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.float16 if emulated else torch.bfloat16

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether it has instructions for products of bfloat16: of CPUs those with avx512_bf16 or amx alone."""
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
        return CPU_PRODUCT_ROWS if not self.queues and CPU_PRODUCT_ROWS // 4 < rows < CPU_PRODUCT_ROWS else rows

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """What is drawn from torch's own generators inside does not show in what is drawn outside."""
        with torch.random.fork_rng(devices=[self.torch_device] if self.queues else []):
            yield

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies a host array here: same shape and dtype. Never shares memory with `array`."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        if not self.queues:
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
        """[size] in host memory that the device copies from and to without waiting; unspecified contents."""
        return torch.empty(size, dtype=dtype, pin_memory=self.queues)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, but this does not keep it: for what lies in the memory of graphs, which outlives its owner.

        On a CPU: the tensor itself.
        """
        return torch.as_tensor(Place(tensor), device=self.torch_device) if self.queues else tensor

    def graph_memory(self) -> GraphMemory | None:
        """What several `capture` calls pass to share memory; None on a CPU.

        Work captured with the same one must not be replayed at the same time, and keeps nothing between replays.
        """
        if not self.queues:
            return None
        return GraphMemory.of(self.torch_device)

    def capture(self, run: Callable[[], None], memory: GraphMemory | None) -> Captured:
        """Calls `run` twice, the second time only noting what it queues. It must not wait for the device.

        Errors: what torch raises; nothing stays behind then.
        """
        if memory is None:
            run()
            return Captured(run, None)
        return captured_on(self.torch_device, run, memory)

    def refuse_capture(self, what: str) -> None:
        """A graph must not hold a copy from the host: it would copy the same again at every replay. RuntimeError."""
        if self.queues and torch.cuda.is_current_stream_capturing():
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
        if self.queues:
            torch.cuda.synchronize(self.torch_device)

    def free_bytes(self) -> int:
        """Bytes that could still be allocated here (CPU: memory the kernel calls available)."""
        if self.queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[0])
        with open("/proc/meminfo", encoding="ascii") as meminfo:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def total_bytes(self) -> int:
        """Bytes of the whole device (CPU: all memory of the machine)."""
        if self.queues:
            return int(torch.cuda.mem_get_info(self.torch_device)[1])
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def release_cached(self) -> None:
        """Returns memory that the allocator keeps but nobody uses: torch's on a GPU, the C library's on a CPU."""
        if self.queues:
            torch.cuda.empty_cache()
        elif (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc alone has it
            trim(0)

    def release_libraries(self) -> int:
        """Unmaps what was touched of libraries, which comes back where it is used; how many bytes. Of a GPU: none."""
        return 0 if self.queues else release_library_pages()

    @property
    def host_kernels_problem(self) -> str:
        """Why kernels that Numba compiles for a CPU are not for this device; "" where they are."""
        if self.queues:
            return f"{self.name} is no CPU"
        return host_kernel_problem() if self.kernels else "kernels = 'reference'"

    def packing_problem(self, dtype: torch.dtype) -> str:
        """Why oneDNN's products with packed weights of `dtype` are not for this device; "" where they are."""
        if self.queues:
            return f"{self.name} runs no kernels"
        if not torch.backends.mkldnn.is_available():
            return "this torch has no oneDNN"
        capability = torch.backends.cpu.get_cpu_capability()
        if capability not in PACKING_CAPABILITIES:
            return f"packed products were not measured on {capability} CPUs"
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return f"oneDNN has no products of bfloat16 for {self.name}"
        return ""

    def quantising_problem(self, kind: str) -> str:
        """Why products with weights of "int8" or "int4" are not for this CPU; "" where they are."""
        if self.queues:
            return f"weights are quantised on CPUs alone, and this is {self.name}"
        if kind == "int8" and not torch.cpu._is_vnni_supported():  # without, sums of two products overflow 16 bits
            return f"{self.name} has no instructions for exact products of 8 bits (avx512_vnni)"
        if kind == "int4" and not (torch.cpu._is_avx512_supported() and self.multiplies_bfloat16):
            return f"{self.name} has no instructions for products of bfloat16 (avx512_bf16)"
        return ""

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


def built_for_gpus() -> bool:
    """Whether this build of torch has a GPU's part, be there a GPU or not."""
    return torch.version.cuda is not None or torch.version.hip is not None


def open_device(kind: str = "auto", index: int = 0, kernels: bool = True, steady: bool = True) -> Device:
    """Opens the device: "cpu", "cuda", "hip", or "auto" (a GPU if this torch sees one, else the CPU).

    kernels, steady: see Device; torch's products in this process are told of `steady`. `index` picks among several
    GPUs. The GPU becomes the process's current device and has to stay it, as streams, graphs and Triton's launches
    follow that: a process works with the GPU that it opened last.
    Errors: InvalidConfiguration names `device` when this torch has no such device, `device_index` past the last one.
    """
    if kind not in KINDS:
        raise InvalidConfiguration("device", f"{kind!r} is not one of {', '.join(KINDS)}")
    gpu_kind = "hip" if torch.version.hip else "cuda"
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and gpu_count == 0):
        return Device("cpu", torch.device("cpu"), _cpu_name(), kernels, steady)
    if gpu_count == 0:
        raise InvalidConfiguration("device", f"torch {torch.__version__} sees no {kind} device; use device = 'cpu'")
    if kind not in ("auto", gpu_kind):
        raise InvalidConfiguration("device", f"torch {torch.__version__} is built for {gpu_kind}, not {kind}")
    if not 0 <= index < gpu_count:
        problem = f"{index} is not below the number of devices, {gpu_count}: each worker takes one of its own"
        raise InvalidConfiguration("device_index", f"{problem}; start fewer, or say which device each one takes")
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
