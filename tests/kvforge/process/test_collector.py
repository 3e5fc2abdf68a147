"""The collector around imports, in processes of their own: frozen objects stay frozen."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from kvforge.process.collector import collector_paused


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_collections_pause_and_go_on_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_worker_imports_without_collections_and_collects_while_it_serves() -> None:
    code = """
import gc, sys, tempfile
from pathlib import Path
from types import ModuleType
from kvforge.worker import __main__ as worker

during = set()

class Worker:
    def __init__(self, *_): self.enabled = gc.isenabled()
    def run(self): print(*during, self.enabled, gc.get_freeze_count() > 10_000)

class Loop(ModuleType):
    def __getattr__(self, name):
        during.add(gc.isenabled())
        return Worker if name == "Worker" else None

with tempfile.TemporaryDirectory() as folder:
    config = Path(folder, "worker.toml")
    config.write_text(f'name = "w0"\\nruntime_dir = "{folder}"\\nmodel = "{folder}"\\nload_format = "dummy"\\n')
    Path(folder, "config.json").write_text("{}")
    sys.modules["kvforge.worker.step.loop"] = Loop("kvforge.worker.step.loop")
    print(worker.main(["--config", str(config)]))
"""
    assert run(code) == ["False", "True", "True", "0"]


def test_the_end_of_a_worker_collects_none_of_its_modules() -> None:
    code = """
import atexit, gc
from kvforge.worker.__main__ import leave

atexit.register(lambda: print(gc.get_freeze_count() > 10_000))
leave(0)
"""
    assert run(code) == ["True"]


def test_the_end_of_a_worker_tears_nothing_down() -> None:
    code = """
import sys
from kvforge.worker.__main__ import leave

class Kept:
    def __del__(self) -> None:
        print("torn down")

kept = Kept()
print("left")
leave(0)
"""
    assert run(code) == ["left"]
