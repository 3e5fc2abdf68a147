"""Where the memory of a host file is placed, and its description in the log and in `kvforge health`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import convert

from kvforge.worker import numa
from kvforge.worker.attention.pool import KvPool
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.device import Device
from kvforge.worker.device.file_pages import huge_bytes
from kvforge.worker.device.host_memory import LockedPieces
from kvforge.worker.host_file import HostFile
from kvforge.worker.loading.model import LoadedModel
from kvforge.worker.step import host_opening
from kvforge.worker.step.host_opening import begin_host_tier, open_host_tier
from kvforge.worker.step.host_placement import HostPlacement
from tests.worker.device.registrar import FakeRegistrar
from tests.worker.memory_files import MEMORY, kernel_huge_bytes, memory_folder


def gpu(address: str = "0000:3b:00.0") -> Any:
    return SimpleNamespace(computes_on_cores=False, pci_address=address)


class Host:
    """A host with memory on some nodes, GPUs and CPUs on some of these, and the calls that place memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: str = "", away: int = 0) -> None:
        self.memory, self.gpus, self.cpus = [0, 1], {"0000:3b:00.0": 0, "0000:86:00.0": 1}, 1
        self.refused, self.away = refused, away
        self.placed: list[tuple[int, int, bool]] = []
        monkeypatch.setattr(numa, "memory_nodes", lambda: self.memory)
        monkeypatch.setattr(numa, "node_of_pci", lambda address: self.gpus.get(address, numa.NO_NODE))
        monkeypatch.setattr(numa, "node_of_cpus", lambda _cpus: self.cpus)
        monkeypatch.setattr(numa, "prefer_node", self._prefer)
        monkeypatch.setattr(numa, "nodes_of", self._nodes_of)

    def _prefer(self, _address: int, size: int, node: int, move: bool = False) -> str:
        self.placed.append((size, node, move))
        if not self.refused and move:
            self.away = 0
        return self.refused

    def _nodes_of(self, addresses: list[int]) -> list[int]:
        return [1] * self.away + [0] * (len(addresses) - self.away)


# behaviour: the file of each rank lies on the node of its own GPU, that of a worker on a CPU on the node of its CPUs
def test_the_node_of_a_device(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    Host(monkeypatch)
    placements = [HostPlacement(device) for device in (gpu(), gpu("0000:86:00.0"), cpu)]
    assert [(each.node, each.problem) for each in placements] == [(0, ""), (1, ""), (1, "")]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": [0]}, "one NUMA node"),
        ({"memory": []}, "the system names no NUMA nodes"),
        ({"gpus": {}}, "the system names no NUMA node of the GPU at 0000:3b:00.0"),
        ({"gpus": {"0000:3b:00.0": 7}}, "NUMA node 7 of the device has no memory"),
    ],
)
def test_a_file_without_a_node_is_left_where_it_is(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = Host(monkeypatch)
    for name, value in change.items():
        setattr(host, name, value)
    placement = HostPlacement(gpu())
    file = HostFile(tmp_path / "file", "layout", 5, 48, place=placement.place)
    assert (placement.node, placement.problem) == (numa.NO_NODE, words)
    assert not host.placed and placement.describe(file).endswith(f"; {words}")
    file.close()


def test_cpus_of_several_nodes_name_none(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    Host(monkeypatch).cpus = numa.NO_NODE
    assert HostPlacement(cpu).problem == (
        "its CPUs are of several NUMA nodes: set CPUAffinity= of its unit to those of one"
    )


# behaviour: a new file is placed before its memory is allocated
def test_a_new_file_is_placed_before_it_has_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host, allocated = Host(monkeypatch), list[int]()
    placement = HostPlacement(gpu())

    def place(memory: Any, found: bool) -> None:
        allocated.append((tmp_path / "file").stat().st_blocks)
        placement.place(memory, found)

    file = HostFile(tmp_path / "file", "layout", 5, 48, place=place)
    assert allocated == [0] and host.placed == [(file.whole.nbytes, 0, False)]
    assert (tmp_path / "file").stat().st_blocks > 0
    assert placement.describe(file).endswith("; 100 % on NUMA node 0")
    file.close()


# behaviour: pages that an earlier worker left on another node are moved once, and their content stays
@pytest.mark.parametrize("away", [0, 2])
def test_the_file_of_an_earlier_worker_is_moved(
    away: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "worker")
    first = HostFile(tmp_path / "file", "layout", 600, 48)
    first.data[599], first.tags[599] = 4, 9
    first.close()
    host = Host(monkeypatch, away=away)
    placement = HostPlacement(gpu())
    second = HostFile(tmp_path / "file", "layout", 600, 48, place=placement.place)
    assert second.found and (second.data[599] == 4).all() and second.tags[599] == 9
    assert [move for *_, move in host.placed] == ([False, True] if away else [False])
    moved = [record.message for record in caplog.records if "moved the file to NUMA node 0" in record.message]
    assert len(moved) == (1 if away else 0) and all(line.endswith(", now 100 % there") for line in moved)
    second.close()


# behaviour: a container that may not place memory serves, and the reason is shown
def test_a_refused_placement_is_described(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = Host(monkeypatch, refused="not permitted (a container needs CAP_SYS_NICE)", away=2)
    placement = HostPlacement(gpu())
    file = HostFile(tmp_path / "file", "layout", 5, 48, place=placement.place)
    assert placement.describe(file).endswith("; NUMA node 0 is refused: not permitted (a container needs CAP_SYS_NICE)")
    assert len(host.placed) == 1
    file.close()


# behaviour: the bytes in huge pages are those that the kernel counts, for the maker of a file and for its successor
@pytest.mark.skipif(not Path(MEMORY).is_dir(), reason="there is no folder in memory")
def test_the_description_counts_what_the_kernel_counts(cpu: Device) -> None:
    placement, figures = HostPlacement(cpu), list[int]()
    with memory_folder() as folder:
        for _ in range(2):
            file = HostFile(folder / "file", "layout", 3, 1 << 20, place=placement.place)
            text, address = placement.describe(file), file.whole.ctypes.data
            counted = kernel_huge_bytes(address)
            assert counted == huge_bytes(address, file.whole.nbytes)
            assert text.startswith(f"{counted >> 20} of 4 MiB in huge pages")
            figures.append(counted)
            assert ("(" in text.partition(";")[0]) == (counted < 2 << 20), "a reason, unless all that can be is huge"
            file.close()
    assert figures[0] == figures[1], "the successor has mapped it before it counts"


# behaviour: a file that was made without huge pages keeps its small ones, and the log names the remedy
def test_a_file_with_small_pages_names_its_remedy(cpu: Device, tmp_path: Path) -> None:
    file = HostFile(tmp_path / "file", "layout", 5, 48)
    file.found = True
    assert "(an earlier worker made the file: remove it, and start the worker again)" in HostPlacement(cpu).describe(
        file
    )
    file.close()


# behaviour: the log and `kvforge health` say how the file of a worker lies, and it is placed before it is page-locked
def test_a_worker_describes_its_file(
    tiny: Callable[..., LoadedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "worker")
    model, host = tiny("llama"), Host(monkeypatch)
    host.cpus = 0
    registrar, pool = FakeRegistrar(), KvPool(model.geometry, 4, model.device)
    size = 8 * model.geometry.bytes_per_block
    own = {"name": "w", "model": "m", "runtime_dir": str(tmp_path), "host_dir": str(tmp_path), "host_bytes": size}
    config = convert(own, WorkerConfig)
    first = open_host_tier(config, model, pool)
    assert first is not None and "MiB in huge pages" in first.placement
    assert first.placement.endswith("; 100 % on NUMA node 0")
    lines = [record.message for record in caplog.records if record.message.startswith("host tier: 8 blocks in ")]
    assert len(lines) == 1 and lines[0].endswith(f", empty; {first.placement}")
    first.close()
    small = convert({**own, "name": "v", "host_huge_pages": False}, WorkerConfig)
    other = open_host_tier(small, model, pool)
    assert other is not None and "(host_huge_pages is false)" in other.placement
    other.close()

    host.away, placed = 2, list[int]()
    monkeypatch.setattr(host_opening, "registrar_of", lambda _device: registrar)
    begun = LockedPieces.begin_ahead
    monkeypatch.setattr(LockedPieces, "begin_ahead", lambda self: (placed.append(host.away), begun(self)))
    ahead = begin_host_tier(config, model.device)
    assert ahead is not None and placed == [0], "moved before the first piece is locked"
    second = open_host_tier(config, model, pool, ahead)
    assert second is not None and second.file.found
    assert second.placement.endswith("; 100 % on NUMA node 0")
    assert [move for *_, move in host.placed] == [False, False, False, True], "an opened file is not placed again"
    ahead.end()
    second.close()
    pool.close()


# behaviour: a worker with other instructions for its products finds no block of its predecessor
def test_a_file_written_with_other_products_is_emptied(
    tiny: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    pool = KvPool(model.geometry, 4, model.device)
    size = 8 * model.geometry.bytes_per_block
    own = {"name": "w", "model": "m", "runtime_dir": str(tmp_path), "host_dir": str(tmp_path), "host_bytes": size}
    config, found = convert(own, WorkerConfig), []
    for by in ("oneDNN", "oneDNN", "Numba with AMX in oneDNN's tiles"):
        monkeypatch.setattr(host_opening, "multiplied_by", lambda _model, by=by: by)
        host = open_host_tier(config, model, pool)
        assert host is not None
        found.append(host.file.found)
        host.close()
    assert found == [False, True, False]
    pool.close()
