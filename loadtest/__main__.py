"""`python -m loadtest`: see `loadtest.command`."""

import sys

from .command.main import main

if __name__ == "__main__":
    sys.exit(main())
