"""The program of the helper processes: `python -m kvforge.gateway.text DESCRIPTOR`."""

import sys

from .process import main

if __name__ == "__main__":
    main(int(sys.argv[1]))
