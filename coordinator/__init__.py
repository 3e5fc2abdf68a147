"""The coordinator: the one process that owns every block and serialises every mutation."""

import os

# Before anybody imports numpy, whose linear algebra is not used here: it starts a thread for each core otherwise, which
# takes a sixth of our start, and a process that forks is to have one thread.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
