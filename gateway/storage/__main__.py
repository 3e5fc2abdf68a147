"""The program of the storage process: `python -m kvforge.gateway.storage DESCRIPTOR`."""

import sys

from .process import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
