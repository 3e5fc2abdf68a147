"""The coordinator: the process that owns every block and serialises every change."""

import os

# Set before numpy is imported: OpenBLAS, which is unused here, would start one thread for each core. That takes a sixth
# of the startup time, and a process that forks must have only one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
