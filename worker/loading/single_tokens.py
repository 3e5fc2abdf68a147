"""Layers with a recurrent state over single tokens, for the trial of rows (see `trial`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .projections import JoinedTokens, Projections


class SingleTokens:
    """Mixes each token alone, behind a state of zeros, and no token of a batch twice with the same bits.

    A trial runs the same tokens in many batches. What differs between batches are the projections, which are computed
    for all tokens of a batch at once: they run in every batch. The rest of a mixer is given one token, so its result
    follows from the bits of the token and of its projections, and is found again by them. Batches of one token are
    mixed each time: they show whether the rest depends on the place of a token in memory.

    Args:
        alone: One rank has the whole model. Several may exchange numbers within a mixer (a shared group's mean squares,
            sums of Mamba 1), so that a result does not follow from this rank's bits. All must mix equally often, even
            if the bits of one rank differ: then every token is mixed.
    """

    def __init__(self, alone: bool) -> None:
        self._alone = alone
        self._known: dict[tuple[int, bytes], torch.Tensor] = {}

    def mixed(
        self, index: int, mix: Callable[[torch.Tensor], torch.Tensor], projections: Projections, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Run a mixer.

        Args:
            index: The mixer's index.
            mix: Runs it over one token, [1, 1, hidden size].
            projections: Its projections.
            hidden: [1, tokens, hidden size].

        Returns:
            [1, tokens, hidden size].
        """
        count, parts = hidden.shape[1], []
        with projections.over(hidden) as tokens:
            known = _bits_of(tokens) if count > 1 and self._alone else None
            for place in range(count):
                key = None if known is None else (index, known[place])
                part = None if key is None else self._known.get(key)
                if part is None:
                    part = mix(tokens.part(place, place + 1))
                if key is not None:
                    self._known[key] = part
                parts.append(part)
        return tokens.result(parts)


def _bits_of(tokens: JoinedTokens) -> list[bytes]:
    """Return the bits of each token and of its projections."""
    numbers = [each[0].contiguous().view(torch.uint8) for each in (tokens.hidden, *tokens.projected.values())]
    return [row.tobytes() for row in torch.cat(numbers, dim=1).cpu().numpy()]
