"""Checks of this machine that need no torch, made before a process is started."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvforge.process.installation import install_command
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

NEEDED = ("torch", "transformers")
# Device files of the drivers: NVIDIA's boards, its integrated chips, Windows' subsystem for Linux; AMD's.
DEVICE_FILES = {"cuda": ("nvidia[0-9]*", "nvgpu", "nvhost-gpu", "dxg"), "hip": ("kfd", "dxg")}
MAKERS = {"cuda": "NVIDIA", "hip": "AMD"}


def check_installed() -> None:
    """Check that the packages that workers need are installed.

    Raises:
        Unavailable: A package is missing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"workers need {' and '.join(missing)}, not installed here: {install_command('worker')}")


def check_device(field: str, device: str, devices: Path = Path("/dev")) -> None:
    """Check that the machine has a device of this kind.

    Raises:
        InvalidConfiguration: There is none. Names `field`.
    """
    patterns = DEVICE_FILES.get(device, ())
    if patterns and not any(any(devices.glob(pattern)) for pattern in patterns):
        files = ", ".join(str(devices / pattern) for pattern in patterns)
        raise InvalidConfiguration(field, f"is {device}, but this machine has no {MAKERS[device]} GPU (no {files})")


def expects_gpu(device: str, devices: Path = Path("/dev")) -> bool:
    """Return whether a worker with this setting of `device` will find a GPU, as far as is known before it starts.

    Args:
        device: As in worker.toml; "auto" means a GPU if the machine has one and the installed torch can use it.
        devices: The folder of the device files.
    """
    if device != "auto":
        return device in DEVICE_FILES
    try:
        of_cpus = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        of_cpus = False
    return not of_cpus and shows_gpu(devices)


def shows_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether the machine shows a GPU, including a virtual one of Windows. devices: see `expects_gpu`."""
    return any(any(devices.glob(pattern)) for patterns in DEVICE_FILES.values() for pattern in patterns)


def check_threads(field: str, threads: int) -> None:
    """Check that the machine has as many cores as threads.

    Raises:
        InvalidConfiguration: There are too many threads. Names `field`.
    """
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise InvalidConfiguration(field, f"is {threads}; it must be 1 to {cores}, the cores of this machine")
