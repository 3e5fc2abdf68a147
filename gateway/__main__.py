"""`python -m kvforge.gateway --config FILE.toml`: HTTP for this host's coordinator, see `serve.main`."""

from __future__ import annotations

import sys

from kvforge.gateway.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
