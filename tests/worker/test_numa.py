"""NUMA nodes as the system lists them, and memory that is placed on a node."""

from __future__ import annotations

import ctypes
import errno
import sys
from pathlib import Path

import pytest

from kvforge.worker import numa
from kvforge.worker.huge_pages import HUGE_BYTES, fill
from kvforge.worker.numa import NO_NODE, memory_nodes, node_of_cpus, node_of_pci, nodes_of, prefer_node
from tests.worker.memory_files import memory_file, numa_maps_line


def host(folder: Path) -> Path:
    """A host with CPUs and memory on nodes 0 and 1, and memory alone on node 4."""
    (folder / "has_memory").write_text("0-1,4\n")
    (folder / "online").write_text("0-1,4\n")
    for node, cpus in ((0, "0-3,8-11"), (1, "4-7,12-15"), (4, "")):
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    return folder


def test_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    nodes = host(tmp_path)
    assert memory_nodes(nodes) == [0, 1, 4]
    assert [node_of_cpus(cpus, nodes) for cpus in ({0, 9}, {4, 5, 15}, {3, 4}, {16}, set[int]())] == [0, 1, -1, -1, -1]
    assert memory_nodes(tmp_path / "none") == [] and node_of_cpus({0}, tmp_path / "none") == NO_NODE


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", NO_NODE), ("", NO_NODE), ("x", NO_NODE)])
def test_the_node_of_a_gpu(text: str, node: int, tmp_path: Path) -> None:
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
    assert node_of_pci("0000:3b:00.0", tmp_path) == node
    assert node_of_pci("0000:3c:00.0", tmp_path) == NO_NODE and node_of_pci("", tmp_path) == NO_NODE


def needs_placement() -> None:
    if sys.platform != "linux" or not Path("/proc/self/numa_maps").exists():
        pytest.skip("the kernel places no memory")
    with memory_file(0, 4096) as (_, mapped):
        refused = prefer_node(mapped.address, 4096, 0)
    if refused:
        pytest.skip(f"the system refuses to place memory: {refused}")


# behaviour: the kernel places a file on a node before its memory is allocated, for each process that maps it
def test_memory_is_placed_on_a_node() -> None:
    needs_placement()
    with memory_file(2) as (fd, mapped):
        assert "prefer" not in numa_maps_line(mapped.address)
        assert prefer_node(mapped.address, mapped.octets.nbytes, 0) == ""
        fill(fd, mapped)
        mapped.octets[::HUGE_BYTES] = 1
        line = numa_maps_line(mapped.address).split()
        assert line[1] == "prefer:0" and any(word.startswith("N0=") for word in line)
        assert not any(word[0] == "N" and not word.startswith("N0=") for word in line)
        assert nodes_of([mapped.address, mapped.address + HUGE_BYTES]) == [0, 0]
        assert prefer_node(mapped.address, mapped.octets.nbytes, 0, move=True) == ""
        assert mapped.octets[::HUGE_BYTES].tolist() == [1, 1]


def test_a_node_that_does_not_exist_is_refused() -> None:
    needs_placement()
    with memory_file(0, 4096) as (_, mapped):
        refused = prefer_node(mapped.address, 4096, 1000)
        assert refused == "this process may not use its memory (cpuset)"
        assert "prefer" not in numa_maps_line(mapped.address)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.EPERM, "not permitted (a container needs CAP_SYS_NICE)"), (errno.ENOMEM, "Cannot allocate memory")],
)
def test_refusals_have_reasons(code: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_call", lambda *_: code)
    assert prefer_node(0, 4096, 0) == words and nodes_of([0]) == []


def test_a_machine_whose_calls_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa.platform, "machine", lambda: "mips")
    assert prefer_node(0, 4096, 0) == "Function not implemented" and nodes_of([0]) == []


# behaviour: a mask of nodes has a bit for the node, also beyond the first word
@pytest.mark.parametrize("node", [0, 3, 63, 64, 130])
def test_the_mask_of_a_node(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def call(_name: str, *arguments: int) -> int:
        words = node // 64 + 1
        mask = (ctypes.c_uint64 * words).from_address(arguments[3])
        seen.append((sum(word << 64 * at for at, word in enumerate(mask)), arguments[4], arguments[5]))
        return 0

    monkeypatch.setattr(numa, "_call", call)
    assert prefer_node(4096, 4096, node, move=True) == ""
    assert seen == [(1 << node, 64 * (node // 64 + 1) + 1, 2)]
