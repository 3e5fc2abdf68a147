"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from kvforge.models import store

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_made: list[str] = []
if INDUCTOR not in os.environ:
    # torch makes a folder for compiled code as soon as it is imported, which other conftest files do: ours is removed.
    _made.append(tempfile.mkdtemp(prefix="kvforge-inductor-"))
    os.environ[INDUCTOR] = _made[0]

# Nothing that is drawn differs from run to run, and how long an example takes says nothing on a busy machine.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

# A shell makes what it starts in the background ignore SIGINT; the processes that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Leaves nothing behind."""
    for folder in _made:
        os.environ.pop(INDUCTOR, None)
        shutil.rmtree(folder, ignore_errors=True)
    _made.clear()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2-135M-Instruct GGUF file, fetched into the user's cache folder the first time. For `model` tests."""
    return store.pull("smollm2-135m")
