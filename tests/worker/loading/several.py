"""One of several ranks, as a process: loads each of some models with the others, and tells what it says.

    python -m tests.worker.loading.several RANK COUNT MEETING ASKED DTYPE/WEIGHT_DTYPE/FOLDER ...

Prints one line of JSON for each model: what it said, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from kvforge.protocol.errors import KvforgeError
from tests.worker.step.company import Alone, Request
from worker.device.device import open_device
from worker.device.ranks import Ranks
from worker.loading.load import load_model

ASKED = 3
WAIT_S = 240


def say(folder: Path, dtype: str, weight_dtype: str, ranks: Ranks | None = None, asked: int = ASKED) -> dict[str, Any]:
    """What a model answers to some prompts: tokens, and the bits of their log-probabilities; and what it is."""
    device = open_device("cpu")
    try:
        model = load_model(folder, dtype=dtype, weight_dtype=weight_dtype, device=device, block_size=16, ranks=ranks)
    except KvforgeError as error:
        return {"error": str(error)}
    alone = Alone(model)
    try:
        said = []
        for number in range(asked):
            prompt = [(7 * number + 3 * place) % 250 + 3 for place in range(20 + number)]
            said.append(alone.say(Request(number, prompt, 12, 5, 0.8 if number == asked - 1 else 0.0)))
    finally:
        alone.close()
    held = sum(each.numel() for each in model.module.parameters())
    return {
        "said": said,
        "fingerprint": model.info.fingerprint,
        "determinism": model.info.determinism,
        "fused": model.fused is not None,
        "kv_heads": model.geometry.layers[0].kv_heads,
        "numbers": held,
    }


def several(
    count: int, models: list[tuple[Path, str, str]], meeting: Path, asked: int = ASKED
) -> list[list[dict[str, Any]]]:
    """Of each rank, what `say` returns of each model. models: folder, dtype and weight_dtype."""
    command = [sys.executable, "-m", __name__]
    named = [f"{dtype}/{weight_dtype}/{folder}" for folder, dtype, weight_dtype in models]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(meeting), str(asked), *named],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    try:
        told = [rank.communicate(timeout=WAIT_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * count
    return [[json.loads(line) for line in lines.splitlines() if line.startswith("{")] for lines in told]


def main() -> None:
    rank, count, meeting, asked, *models = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Ranks(int(rank), int(count), open_device("cpu"))
    ranks.meet(Path(meeting))
    try:
        for model in models:
            dtype, weight_dtype, folder = model.split("/", 2)
            print(json.dumps(say(Path(folder), dtype, weight_dtype, ranks, int(asked))), flush=True)
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
