"""Checks the kernels that need only a model's shapes while its weights are read.

Reading waits for the disk and for copies, and compiling needs cores, so a first start does both at once. Nothing
depends on these checks: one that fails here is ignored, and fails again, with its error, in `check_kernels`, which
skips or quickly repeats what has passed.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import torch

from kvforge.worker.attention import choose_attention
from kvforge.worker.attention.pool import LayerShape
from kvforge.worker.attention.selftest import AttentionShape
from kvforge.worker.attention.selftest import self_test as attention_test
from kvforge.worker.device.check import require_all_right
from kvforge.worker.device.device import Device
from kvforge.worker.sampling.selftest import copies_test, sampling_test

from .probe import bound_shapes

log = logging.getLogger("worker")


class EarlyChecks:
    """The checks of one load, in a thread of their own."""

    def __init__(
        self, device: Device, attention: str, dtype: torch.dtype, kv_dtype: torch.dtype, block_size: int
    ) -> None:
        """Prepare them.

        Args:
            device: The device; where kernels are not compiled for it, nothing is checked.
            attention: The setting; see `choose_attention`.
            dtype: Dtype of the model.
            kv_dtype: Dtype of the pool.
            block_size: Tokens per block.
        """
        self._device, self._attention = device, attention
        self._dtype, self._kv_dtype, self._block_size = dtype, kv_dtype, block_size
        self._thread: threading.Thread | None = None
        self._kinds: tuple[AttentionShape, ...] = ()
        self._vocab_size = 0

    def prepare(self, module: Any, shapes: tuple[LayerShape, ...]) -> None:
        """Note the shapes of a model.

        Args:
            module: The model on the meta device, with bound layers.
            shapes: As `bind_layers` returned them.
        """
        self._kinds = bound_shapes(module, shapes)
        self._vocab_size = int(module.get_input_embeddings().num_embeddings)

    def begin(self) -> None:
        """Start checking, once, if shapes are known and kernels are compiled for the device.

        Call it after transformers has built the model: meanwhile torch's default dtype is another one in every thread.
        """
        if self._thread is None and self._kinds and self._device.compile_threads > 1:
            self._thread = threading.Thread(target=self._run, name="early-checks", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Wait until the checks are over."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._device.enter_thread()
            attending = partial(
                attention_test,
                choose_attention(self._device, self._attention),
                self._device,
                self._kinds,
                dtype=self._dtype,
                kv_dtype=self._kv_dtype,
                block_size=self._block_size,
            )
            sampling = partial(sampling_test, self._device, self._vocab_size)
            require_all_right(self._device, [partial(copies_test, self._device), attending, sampling])
        except Exception as error:  # noqa: BLE001 - `check_kernels` decides
            log.debug("an early check of kernels failed: %s: %s", type(error).__name__, error)
        log.debug("early checks of kernels took %.1f s", time.monotonic() - began)
