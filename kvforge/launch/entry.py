"""Runs a package that is installed beside kvforge: `python -P entry.py coordinator --config FILE`.

By the name alone, as `python -m coordinator` does it, a module of that name in PYTHONPATH would come first.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Runs the package that the first argument names, as `python -m` would."""
    root = str(Path(__file__).resolve().parents[2])
    del sys.argv[0]
    sys.path.insert(0, root)
    for name in ("kvforge", sys.argv[0].partition(".")[0]):
        __import__(name)  # from now on its parts are imported from this one
    sys.path.remove(root)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
