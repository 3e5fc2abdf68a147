"""Run a module of this kvforge: `python -P entry.py kvforge.coordinator --config FILE`.

`python -m kvforge.coordinator` would take a `kvforge` in PYTHONPATH or in the working directory first.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module that the first argument names, as `python -m` would."""
    root = str(Path(__file__).absolute().parents[2])
    del sys.argv[0]
    sys.path.insert(0, root)
    __import__("kvforge")  # from now on its parts are imported from this one
    sys.path.remove(root)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
