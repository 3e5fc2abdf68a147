"""Checks of shapes by the text helpers: a schema of a few hundred bytes may take llguidance seconds."""

from __future__ import annotations

from kvforge import SamplingParams
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.chat.shapes import Shape
from kvforge.protocol.errors import InvalidRequest


async def check_shape(prompts: Prompts, shape: Shape) -> None:
    """Check a shape ahead, so that `SamplingParams.message` has the answer at once and raises a refusal.

    Args:
        prompts: The model's, with its text helpers.
        shape: The shape.

    Raises:
        InvalidRequest: The check takes too much time or memory; names the shape's field.
        QueueFull: Too many texts and shapes wait for a helper.
        DeadlineExceeded: The check, or its wait, takes longer than `text_s`.
    """
    try:
        grammar = SamplingParams(**shape.named).shape()
    except InvalidRequest:
        return  # `SamplingParams.message` raises it, where the request's name for it is known
    if grammar is not None and grammar.kind != "json_object":
        await prompts.check_shape(grammar, shape.field)
