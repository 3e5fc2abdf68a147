"""python -m coordinator --config FILE.toml

Exit status: 0 stopped as asked, 1 internal error, 2 wrong configuration, 3 could not start (folder in use).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from protocol import logs
from protocol.errors import CoordinatorInUse, InvalidConfiguration, KvforgeError

from .config import load_config
from .server import Server


def main(arguments: list[str] | None = None) -> int:
    """Runs a coordinator until it is told to stop. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; without it, the defaults")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
        logs.configure("coordinator", config.log_level, config.log_format)
        server = Server(config)
    except (InvalidConfiguration, CoordinatorInUse) as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return 3 if isinstance(error, CoordinatorInUse) else 2
    try:
        server.run()
    except KvforgeError as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
