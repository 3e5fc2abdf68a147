"""Copies between the pool and the host file: whole blocks with their bits, and nothing else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from kvforge.protocol.configuration import convert
from kvforge.protocol.messages import MISSED_CHECKSUM, MISSED_TAG, Step
from kvforge.worker.attention.pool import KvGeometry, KvPool, LayerShape
from kvforge.worker.attention.quantised import as_bytes
from kvforge.worker.attention.states import StateTensor
from kvforge.worker.checksums import checksums, weights_of
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device import host_memory
from kvforge.worker.device.copy_batches import CopyBatches
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.host_memory import LockedPieces
from kvforge.worker.device.queue import DeviceEvent
from kvforge.worker.host_file import HostFile
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step import host_opening, host_transfers
from kvforge.worker.step.host_opening import begin_host_tier, open_host_tier
from kvforge.worker.step.host_transfers import HostTransfers, bad_host_copies
from kvforge.worker.step.loop import pool_local
from kvforge.worker.step.step_failures import HostCopyError
from tests.worker.device.batches import FakeRuntime
from tests.worker.device.registrar import FakeRegistrar
from tests.worker.step.test_runner import BLOCK_SIZE, PROMPTS, Bench, begin, i4

PROMPT = PROMPTS[0]  # 9 tokens: blocks 0 to 2 of slot 0, one token in the last
HOST_BLOCKS = 100
NONE: list[tuple[int, int, list[int], int]] = []


@pytest.fixture
def model(tiny: Callable[..., LoadedModel]) -> LoadedModel:
    return tiny("llama", block_size=BLOCK_SIZE)


@pytest.fixture
def bench(model: LoadedModel, tmp_path: Path) -> Iterator[Bench]:
    """Return a runner with a host file."""
    bench = Bench(model)
    bench.runner.host = host_of(bench.pool, tmp_path)
    yield bench
    bench.runner.host.close()
    bench.pool.close()


def host_of(pool: KvPool, folder: Path) -> HostTransfers:
    return HostTransfers(pool, HostFile(folder / "file", "layout", HOST_BLOCKS, pool.geometry.bytes_per_block))


def content(pool: KvPool, block: int) -> list[bytes]:
    return [cache[block].contiguous().view(torch.uint8).cpu().numpy().tobytes() for cache in pool.tensors()]


def copies(*rows: tuple[int, int, int]) -> Any:
    """Return copies of (block, host block, tag) as a step carries them."""
    return i4(*[number for block, host, tag in rows for number in (block, host, tag, -tag)])


# behaviour: a block comes back from the host with the same bits, and attention over it gives the same tokens
def test_blocks_come_back_with_the_same_bits(bench: Bench) -> None:
    whole = bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    before = [content(bench.pool, block) for block in range(3)]
    writes = copies((0, 70, 5), (1, 3, 6), (2, 99, 7))
    bench.runner.run(Step(0, host_writes=writes), np.zeros((0, 1), np.int32))
    reads = copies((40, 70, 5), (41, 3, 6))
    again = bench.run([(5, 8, PROMPT[8:], 1)], begins=(begin(5),), host_reads=reads)
    assert [content(bench.pool, block) for block in (40, 41)] == before[:2]
    assert (again.tokens.tolist(), again.logprobs.tobytes()) == (whole.tokens.tolist(), whole.logprobs.tobytes())
    assert again.errors == ()


def test_quantised_blocks_come_back_with_their_scales(tiny: Callable[..., LoadedModel], tmp_path: Path) -> None:
    model = tiny("llama", block_size=BLOCK_SIZE, kv_dtype="int8")
    pool = KvPool(model.geometry, 4, model.device)
    host = host_of(pool, tmp_path)
    for number, cache in enumerate(pool.tensors()):
        cache[1] = number + 1
    before = content(pool, 1)
    assert len({len(part) for part in before}) > 1, "numbers and scales"
    host.save(copies((1, 8, 3))).settle()
    assert not host.load(copies((2, 8, 3))).settle().size
    assert content(pool, 2) == before
    host.close()
    pool.close()


def pages_come_back(device: Device, kv_dtype: str, folder: Path) -> None:
    """Save and load pages of a model with windows, and of one with states."""
    shape, state = LayerShape(2, 16), StateTensor(0, "h", (1, 3, 5), torch.float32)
    for geometry in (
        KvGeometry((shape, replace(shape, window=16), replace(shape, window=16)), BLOCK_SIZE, kv_dtype),
        KvGeometry((shape, shape), BLOCK_SIZE, kv_dtype, (state,)),
    ):
        pool = KvPool(geometry, 6, device)
        host = host_of(pool, folder)
        for cache in pool.tensors():
            octets = as_bytes(cache)
            octets.copy_(torch.randint(0, 255, octets.shape, dtype=torch.uint8))
        before = content(pool, 1), content(pool, 3)
        host.save(copies((1, 7, 5), (3, 90, 6))).settle()
        pool.zero_blocks(i4(1, 2, 3, 4))
        loaded = host.load(copies((4, 7, 5), (2, 90, 6)))
        device.synchronize()
        assert not loaded.settle().size and (content(pool, 4), content(pool, 2)) == before
        host.close()
        pool.close()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_pages_of_models_with_windows_and_states_come_back(kv_dtype: str, cpu: Device, tmp_path: Path) -> None:
    pages_come_back(cpu, kv_dtype, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_pages_come_back_on_a_gpu(kv_dtype: str, in_memory: Path) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    pages_come_back(device, kv_dtype, in_memory)


def test_many_blocks_are_copied_in_parts(bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    for cache in bench.pool.tensors():
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    before = [content(bench.pool, block) for block in range(64)]
    rows = [*((block, 99 - block, block + 1) for block in range(64)), (63, 0, 65)]
    host._at_once = 16  # five parts
    host.save(copies(*rows)).settle()
    assert host.file.tags.nonzero()[0].tolist() == [0, *range(36, 100)]
    for cache in bench.pool.tensors():
        cache.zero_()
    assert not host.load(copies(*rows[:63], rows[64])).settle().size
    assert [content(bench.pool, block) for block in range(64)] == before


# behaviour: copies to the host come before all else, those from it before other copies and new tokens
def test_the_order_within_a_step(bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    old = content(bench.pool, 0)
    host.file.data[6], host.file.tags[6] = 3, 7
    pending = bench.runner.launch(
        Step(
            0,
            host_wipes=i4(6),
            host_writes=copies((0, 4, 9), (1, 5, 8)),
            zeros=i4(0, 1, 20),
            host_reads=copies((20, 4, 9)),
            copies=i4(20, 21, BLOCK_SIZE),
        ),
        np.zeros((0, 1), np.int32),
    )
    assert pending.host_copied.tolist() == [4, 5, 4, 6]
    assert not host.file.data[6].any() and not host.file.tags[6]
    bench.runner.finish(pending)
    assert content(bench.pool, 20) == content(bench.pool, 21) == old
    assert not any(any(part) for part in content(bench.pool, 0)), "zeroed after it was saved"


# behaviour: a half-written block is never read
def test_a_copy_that_fails_in_the_middle_leaves_no_tag(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    host = bench.runner.host
    assert host is not None
    host.save(copies((0, 4, 9))).settle()
    monkeypatch.setattr(host, "_copy", lambda *_args, **_named: torch.zeros(2) + torch.zeros(3))
    with pytest.raises(HostCopyError, match="a copy from or to the host failed"):
        bench.runner.launch(Step(0, host_writes=copies((1, 4, 7))), np.zeros((0, 1), np.int32))
    assert not host.file.tags[4]
    monkeypatch.undo()
    assert missed(bench, (1, 4, 9)) == [[4, MISSED_TAG]]


def test_a_block_has_no_tag_before_its_copy_is_settled(bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    host.save(copies((0, 4, 9))).settle()
    saved = host.save(copies((1, 4, 7)))
    assert not host.file.tags[4]
    saved.settle()
    assert host.file.tags[4]


# behaviour: a step's copies are measured, and there is no time of copies that it did not make
def test_copies_are_measured(bench: Bench) -> None:
    took = []
    for step in (Step(0, host_writes=copies((0, 4, 9))), Step(0, host_reads=copies((1, 4, 9))), Step(0)):
        pending = bench.runner.launch(step, np.zeros((0, 1), np.int32))
        bench.runner.finish(pending)
        took.append(pending.host_us)
    (write, without), (nothing, read), neither = took
    assert write > 0 < read and without == nothing == 0 and neither == (0, 0)


def missed(bench: Bench, *reads: tuple[int, int, int]) -> list[list[int]]:
    """Return what a step that reads these blocks did not find; it acknowledges all."""
    pending = bench.runner.launch(Step(0, host_reads=copies(*reads)), np.zeros((0, 1), np.int32))
    bench.runner.finish(pending)
    assert pending.host_copied.tolist() == [host for _, host, _ in reads]
    found: list[list[int]] = pending.host_missed.reshape(-1, 2).tolist()
    return found


# behaviour: a block with another tag, or with other bytes than were saved, is a miss
def test_a_block_with_another_tag_is_not_read(bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    host.save(copies((0, 4, 9), (1, 5, 8))).settle()
    before = content(bench.pool, 6)
    assert missed(bench, (7, 4, 9), (6, 5, 9)) == [[5, MISSED_TAG]]
    assert content(bench.pool, 6) == before and content(bench.pool, 7) == content(bench.pool, 0)


FLIPS, FLIPS_OF_RUNS = 1000, 40


def test_a_flipped_bit_is_a_miss(bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    host.save(copies((0, 4, 9), (1, 5, 8))).settle()
    random, whole = Random(0), host.file.data.nbytes
    block_bytes = host.file.data.shape[1]
    places = [
        5 * block_bytes,
        6 * block_bytes - 1,
        *(5 * block_bytes + random.randrange(block_bytes) for _ in range(FLIPS)),
    ]
    assert max(places) < whole
    for number, place in enumerate(places):
        bit = np.uint8(1 << random.randrange(8))
        host.file.memory[place] ^= bit
        if number < FLIPS_OF_RUNS:
            assert missed(bench, (7, 4, 9), (6, 5, 8)) == [[5, MISSED_CHECKSUM]], f"byte {place}, bit {bit}"
        else:
            assert host.load(copies((7, 4, 9), (6, 5, 8))).settle().tolist() == [5, MISSED_CHECKSUM], f"byte {place}"
        host.file.memory[place] ^= bit
    for numbers, reason in ((host.file.tags, MISSED_TAG), (host.file.sums, MISSED_CHECKSUM)):
        for bit in range(64):
            numbers[5] ^= np.uint64(1 << bit)
            assert missed(bench, (7, 4, 9), (6, 5, 8)) == [[5, reason]], f"bit {bit}"
            numbers[5] ^= np.uint64(1 << bit)
    assert missed(bench, (7, 4, 9), (6, 5, 8)) == []


def test_memory_that_the_device_cannot_reach_is_copied_through_buffers(bench: Bench, model: LoadedModel) -> None:
    host = bench.runner.host
    assert host is not None
    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    before = [content(bench.pool, block) for block in range(3)]
    host._at_once = 1
    for buffer in (*host._out_ring, *host._in_ring):
        buffer.bounce = torch.zeros_like(buffer.rows)
    host.save(copies((0, 4, 9), (1, 5, 8), (2, 99, 7))).settle()
    assert not host.load(copies((7, 4, 9), (8, 5, 8), (9, 99, 7))).settle().size
    assert [content(bench.pool, block) for block in (7, 8, 9)] == before


def locking(pool: KvPool, folder: Path, registrar: FakeRegistrar, hosts: int = 2048) -> HostTransfers:
    """Return copies from and to a file that is page-locked in pieces of a few blocks."""
    file = HostFile(folder / "locked", "layout", hosts, pool.geometry.bytes_per_block)
    registrar.base = file.memory.ctypes.data
    host = HostTransfers(pool, file, LockedPieces(registrar, file.memory, pool.geometry.bytes_per_block, 1))
    host.lock_next()
    return host


# behaviour: each copy is within a piece that was locked before it, and a piece is locked once
def test_pieces_are_locked_before_their_first_copy(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar, copied = FakeRegistrar(), list[int]()
    host = locking(bench.pool, tmp_path, registrar)
    assert registrar.places == [0]
    each = host._memory.piece_blocks
    assert each > 1, "runs of blocks that cross a border"
    run = HostTransfers._copy

    def checked(self: HostTransfers, hosts: Any, rows: torch.Tensor, into_file: bool) -> None:
        for block in hosts.tolist():
            size = bench.pool.geometry.bytes_per_block
            assert registrar.holds(self.file.data[block].ctypes.data, size), "a copy of memory that is not locked"
        copied.extend(hosts.tolist())
        run(self, hosts, rows, into_file)

    monkeypatch.setattr(HostTransfers, "_copy", checked)
    targets: list[tuple[int, int]] = []
    real = torch.Tensor.copy_

    def noted(self: torch.Tensor, source: torch.Tensor, **more: Any) -> torch.Tensor:
        targets.append((self.data_ptr(), self.numel()))
        return real(self, source, **more)

    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    before = [content(bench.pool, block) for block in range(3)]
    border = 3 * each
    monkeypatch.setattr(torch.Tensor, "copy_", noted)
    host.save(copies((0, border - 1, 9), (1, border, 8), (2, border + 1, 7))).settle()
    monkeypatch.setattr(torch.Tensor, "copy_", real)
    begin_at, end_at = host.file.memory.ctypes.data, host.file.memory.ctypes.data + host.file.memory.nbytes
    into_file = [(at, size) for at, size in targets if begin_at <= at < end_at]
    assert len(into_file) == 2 and all(registrar.holds(at, size) for at, size in into_file), "cut at the border"
    assert registrar.places == [0, 2, 3]
    assert not host.load(copies((7, border - 1, 9), (8, border, 8), (9, border + 1, 7))).settle().size
    assert [content(bench.pool, block) for block in (7, 8, 9)] == before
    assert registrar.places == [0, 2, 3] and copied == 2 * [border - 1, border, border + 1]
    while host.lock_next():
        pass
    assert sorted(registrar.places) == list(range(len(registrar.places)))
    host.close()
    assert not registrar.locked


# behaviour: the copies of a buffer are one call, each within a locked piece, and blocks come back with the same bits
def test_batches_of_copies(bench: Bench, tmp_path: Path) -> None:
    registrar, runtime = FakeRegistrar(), FakeRuntime()
    host = locking(bench.pool, tmp_path, registrar)
    host._batches = CopyBatches(runtime, lambda: 3)
    size, border = bench.pool.geometry.bytes_per_block, 3 * host._memory.piece_blocks
    for number, cache in enumerate(bench.pool.tensors()):
        cache[:5] = torch.arange(5).view(-1, *[1] * (cache.dim() - 1)) + number
    before = [content(bench.pool, block) for block in range(5)]
    hosts = [border - 1, border, border + 1, 4, 2]
    host.save(copies(*((block, place, 9) for block, place in enumerate(hosts)))).settle()
    assert not host.load(copies(*((block + 7, place, 9) for block, place in enumerate(hosts)))).settle().size
    assert [content(bench.pool, block) for block in range(7, 12)] == before
    (written, _, sizes), (_, read, more_sizes) = runtime.calls
    assert sizes == more_sizes == [size, 2 * size, size, size], "cut at the border, joined behind it"
    assert written == read and all(map(registrar.holds, written, sizes))
    host.close()


# behaviour: once a piece is refused all copies take a detour, the bits stay the same, and the log says it once
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_copies_go_on_after_a_refusal(
    refused: int, bench: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registrar = FakeRegistrar(refused={refused})
    host = locking(bench.pool, tmp_path, registrar)
    bench.run([(0, 0, PROMPT, 1)], begins=(begin(0),))
    before = [content(bench.pool, block) for block in range(3)]
    far = 2047
    host._at_once = 1
    host.save(copies((0, 4, 9), (1, far, 8), (2, 900, 7))).settle()
    assert not host.load(copies((7, 4, 9), (8, far, 8), (9, 900, 7))).settle().size
    assert [content(bench.pool, block) for block in (7, 8, 9)] == before
    assert host.problem == "refused" and not host.lock_next() and len(registrar.calls) == refused + 1
    assert [record.message for record in caplog.records if "copies take a detour" in record.message] == [
        f"host tier: {bench.pool.device.name} refuses the file's memory (refused): copies take a detour"
    ]
    host.close()
    assert not registrar.locked


def settings_of(folder: Path, blocks: int, each: int, **more: Any) -> WorkerConfig:
    own = {"name": "w", "model": "m", "runtime_dir": str(folder), "host_dir": str(folder), "host_bytes": blocks * each}
    return convert({**own, **more}, WorkerConfig)


# behaviour: an empty file is locked as a whole before the first step
def test_no_step_locks_pieces_of_an_empty_file(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar = FakeRegistrar()
    monkeypatch.setattr(host_opening, "registrar_of", lambda _device: registrar)
    monkeypatch.setattr(host_transfers, "registrar_of", lambda _device: registrar)
    monkeypatch.setattr(host_transfers, "LockedPieces", lambda *arguments: LockedPieces(*arguments, 1))
    pool, locked = KvPool(model.geometry, 4, model.device), list[int]()
    config = settings_of(tmp_path, 2048, model.geometry.bytes_per_block)
    for _ in range(2):
        host = open_host_tier(config, model, pool)
        assert host is not None and host._memory.counts[1] > 2
        locked.append(len(registrar.locked))
        whole = host._memory.counts[1]
        host.close()
    assert locked == [whole, 0], "the second one found the file"
    pool.close()


# behaviour: a successor locks the file while it loads its model, and serves from it if the layout is the same
@pytest.mark.parametrize("change", ["", "layout", "blocks", "in use", "none"])
def test_a_successor_locks_the_file_before_its_model_is_there(
    change: str, model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registrar = FakeRegistrar()
    monkeypatch.setattr(host_opening, "registrar_of", lambda _device: registrar)
    pool = KvPool(model.geometry, 4, model.device)
    config = settings_of(tmp_path, HOST_BLOCKS, model.geometry.bytes_per_block)
    if change != "none":
        first = open_host_tier(config, model, pool)
        assert first is not None
        first.save(copies((1, 8, 3))).settle()
        identity = first.file.identity
        if change != "in use":
            first.close()
    if change == "layout":
        config = settings_of(tmp_path, HOST_BLOCKS, model.geometry.bytes_per_block, determinism="fast")
    elif change == "blocks":
        config = settings_of(tmp_path, HOST_BLOCKS + 1, model.geometry.bytes_per_block)
    ahead = begin_host_tier(config, model.device)
    assert (ahead is not None) == (change in ("", "layout"))
    if change == "in use":
        assert first is not None
        first.close()
    host = open_host_tier(config, model, pool, ahead)
    assert host is not None
    if ahead is not None:
        ahead.end()
    same = change in ("", "in use")
    assert host.file.found == same
    if same:
        assert host.file.identity == identity and not host.load(copies((2, 8, 3))).settle().size
    assert (host._memory is (ahead.pieces if ahead is not None else None)) == (change == "")
    host.close()
    assert not registrar.locked
    HostFile(host.file.path, "layout", 1, 8, lock_wait_s=0.0).close()
    pool.close()


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in the host's memory: CUDA refuses to register a file on a disk (error 1)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvforge-test-") as folder:
        yield Path(folder)


# behaviour: copies run beside later work, which may overwrite the blocks
@pytest.mark.gpu
@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_copies_run_beside_the_work_of_a_gpu(
    kv_dtype: str, registered: bool, in_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("auto")
    if not device.runs_kernels:
        pytest.skip("no GPU here")
    if not registered:
        monkeypatch.setattr(host_memory.DeviceRegistrar, "register", lambda *_: "refused")
    geometry = KvGeometry((LayerShape(8, 128),) * 4, 16, kv_dtype)
    blocks, hosts = 300, 400
    pool, copied = KvPool(geometry, blocks, device), np.arange(blocks)
    host = HostTransfers(pool, HostFile(in_memory / "file", "layout", hosts, geometry.bytes_per_block))
    host.lock_next()
    assert bool(host.problem) != registered, host.problem
    assert device.kind != "cuda" or host._batches is not None
    host._at_once = 8  # more parts than buffers
    octets = [cache.view(torch.uint8) for cache in pool.tensors()]
    for each in octets:
        each.random_(0, 256)
    before = [each.cpu() for each in octets]
    places = np.random.default_rng(0).permutation(hosts)[:blocks].tolist()
    saved = host.save(copies(*((block, places[block], block + 1) for block in copied.tolist())))
    for each in octets:
        each.zero_()  # queued behind the copies
    saved.settle()
    loaded = host.load(copies(*((block, places[block], block + 1) for block in copied.tolist())))
    DeviceEvent(device).wait()
    assert not loaded.settle().size
    assert all(torch.equal(each.cpu(), want) for each, want in zip(octets, before, strict=True))
    rows = np.concatenate([each.numpy().reshape(blocks, -1) for each in before], axis=1)
    assert np.array_equal(host.file.data[places], rows)
    assert np.array_equal(host.file.sums[places], checksums(rows, weights_of(rows.shape[1])))
    host.file.memory[places[7] * geometry.bytes_per_block + 3] ^= 1
    again = host.load(copies((1, places[7], 8), (2, places[8], 9)))
    DeviceEvent(device).wait()
    assert again.settle().tolist() == [places[7], MISSED_CHECKSUM]
    host.close()
    pool.close()


@pytest.mark.parametrize(
    ("field", "rows", "problem"),
    [
        ("host_writes", [(64, 0, 1)], "outside the pool's 64"),
        ("host_writes", [(-1, 0, 1)], "outside the pool's 64"),
        ("host_reads", [(0, 100, 1)], "or the file's 100"),
        ("host_reads", [(0, -1, 1)], "or the file's 100"),
        ("host_writes", [(0, 3, 1), (1, 3, 2)], "writes a block twice"),
        ("host_reads", [(2, 3, 1), (2, 4, 2)], "writes a block twice"),
    ],
)
def test_a_wrong_block_is_never_written(field: str, rows: Any, problem: str, bench: Bench) -> None:
    host = bench.runner.host
    assert host is not None
    bench.pool.zero_blocks(np.arange(64, dtype=np.int32))
    step = Step(0, **{field: copies(*rows)})
    fault = bad_host_copies(step, 64, HOST_BLOCKS)
    assert fault is not None and fault.field == field and problem in str(fault)
    pending = bench.runner.launch(step, np.zeros((0, 1), np.int32))
    assert not pending.host_copied.size, "the coordinator ends a worker that does not acknowledge"
    bench.runner.finish(pending)
    assert not host.file.data.any() and not host.file.tags.any()


def test_copies_without_a_file_and_in_other_forms_are_refused() -> None:
    assert "no host file" in str(bad_host_copies(Step(0, host_writes=copies((0, 0, 1))), 4, 0))
    for wipes in (i4(4), i4(-1)):
        assert "outside the file's 4" in str(bad_host_copies(Step(0, host_wipes=wipes), 4, 4))
    assert "groups of 4" in str(bad_host_copies(Step(0, host_reads=i4(1, 2, 3)), 4, 4))
    assert bad_host_copies(Step(0, host_reads=copies((1, 0, 1), (2, 0, 1))), 4, 4) is None


def test_ids_become_those_of_the_workers_own_pool() -> None:
    step = pool_local(Step(0, host_writes=copies((12, 3, 1)), host_reads=copies((15, 4, 2))), 10)
    assert step.host_writes.tolist() == copies((2, 3, 1)).tolist()
    assert step.host_reads.tolist() == copies((5, 4, 2)).tolist()


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_blocks_come_back_with_those_of_a_draft_model(window: int, kv_dtype: str, cpu: Device, tmp_path: Path) -> None:
    """In a pool of pages too, and without its scratch blocks."""
    draft = KvGeometry((LayerShape(1, 8),), BLOCK_SIZE, kv_dtype)
    layers = (LayerShape(2, 16), LayerShape(2, 16, window=window))
    pool = KvPool(KvGeometry(layers, BLOCK_SIZE, kv_dtype, beside=draft), 6, cpu)
    assert pool.beside is not None
    for number, cache in enumerate(pool.tensors()):
        cache.view(torch.uint8).random_(generator=torch.Generator().manual_seed(number))
    before = [content(pool, block) for block in range(6)]
    assert sum(map(len, before[0])) == pool.geometry.bytes_per_block
    host = host_of(pool, tmp_path)
    host.save(copies((1, 70, 5), (5, 3, 6))).settle()
    assert not host.load(copies((2, 70, 5), (0, 3, 6))).settle().size
    assert [content(pool, block) for block in (2, 0)] == [before[1], before[5]]
    assert [content(pool, block) for block in (1, 3, 4, 5)] == [before[block] for block in (1, 3, 4, 5)]
    host.close()
    pool.close()
