"""Run a coordinator: `python -m kvforge.coordinator --config FILE.toml [--check]`.

Exit status, as in `protocol.exits`: 0 stopped as requested, 1 internal error, 2 invalid configuration, 3 folder in
use, 5 state_dir is damaged. On SIGHUP, [access] is read again from FILE.
"""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("the coordinator")

import json
import os
from functools import partial
from pathlib import Path

from kvforge.process.parser import Parser
from kvforge.protocol import logs
from kvforge.protocol.deprecated_settings import log_warning
from kvforge.protocol.errors import KvforgeError
from kvforge.protocol.exits import OK, status_of
from kvforge.protocol.layout import file_bytes

from .config import geometry, load_config
from .server import Server


def main(arguments: list[str] | None = None) -> int:
    """Run a coordinator until it is stopped. Return the exit status."""
    parser = Parser(prog="python -m kvforge.coordinator", description=__doc__)
    parser.add_argument("--config", type=Path, help="TOML file; without it, the defaults")
    parser.add_argument("--check", action="store_true", help="print the effective settings as JSON, and exit")
    parser.add_argument(
        "--fresh",
        "--discard-state",
        dest="discard_state",
        action="store_true",
        help="discard the state of earlier processes in state_dir",
    )
    options = parser.parse_args(arguments)
    try:
        deprecated: list[str] = []
        config = load_config(options.config, deprecated.append)
        if options.check:
            folders = {"runtime_dir": str(config.runtime_path), "state_dir": str(config.state_path)}
            tables_bytes = file_bytes(geometry(config.core_limits()))
            print(json.dumps({**folders, "on_stop": config.on_stop, "tables_bytes": tables_bytes}))
            return OK
        output = logs.configure("coordinator", config.log_level, config.log_format)
        for text in deprecated:
            log_warning(text)
        # Without a file there is nothing to reload; on a terminal, SIGHUP means that it was closed.
        reread = partial(load_config, options.config) if options.config and not os.isatty(0) else None
        server = Server(config, output.flush, options.discard_state, reread)
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
