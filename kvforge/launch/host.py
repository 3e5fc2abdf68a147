"""What this machine has, as far as it can be seen without torch: asked before a process is started that needs it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from kvforge.process.installation import install_command
from kvforge.protocol.errors import InvalidConfiguration, Unavailable

NEEDED = ("torch", "transformers")
# Where drivers show their devices: NVIDIA's boards, its integrated chips, Windows' subsystem for Linux; AMD's.
DEVICE_FILES = {"cuda": ("nvidia[0-9]*", "nvgpu", "nvhost-gpu", "dxg"), "hip": ("kfd", "dxg")}
MAKERS = {"cuda": "NVIDIA", "hip": "AMD"}


def check_installed() -> None:
    """Raises Unavailable where what workers need is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Unavailable(f"workers need {' and '.join(missing)}, not installed here: {install_command('worker')}")


def check_device(field: str, device: str, devices: Path = Path("/dev")) -> None:
    """Raises InvalidConfiguration naming `field` where the machine shows no device of that kind."""
    patterns = DEVICE_FILES.get(device, ())
    if patterns and not any(any(devices.glob(pattern)) for pattern in patterns):
        files = ", ".join(str(devices / pattern) for pattern in patterns)
        raise InvalidConfiguration(field, f"is {device}, and this machine shows no {MAKERS[device]} GPU (no {files})")


def check_threads(field: str, threads: int) -> None:
    """Raises InvalidConfiguration naming `field` for more threads than the machine can run at once."""
    cores = os.cpu_count() or 1
    if not 1 <= threads <= cores:
        raise InvalidConfiguration(field, f"is {threads}; it must be 1 to {cores}, the cores of this machine")
