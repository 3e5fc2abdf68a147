"""Run the load test: `python -m kvforge.loadtest`. See `kvforge.loadtest.command`."""

import signal
import sys

if __name__ == "__main__":
    if sys.platform != "linux":
        from kvforge.protocol.platforms import leave

        leave("the load test")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    from kvforge.loadtest.command.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
