"""Makes kernels interpretable before the worker's modules are imported; the worker's tests run in this process too."""

from __future__ import annotations

import tests.interpreted  # noqa: F401 - changes the process
