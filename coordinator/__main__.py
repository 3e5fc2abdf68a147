"""python -m coordinator --config FILE.toml

Exit status: as `protocol.exits` has it: 0 stopped as asked, 1 internal error, 2 wrong configuration, 3 folder in use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvforge.protocol import logs
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK, status_of

from .config import load_config
from .server import Server


def main(arguments: list[str] | None = None) -> int:
    """Runs a coordinator until it is told to stop. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; without it, the defaults")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        output = logs.configure("coordinator", config.log_level, config.log_format)
        server = Server(config, output.flush)
    except KvforgeError as error:
        return _fail(error)
    try:
        server.run()
    except KvforgeError as error:
        return _fail(error)
    finally:
        server.close()
    return OK


def _fail(error: KvforgeError) -> int:
    print(f"coordinator: {error}", file=sys.stderr)
    return status_of(error)


if __name__ == "__main__":
    sys.exit(main())
