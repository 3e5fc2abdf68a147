"""Source, compilation, cache and execution of the CPU's kernels."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from kvforge.models import code_cache
from kvforge.worker.cpu import kernel as cpu_kernel
from kvforge.worker.cpu.kernel import Calls, CpuKernel, cpu_kernels_problem, part
from kvforge.worker.cpu.rows import load, load_any, narrow, read_any, store, widen
from kvforge.worker.cpu.vector import CODES, exp, next_ticket, read_integer, write_float, write_integer

pytestmark = pytest.mark.skipif(bool(cpu_kernels_problem()), reason=cpu_kernels_problem())


def forget() -> None:
    """Clear the cache of checked folders."""
    cpu_kernel._kept_in.cache_clear()
    code_cache._private.cache_clear()


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def convert(arguments: int) -> None:
    """Convert every number to float32, alone and by vectors; and a float back."""
    source, code, wide, single, back, count = (
        read_integer(arguments + 16),
        read_integer(arguments + 24),
        read_integer(arguments + 32),
        read_integer(arguments + 40),
        read_integer(arguments + 48),
        read_integer(arguments + 56),
    )
    widen(source, code, wide, count, np.float32(1))
    for index in range(count):
        write_float(single + 4 * index, read_any(source + index * read_integer(arguments + 64), code))
    if code < 3:
        narrow(wide, back, code, count, np.float32(1))


CONVERT = CpuKernel(convert, "source code wide single back count item_bytes")


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("count", [5, 16, 65536])
def test_numbers_become_float32_and_come_back(dtype: torch.dtype, count: int) -> None:
    bits = torch.arange(count, dtype=torch.int32)
    if dtype == torch.float32:
        numbers = (bits * 65536 + 12345).view(torch.float32)
    elif dtype.itemsize == 2:
        numbers = bits.to(torch.int16).view(dtype)
    else:
        numbers = bits.to(torch.uint8).view(dtype)
    wide, single, back = torch.empty(count), torch.empty(count), torch.empty(count, dtype=dtype)
    CONVERT(
        1,
        source=numbers.data_ptr(),
        code=CODES[dtype],
        wide=wide.data_ptr(),
        single=single.data_ptr(),
        back=back.data_ptr(),
        count=count,
        item_bytes=dtype.itemsize,
    )
    want = numbers.float()
    assert torch.equal(wide.view(torch.int32)[~want.isnan()], want.view(torch.int32)[~want.isnan()])
    assert torch.equal(wide.isnan(), want.isnan()) and torch.equal(single.isnan(), want.isnan())
    assert torch.equal(single[~want.isnan()], want[~want.isnan()])
    if dtype in FLOATS:
        assert torch.equal(back.isnan(), want.isnan()) and torch.equal(back[~want.isnan()], numbers[~want.isnan()])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounding_is_to_nearest_ties_to_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator, dtype=torch.int64).int()
    ties = torch.arange(1 << 15, dtype=torch.int32) * 65536 + 32768
    source = torch.cat((numbers, ties)).view(torch.float32)
    back = torch.zeros(len(source) + 16, dtype=dtype)
    kernel = CpuKernel(round_row, "source target code count")
    want = source.to(dtype)
    for count in (len(source), 21, 5):  # by vectors, with a last one that overlaps, and number by number
        back[:] = -1
        kernel(1, source=source[-count:].data_ptr(), target=back.data_ptr(), code=CODES[dtype], count=count)
        got, wanted = back[:count], want[-count:]
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got[~wanted.isnan()], wanted[~wanted.isnan()])
        assert back[count:].eq(-1).all(), "written behind the row"


def round_row(arguments: int) -> None:
    source, target = read_integer(arguments + 16), read_integer(arguments + 24)
    narrow(source, target, read_integer(arguments + 32), read_integer(arguments + 40), np.float32(1))


def exponentiate(arguments: int) -> None:
    source, target = read_integer(arguments + 16), read_integer(arguments + 24)
    for at in range(0, 4 * read_integer(arguments + 32), 64):
        store(target + at, exp(load(source + at)))


def test_exp_is_right_to_the_last_bits() -> None:
    kernel = CpuKernel(exponentiate, "source target count")
    x = torch.cat((torch.linspace(-87.2, 88.3, (1 << 18) - 16), torch.tensor([0.0, -0.0, 1e-30, -1e-8]).repeat(4)))
    found = torch.empty_like(x)
    kernel(1, source=x.data_ptr(), target=found.data_ptr(), count=len(x))
    want = x.double().exp()
    assert float(((found.double() - want) / want).abs().max()) < 2 * 2.0**-23
    assert found[-16:].tolist() == x[-16:].exp().tolist()
    nan, inf = float("nan"), float("inf")
    edges = torch.tensor([nan, inf, -inf, 89.0, -88.0, -1e30, 1e30, 0.0]).repeat(2)
    kernel(1, source=edges.data_ptr(), target=found.data_ptr(), count=16)
    assert str(found[:8].tolist()) == str([nan, inf, 0.0, inf, 0.0, 0.0, inf, 1.0])


def count_tickets(arguments: int) -> None:
    me, last = next_ticket(arguments + 8), read_integer(arguments + 24)
    counts = read_integer(arguments + 16)
    while next_ticket(arguments) < last:
        write_integer(counts + 8 * me, read_integer(counts + 8 * me) + 1)


def test_each_ticket_is_taken_once_by_any_number_of_threads() -> None:
    kernel = CpuKernel(count_tickets, "counts last")
    for threads in (1, 2, 5):
        counts = torch.zeros(8, dtype=torch.int64)
        kernel(threads, counts=counts.data_ptr(), last=1000)
        assert int(counts.sum()) == 1000


def test_without_openmp_there_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert cpu_kernel.threads_for(1e6) == 4 and cpu_kernel.threads_for(1.0) == 1

    def nothing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    cpu_kernel._parallel.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", nothing)
    assert cpu_kernel.threads_for(1e6) == 1
    cpu_kernel._parallel.cache_clear()


def test_what_is_compiled_is_kept_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path / "cache"))
    counts = torch.zeros(1, dtype=torch.int64)
    for hits in (0, 1):
        kernel = CpuKernel(count_tickets, "counts last")
        kernel(1, counts=counts.data_ptr(), last=10)
        assert kernel._compiled.cache_hits == hits
    forget()
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path / "file"))
    kernel = CpuKernel(count_tickets, "counts last")
    kernel(1, counts=counts.data_ptr(), last=10)
    assert kernel._compiled.cache_hits == 0 and int(counts) == 30
    forget()


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is locked while one compiles; a process that holds it for too long is not waited for."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))
    forget()
    compile_kernel, locked = CpuKernel._compile, []

    def compile_and_look(kernel: CpuKernel, folder: Path | None) -> Any:
        assert folder is not None
        other = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked.append(False)
        except BlockingIOError:
            locked.append(True)
        finally:
            os.close(other)
        return compile_kernel(kernel, folder)

    monkeypatch.setattr(CpuKernel, "_compile", compile_and_look)
    assert CpuKernel(count_tickets, "counts last")._compiled.cache_hits == 0
    (index,) = tmp_path.rglob("*.nbi")
    held = os.open(next(path for path in index.parents if path.parent.name == "numba"), os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(cpu_kernel, "OTHERS_S", 0.05)
        assert CpuKernel(count_tickets, "counts last")._compiled.cache_hits == 1
    finally:
        os.close(held)
    assert locked == [True, True]
    forget()


class Planted:
    """A pickle that runs code when it is loaded, as another user might plant it."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


@pytest.mark.parametrize("open_to_all", ["", "numba"])
def test_what_others_can_write_is_not_read_and_the_users_own_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_to_all: str
) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(shared))
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    counts = torch.zeros(1, dtype=torch.int64)
    forget()
    CpuKernel(count_tickets, "counts last")(1, counts=counts.data_ptr(), last=10)
    (index,) = shared.rglob("*.nbi")
    index.write_bytes(pickle.dumps(Planted(tmp_path / "trace")))
    (shared / open_to_all).chmod(0o777)
    for hits in (0, 1):
        forget()
        kernel = CpuKernel(count_tickets, "counts last")
        kernel(1, counts=counts.data_ptr(), last=10)
        assert kernel._compiled.cache_hits == hits
    assert int(counts) == 30
    assert not (tmp_path / "trace").exists()
    assert len(list((own / "kvforge" / "numba").rglob("*.nbi"))) == 1
    assert f"not using the compiled code in {shared / 'numba'}: KVFORGE_CACHE_DIR: " in caplog.text
    assert "is writable by others" in caplog.text
    (own / "kvforge").chmod(0o777)
    forget()
    kernel = CpuKernel(count_tickets, "counts last")
    kernel(1, counts=counts.data_ptr(), last=10)
    assert (kernel._compiled.cache_hits, int(counts)) == (0, 40)
    forget()


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_what_is_kept_and_damaged_is_made_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, left: float
) -> None:
    """As after a power failure."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))
    forget()
    counts = torch.zeros(1, dtype=torch.int64)
    CpuKernel(count_tickets, "counts last")(1, counts=counts.data_ptr(), last=10)
    (damaged,) = tmp_path.rglob(f"*.{kind}")
    damaged.write_bytes(damaged.read_bytes()[: int(left * damaged.stat().st_size)])
    for hits in (0, 1):
        kernel = CpuKernel(count_tickets, "counts last")
        kernel(1, counts=counts.data_ptr(), last=10)
        assert kernel._compiled.cache_hits == hits
    assert int(counts) == 30
    forget()


def test_where_nothing_more_can_be_written_it_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))
    forget()
    counts = torch.zeros(1, dtype=torch.int64)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        kernel = CpuKernel(count_tickets, "counts last")
        kernel(1, counts=counts.data_ptr(), last=10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kernel._compiled.cache_hits == 0 and int(counts) == 10
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    forget()


def test_parts_are_compiled_as_they_are_written() -> None:
    assert part(lambda a, b: a // b)(7, 2) == 3 and load_any.py_func.__doc__ == "16 numbers."


def test_a_missing_or_unknown_argument_is_named() -> None:
    kernel = CpuKernel(round_row, "source target code count")
    with pytest.raises(TypeError, match="CPU kernel round_row: expected source, target, code, count; got source"):
        kernel(1, source=0)
    with pytest.raises(TypeError, match="CPU kernel round_row: missing argument 'count'"):
        kernel(1, source=0, target=0, code=0, rows=0)
    with pytest.raises(TypeError, match=r"CPU kernel round_row: unknown arguments \['rows'\]"):
        Calls(kernel, [{"source": 0, "rows": 1}])
