"""python -m gateway --config FILE.toml: HTTP for the coordinator of this host. See `gateway.serve.main`."""

from __future__ import annotations

import sys

from gateway.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
