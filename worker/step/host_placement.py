"""Where the memory of a host file lies: on the NUMA node of the worker's device, and in huge pages."""

from __future__ import annotations

import logging
import os

import numpy as np
import numpy.typing as npt

from kvforge.protocol.steady_clock import monotonic
from kvforge.worker import huge_pages, numa
from kvforge.worker.device.device import Device
from kvforge.worker.device.file_pages import huge_bytes
from kvforge.worker.host_file import PAGE, HostFile

SAMPLES = 256  # pages of a file whose node is asked for
MIB = 1 << 20
Octets = npt.NDArray[np.uint8]
log = logging.getLogger("worker")


class HostPlacement:
    """Places a host file on a NUMA node, and describes how it lies.

    Args:
        device: The worker's device. On a CPU, the node of the CPUs that the process may use counts.

    Attributes:
        node: The node that the file is to lie on; `numa.NO_NODE` if none is known.
        problem: Why the file is not placed; "" if it is.
    """

    def __init__(self, device: Device) -> None:
        self.node, self.problem = _node_of(device)

    def place(self, memory: Octets, found: bool) -> None:
        """Have a file lie on the node.

        Pages of an earlier worker that lie elsewhere are moved, which takes seconds once. Copies would cross nodes for
        the whole life of the file otherwise, since its blocks are written again in place. Only pages that are not
        page-locked yet can be moved.

        Args:
            memory: The mapping of the file.
            found: Whether it has been used; else none of its memory is allocated.
        """
        if self.problem:
            return
        address, size = memory.ctypes.data, memory.nbytes
        refused = numa.prefer_node(address, size, self.node)
        if refused:
            self.problem = f"NUMA node {self.node} is refused: {refused}"
        elif found and self.share_there(memory) < 1:
            begun = monotonic()
            memory[::PAGE].max()  # the kernel moves pages that are in this process's table
            refused = numa.prefer_node(address, size, self.node, move=True)
            log.info(
                "host tier: %s to NUMA node %d in %.1f s, now %.0f %% there",
                f"the file could not be moved ({refused})" if refused else "moved the file",
                *(self.node, monotonic() - begun, 100 * self.share_there(memory)),
            )

    def share_there(self, memory: Octets) -> float:
        """Return which share of a sample of pages lies on the node; 1 where the system refuses to say."""
        pages = np.unique(np.linspace(0, (memory.nbytes - 1) // PAGE, SAMPLES).astype(np.int64))
        nodes = numa.nodes_of([memory.ctypes.data + page * PAGE for page in pages.tolist()])
        return nodes.count(self.node) / len(nodes) if nodes else 1.0

    def describe(self, file: HostFile) -> str:
        """Describe how an open file lies, for the log and for `kvforge health`."""
        return f"{_describe_pages(file)}; {self._describe_node(file.whole)}"

    def _describe_node(self, memory: Octets) -> str:
        if self.problem:
            return self.problem
        percent = 100 * self.share_there(memory)
        return f"{percent:.0f} % on NUMA node {self.node}"


def _describe_pages(file: HostFile) -> str:
    """Return how much of a file is in huge pages, and why not all that could be."""
    size = file.whole.nbytes
    file.whole[:: huge_pages.HUGE_BYTES].max()  # only what is in this process's table is counted
    try:
        huge = huge_bytes(file.whole.ctypes.data, size)
    except OSError as error:
        return f"huge pages are unknown: /proc/self/smaps: {error.strerror}"
    text = f"{huge // MIB} of {-(-size // MIB)} MiB in huge pages"
    if huge >= max(huge_pages.whole_pieces(size), 1):
        return text
    found = "an earlier worker made the file: remove it, and start the worker again"
    return f"{text} ({found if file.found else file.refused or 'the kernel gave no reason'})"


def _node_of(device: Device) -> tuple[int, str]:
    """Return the node of a device, and why it is not known."""
    nodes = numa.memory_nodes()
    if len(nodes) < 2:
        return numa.NO_NODE, "one NUMA node" if nodes else "the system names no NUMA nodes"
    if device.computes_on_cores:
        node = numa.node_of_cpus(os.sched_getaffinity(0))
        reason = "its CPUs are of several NUMA nodes: set CPUAffinity= of its unit to those of one"
    else:
        address = device.pci_address
        node = numa.node_of_pci(address)
        reason = f"the system names no NUMA node of the GPU at {address or 'an unknown PCI address'}"
    if node == numa.NO_NODE:
        return node, reason
    if node not in nodes:
        return numa.NO_NODE, f"NUMA node {node} of the device has no memory"
    return node, ""
