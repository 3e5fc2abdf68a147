"""A worker that samples recorded answers, for `benchmarks.drafts`.

    python -m benchmarks.drafts_worker ANSWERS.npy CHANCE --config FILE.toml

A request whose seed is FIRST_SEED + n gets row n of the answers, [n, tokens] int64: LIFT is added to the logit of the
recorded token, on the device and with the same kernels whether drafts are verified or not. A model with dummy weights
then computes as much as one that writes these answers. The benchmark checks that it got them.

A draft model runs its passes, and its tokens are replaced: each is the recorded one with the chance CHANCE, 0 to 1, and
else a wrong one. Whether it is, follows from the request and the place alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import kvforge.worker.__main__ as worker_main
from kvforge.worker.wanted import AHEAD

FIRST_SEED = 1 << 52
LIFT = 24.0  # above the spread of the logits of dummy weights


def replay(answers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Make every sampler of this process prefer the recorded tokens. answers: [n, tokens] int64."""
    import torch

    from kvforge.worker.sampling.sampler import SamplingState

    whole_init: Callable[..., None] = SamplingState.__init__
    choose: Callable[..., None] = SamplingState._choose_by_kernels
    on_device: dict[torch.device, torch.Tensor] = {}

    def init(self: SamplingState, *arguments: Any, **options: Any) -> None:
        whole_init(self, *arguments, **options)
        # Before a graph is captured, which may not copy from the host.
        on_device.setdefault(self.seed.device, torch.from_numpy(answers).to(self.seed.device))

    def choose_recorded(
        self: SamplingState,
        logits: torch.Tensor,
        slots: torch.Tensor,
        wanted: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        *rest: Any,
    ) -> None:
        recorded, (_, seeds, generated, _) = on_device[logits.device], state
        number = seeds[slots] - FIRST_SEED
        known = (number >= 0) & (number < recorded.shape[0])
        place = (generated[slots] + (wanted - AHEAD).clamp(min=0)).clamp(0, recorded.shape[1] - 1)
        tokens = recorded[number.clamp(0, recorded.shape[0] - 1), place]
        # A copy: rows with drafts are sampled again from the logits that a graph leaves.
        lifted = logits.scatter_add(1, tokens[:, None], known[:, None].to(logits.dtype) * LIFT)
        choose(self, lifted, slots, wanted, state, *rest)

    SamplingState.__init__ = init  # type: ignore[method-assign]
    SamplingState._choose_by_kernels = choose_recorded  # type: ignore[method-assign,assignment]


def replay_drafts(answers: np.ndarray[Any, np.dtype[np.int64]], chance: float) -> None:
    """Make a draft model of this process propose recorded tokens.

    Args:
        answers: [n, tokens] int64.
        chance: That a token is the recorded one, 0 to 1.
    """
    from kvforge.worker.drafts.model import DraftRow, ModelDrafter
    from kvforge.worker.step.draft_passes import DraftPasses
    from kvforge.worker.step.row_starter import RowStarter

    seeds, generated = dict[int, int](), dict[int, int]()  # by slot
    begin: Callable[..., None] = RowStarter.begin
    append: Callable[..., None] = ModelDrafter.append
    continue_rows: Callable[..., list[list[int]]] = DraftPasses.continue_rows

    def begin_noted(self: RowStarter, begins: Any, *rest: Any) -> None:
        seeds.update((start.slot, start.seed) for start in begins)
        generated.update((start.slot, start.generated) for start in begins)
        begin(self, begins, *rest)

    def append_noted(self: ModelDrafter, slot: int, tokens: Any) -> None:
        generated[slot] = generated.get(slot, 0) + len(tokens)
        append(self, slot, tokens)

    def continue_recorded(self: DraftPasses, rows: list[DraftRow]) -> list[list[int]]:
        drafted = continue_rows(self, rows)
        for row, tokens in zip(rows, drafted, strict=False):
            number = seeds.get(row.slot, 0) - FIRST_SEED
            if not 0 <= number < len(answers):
                continue
            for place in range(len(tokens)):
                at = generated[row.slot] + place
                is_right = np.random.default_rng((number, at)).random() < chance
                recorded = int(answers[number, min(at, answers.shape[1] - 1)])
                tokens[place] = recorded if is_right else int(recorded == 0)
        return drafted

    RowStarter.begin = begin_noted  # type: ignore[method-assign,assignment]
    ModelDrafter.append = append_noted  # type: ignore[method-assign]
    DraftPasses.continue_rows = continue_recorded  # type: ignore[method-assign,assignment]


def main() -> int:
    """Run the worker."""
    answers, chance = np.load(sys.argv[1]), float(sys.argv[2])
    names = vars(worker_main)
    keep_all = names["keep_all"]

    def imported() -> None:
        # The worker has chosen its cores and imported torch, and has made no sampler yet.
        replay(answers)
        replay_drafts(answers, chance)
        keep_all()

    names["keep_all"] = imported
    return worker_main.main(sys.argv[3:])


if __name__ == "__main__":
    worker_main.leave(main())
