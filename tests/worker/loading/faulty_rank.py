"""A rank process that loads a model whose last rank projects batches of three tokens with other bits.

    python -m tests.worker.loading.faulty_rank RANK COUNT MEETING FOLDER

It writes JSON to MEETING-RANK: the model's determinism, and the number of the rank's exchanges in the trial of its
recurrent layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from kvforge.worker.__main__ import leave
from kvforge.worker.device.device import open_device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.loading import determinism
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixers import mixers_of
from kvforge.worker.loading.model import LoadedModel

FAULTY_TOKENS = 3


def main() -> None:
    rank, count, meeting, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    device = open_device("cpu")
    group = Ranks(rank, count, device)
    group.meet(meeting)
    exchanges = 0
    gather, trial = group.gather, determinism.unsteady_mixers

    def counted(*given: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return gather(*given)

    def faulty(model: LoadedModel) -> str:
        nonlocal exchanges
        exchanges = 0
        linear = mixers_of(model.module)[0].in_proj
        project = linear.forward
        if rank == count - 1:
            linear.forward = lambda hidden: project(hidden) * (1 + 1e-3 * (hidden.shape[1] == FAULTY_TOKENS))
        return trial(model)

    group.gather, determinism.unsteady_mixers = counted, faulty  # type: ignore[method-assign]
    model = load_model(folder, load_format="auto", dtype="float32", device=device, block_size=16, ranks=group)
    found = {"determinism": model.info.determinism, "exchanges": exchanges}
    Path(f"{meeting}-{rank}").write_text(json.dumps(found))
    group.close()
    leave(0)


if __name__ == "__main__":
    main()
