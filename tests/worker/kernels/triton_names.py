"""Triton names that `worker` uses, looked up in the wheels of torch's releases.

    python -m tests.worker.kernels.triton_names FOLDER     (or: make triton-versions)

fetches each wheel into FOLDER, imports every module that uses Triton with it, and writes `triton_names.json` beside
this file: the names, and those that each version lacks. The test reads that table and needs no wheels; a name that is
missing from the table fails the test until the table is regenerated.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from kvforge import worker

# In torch 2.9; 2.10 and 2.11; 2.12; 2.13; 2.14; 2.15.
VERSIONS = ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
TABLE = Path(__file__).with_suffix(".json")
PACKAGE = Path(worker.__file__).parent
# Alternatives; one is enough: see `attention.gluon_names`.
GLUON = "triton.experimental.gluon."
EITHER = (
    (f"{GLUON}language.barrier", f"{GLUON}language.thread_barrier"),
    (f"{GLUON}language.nvidia.hopper.tma.async_load", f"{GLUON}language.nvidia.hopper.tma.async_copy_global_to_shared"),
)


@cache
def names_used() -> dict[str, set[str]]:
    """Return the full names imported or read from Triton -> the modules of ours that use them. Parses all modules."""
    used: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        known: dict[str, str] = {}  # names in this module -> Triton names
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "triton":
                known |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
            elif isinstance(node, ast.Import):
                for each in node.names:
                    if each.name.partition(".")[0] == "triton":
                        known[each.asname or "triton"] = each.name if each.asname else "triton"
        found = set(known.values()) | {_full_name(node, known) for node in ast.walk(tree)}
        for name in found - {""}:
            used.setdefault(name, set()).add(path.name)
    return used


def _full_name(node: ast.AST, known: dict[str, str]) -> str:
    """Return the full name of `tl.extra.cuda.gdc_wait`, for example; "" if it is not Triton's."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name) or node.id not in known or node.id.isupper():
        return ""
    if "__version__" in parts:  # a string: what follows is a method of `str`
        parts = parts[: parts.index("__version__") + 1]
    return ".".join((known[node.id], *parts))


def is_there(name: str) -> bool:
    """Return whether the installed Triton has the name, without looking into classes and functions."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if isinstance(found, type) or not hasattr(found, part):
                return isinstance(found, type)
            found = getattr(found, part)
        return True
    return False


def importing() -> list[str]:
    """Return the modules of ours that fail to import, with the reason."""
    failed = []
    for path in sorted({path for path in PACKAGE.rglob("*.py") if "triton" in path.read_text()}):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        try:
            import_module(name.removesuffix(".__init__"))
        except (ImportError, AttributeError) as error:
            failed.append(f"{name}: {error}")
    return failed


def look(version: str, folder: Path) -> dict[str, list[str]]:
    """Fetch one version and look the names up in a separate process."""
    target = folder / version
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
    environment = os.environ | {"PYTHONPATH": str(target), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.worker.kernels.triton_names", "--here", version]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    print(f"triton {version}: lacks {len(found['lacks'])} names; does not import: {found['failed'] or 'nothing'}")
    return found


def main() -> None:
    if sys.argv[1] == "--here":
        import triton

        assert triton.__version__.startswith(sys.argv[2]), triton.__version__
        lacks = sorted(name for name in names_used() if not is_there(name))
        print(json.dumps({"lacks": lacks, "failed": importing()}))
        return
    found = {version: look(version, Path(sys.argv[1])) for version in VERSIONS}
    TABLE.write_text(json.dumps({"names": sorted(names_used()), "versions": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
