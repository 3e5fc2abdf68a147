"""Runs a module of this kvforge: `python -P entry.py kvforge.coordinator --config FILE`.

With `python -m kvforge.coordinator`, a `kvforge` in PYTHONPATH or in the working folder would take precedence.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module named by the first argument, as `python -m` would."""
    root = str(Path(__file__).absolute().parents[2])
    del sys.argv[0]
    sys.path.insert(0, root)
    __import__("kvforge")  # its submodules are then imported from here too
    sys.path.remove(root)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
