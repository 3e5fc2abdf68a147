"""Run the HTTP gateway of this host: `python -m kvforge.gateway --config FILE.toml`. See `serve.main`."""

from __future__ import annotations

import sys

if sys.platform != "linux":
    from kvforge.protocol.platforms import leave

    leave("the gateway")


from kvforge.gateway.serve.main import main

if __name__ == "__main__":
    sys.exit(main())
