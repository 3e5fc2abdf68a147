"""Peak rates of this device for reading memory and multiplying matrices, the divisor of other benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvforge.worker.device.device import Device

from .gpu_timing import measure_us

READ_BYTES = 8 << 30
# Shapes of the read: float32 numbers that a program has in flight at a time, how often, and its warps. The best is the
# roof.
WAYS = ((8192, 16, 8), (8192, 4, 8), (4096, 8, 4), (4096, 4, 8), (2048, 4, 4))
MATRIX = 8192


@dataclass(frozen=True)
class Roof:
    """read_bytes: bytes a second. flops: operations a second in bfloat16 matrix products with random data."""

    read_bytes: float
    flops: float

    def __str__(self) -> str:
        return f"read {self.read_bytes / 1e12:.2f} TB/s, bfloat16 matrix products {self.flops / 1e12:.0f} TFLOP/s"


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(numbers, sums, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([CHUNK], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        places = (program * CHUNKS + chunk) * CHUNK + tl.arange(0, CHUNK)
        total += tl.load(numbers + places, eviction_policy="evict_first")
    tl.store(sums + program, tl.sum(total, axis=0))


def measure_roof(device: Device) -> Roof:
    """Measure the rates; this takes a few seconds and READ_BYTES of device memory."""
    roof = Roof(read_bandwidth(device), _flops(device))
    device.release_cached()
    return roof


def read_bandwidth(device: Device) -> float:
    """Return the bytes per second of a kernel that only reads, the yardstick of all memory-bound kernels here."""
    numbers = torch.rand(READ_BYTES // 4, device=device.torch_device)
    best_us = min(_read_us(device, numbers, *way) for way in WAYS)
    return READ_BYTES / best_us * 1e6


def _read_us(device: Device, numbers: torch.Tensor, chunk: int, chunks: int, warps: int) -> float:
    programs = len(numbers) // (chunk * chunks)
    sums = torch.empty(programs, device=device.torch_device)

    def read() -> None:
        _read_kernel[(programs,)](numbers, sums, CHUNK=chunk, CHUNKS=chunks, num_warps=warps)

    return measure_us(device, read, 1)


def _flops(device: Device) -> float:
    left, right = (torch.randn((MATRIX, MATRIX), device=device.torch_device).bfloat16() for _ in range(2))

    def multiply() -> None:
        for _ in range(5):
            torch.matmul(left, right)

    return 2 * MATRIX**3 / measure_us(device, multiply, 5) * 1e6
