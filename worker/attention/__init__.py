"""Paged attention: the interface every implementation keeps, the plain-torch reference, and the choice between them."""

from __future__ import annotations

from worker.device import Device

from .interface import AttentionOptions, PagedAttention, PagedBatch
from .reference import ReferenceAttention

__all__ = ["AttentionOptions", "PagedAttention", "PagedBatch", "ReferenceAttention", "choose_attention"]


def choose_attention(device: Device) -> PagedAttention:
    """The fastest implementation that `device` can run. The reference runs on every one of them."""
    del device
    return ReferenceAttention()
