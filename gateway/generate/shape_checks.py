"""Checks of shapes by the text helpers: a schema of a few hundred bytes may take llguidance seconds."""

from __future__ import annotations

from kvforge import Sampling
from kvforge.gateway.chat.prompts import Prompts
from kvforge.gateway.chat.shapes import Shape
from kvforge.protocol.errors import InvalidRequest


async def check_shape(prompts: Prompts, shape: Shape) -> None:
    """Have a shape checked, so that `Sampling.message` has the answer at once, and raises it where it is a refusal.

    Args:
        prompts: The model's, with its text helpers.
        shape: The shape.

    Raises:
        InvalidRequest: The check takes too much time or memory; names the shape's field.
        QueueFull: Too many texts and shapes wait for a helper.
        DeadlineExceeded: The check, or its wait, takes longer than `text_s`.
    """
    try:
        grammar = Sampling(**shape.named).shape()
    except InvalidRequest:
        return  # `Sampling.message` raises it, where the request's name for it is known
    if grammar is not None and grammar.kind != "json_object":
        await prompts.check_shape(grammar, shape.field)
