"""Run the HTTP gateway of this host: `python -m kvforge.gateway --config FILE.toml`. See `serve.main`."""

from __future__ import annotations

import sys

from kvforge.gateway.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
