"""No process runs two Python threads (ARCHITECTURE.md): no installed code starts one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "worker", "gateway", "kvforge", "loadtest", "protocol")
# Each of these names starts a thread, whatever its module.
STARTERS = frozenset({"ThreadPoolExecutor", "ThreadPool", "to_thread", "run_in_executor", "run_in_threadpool"})
LOW_LEVEL = frozenset({"start_new_thread", "start_new", "start_joinable_thread"})
CLASSES = frozenset({"Thread", "Timer"})
NAMES = re.compile(rf"\b(?:{'|'.join(sorted(STARTERS | LOW_LEVEL | CLASSES))})\b")
# The reason for threads by file. asyncio's own thread, for host names, is in no file here.
# A worker's start uses cores and disk at the same time. All of these threads end before it serves, and none touches its
# state.
ALLOWED: dict[str, str] = {
    "worker/device/check.py": "compiles kernels in parallel",
    "worker/device/host_memory.py": "page-locks the host file while weights are read",
    "worker/loading/early_checks.py": "compiles kernels while weights are read",
    "worker/loading/split.py": "reads tensors of a rank in parallel",
    "worker/loading/weight_stream.py": "reads pieces of files in parallel",
    "worker/page_cache.py": "reads files while torch is imported",
}


def threads(source: str) -> list[str]:
    """Return the places where a source starts threads: line and name. An annotation `threading.Thread` does not
    count."""
    found = list[str]()
    if not NAMES.search(source):
        return found  # parsing takes most of the time
    for node in ast.walk(ast.parse(source)):
        names = set[str]()
        if isinstance(node, ast.Attribute):
            names = {node.attr} & (STARTERS | LOW_LEVEL)
        elif isinstance(node, ast.Name):
            names = {node.id} & (STARTERS | LOW_LEVEL)
        elif isinstance(node, ast.ImportFrom):
            imported = {alias.name for alias in node.names}
            names = imported & (STARTERS | LOW_LEVEL | (CLASSES if node.module == "threading" else frozenset()))
        elif isinstance(node, ast.Call | ast.ClassDef):
            used = [node.func, *node.args] if isinstance(node, ast.Call) else node.bases
            names = {each.attr for each in used if isinstance(each, ast.Attribute) and _threading(each)} & CLASSES
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in sorted(names)]
    return found


def _threading(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "threading"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_starts_a_thread(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = {str(file.relative_to(ROOT)): threads(file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in found.items() if lines and file not in ALLOWED} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "import threading\nclass A(threading.Thread): ...",
        "import threading\nthreading.Timer(1, print)",
        "from threading import Thread as T\nT()",
        "from concurrent.futures import ThreadPoolExecutor",
        "import concurrent.futures as f\nf.ThreadPoolExecutor()",
        "import asyncio\nasyncio.to_thread(print)",
        "loop.run_in_executor(None, print)",
        "import _thread\n_thread.start_new_thread(print, ())",
    ],
)
def test_each_way_to_start_a_thread_is_found(source: str) -> None:
    assert threads(source)


def test_a_thread_that_is_named_and_not_started_is_none() -> None:
    assert not threads("import threading\nowner: dict[str, threading.Thread] = {}\nthreading.current_thread()")
