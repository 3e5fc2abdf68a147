"""`python -m kvforge.loadtest`: see `kvforge.loadtest.command`."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules are loaded tells nobody where
    from kvforge.loadtest.command.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
