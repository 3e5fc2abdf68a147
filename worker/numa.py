"""NUMA nodes: the node of a device or of CPUs, and memory that is to lie on it.

The kernel is asked by system calls, since the C library has no functions for them. A container without CAP_SYS_NICE is
usually refused; memory then lies where the thread that touches it runs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NO_NODE = -1
_GENERIC = {"mbind": 235, "get_mempolicy": 236}
_CALLS = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239},
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
}
_PREFERRED = 1
_OF_ADDRESS = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR: the node of the page at an address
_MOVE = 2  # MPOL_MF_MOVE: pages that no other process has mapped
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_LIBC = ctypes.CDLL(None, use_errno=True)


def memory_nodes(nodes: Path = NODES) -> list[int]:
    """Return the numbers of the nodes that have memory; [] where the system does not list them."""
    return sorted(_numbers(nodes / "has_memory"))


def node_of_cpus(cpus: set[int], nodes: Path = NODES) -> int:
    """Return the node that all of some CPUs belong to; NO_NODE if there is none."""
    found = [node for node in sorted(_numbers(nodes / "online")) if cpus <= _numbers(nodes / f"node{node}" / "cpulist")]
    return found[0] if found and cpus else NO_NODE


def node_of_pci(address: str, devices: Path = PCI_DEVICES) -> int:
    """Return the node of a PCI device, such as `0000:3b:00.0`; NO_NODE where the system names none."""
    with suppress(OSError, ValueError):
        return max(NO_NODE, int((devices / address / "numa_node").read_text(encoding="ascii")))
    return NO_NODE


def prefer_node(address: int, size: int, node: int, move: bool = False) -> str:
    """Have memory lie on a node as long as that has room, and on another one otherwise.

    For a file in memory, this holds for the file, in each process that maps it.

    Args:
        address: Its address, at the begin of a page.
        size: Its bytes.
        node: The node.
        move: Whether pages that this process alone has mapped are moved there. Page-locked ones stay.

    Returns:
        Why the system refused it; "" if it did not.
    """
    mask = (ctypes.c_ulong * (node // _LONG_BITS + 1))()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    bits = len(mask) * _LONG_BITS + 1  # the kernel ignores the last bit
    code = _call("mbind", address, size, _PREFERRED, ctypes.addressof(mask), bits, _MOVE if move else 0)
    return _reason(code)


def nodes_of(addresses: Sequence[int]) -> list[int]:
    """Return the node of the page at each address, which is read; [] where the system refuses to say."""
    found, node = [], ctypes.c_int()
    for address in addresses:
        if _call("get_mempolicy", ctypes.addressof(node), 0, 0, address, _OF_ADDRESS):
            return []
        found.append(node.value)
    return found


def _call(name: str, *arguments: int) -> int:
    """Make a system call. Return its error, 0 for none."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        return errno.ENOSYS
    return ctypes.get_errno() if _LIBC.syscall(number, *map(ctypes.c_long, arguments)) else 0


def _reason(code: int) -> str:
    if code == errno.EPERM:
        return "not permitted (a container needs CAP_SYS_NICE)"
    if code == errno.EINVAL:
        return "this process may not use its memory (cpuset)"
    return os.strerror(code) if code else ""


def _numbers(path: Path) -> set[int]:
    """Return the numbers of a list such as `0-3,8`; none where it cannot be read."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
