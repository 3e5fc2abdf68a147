"""These tests name kernels, and are imported before the worker's, which run kernels in the same process."""

from __future__ import annotations

import tests.interpreted  # noqa: F401 - changes the process
