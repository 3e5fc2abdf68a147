"""A rank process that loads models together with the other ranks and prints each model's answers.

    python -m tests.worker.loading.several RANK COUNT MEETING ASKED DEVICE/COLLECTIVES/COMPANY/EXPERTS MODEL ...

MODEL is DTYPE/WEIGHT_DTYPE/FOLDER. Prints one line of JSON for each model: its answers, or the error. A folder without
weights gets random ones. COMPANY: number of requests that also run in random batches and are compared with themselves
alone. EXPERTS: 1 if ranks divide the experts among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvforge.protocol.errors import KvforgeError
from kvforge.worker.__main__ import leave
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels.sharing import share_memory
from kvforge.worker.loading import load
from kvforge.worker.loading.model import LoadedModel
from tests.worker.step.company import Alone, Company, Request, compare, draw

ASKED = 3
COMPANY_TOKENS, COMPANY_ROWS = 256, 24  # limits of a step
WAIT_S = 240


def say(
    folder: Path,
    dtype: str,
    weight_dtype: str,
    ranks: Ranks | None = None,
    asked: int = ASKED,
    device: Device | None = None,
    company: int = 0,
    expert_parallel: bool = False,
) -> dict[str, Any]:
    """Return a model's answers to some prompts (tokens and the bits of their log-probabilities) and its properties."""
    device = open_device("cpu") if device is None else device
    load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    loaded = list[int]()

    def build(*given: Any, **named: Any) -> Any:
        module = original(*given, **named)
        tensors = chain(module.parameters(), module.buffers())
        loaded.append(sum({each.data_ptr(): each.nbytes for each in tensors}.values()))
        return module

    original, load.build = load.build, build
    try:
        model = load.load_model(
            folder,
            load_format=load_format,
            dtype=dtype,
            weight_dtype=weight_dtype,
            device=device,
            block_size=16,
            ranks=ranks,
            expert_parallel=expert_parallel,
        )
    except KvforgeError as error:
        return {"error": str(error)}
    finally:
        load.build = original
    unshared = "" if ranks is None else ranks.unshared
    if ranks is not None:
        share_memory(ranks, model.fused, COMPANY_TOKENS, COMPANY_ROWS)
    exchanged = ranks.describe() if ranks is not None else ""
    alone = Alone(model, 0 if device.computes_on_cores else 4)
    differs = ""
    try:
        said = []
        for number in range(asked):
            prompt = [(7 * number + 3 * place) % 250 + 3 for place in range(20 + number)]
            said.append(alone.say(Request(number, prompt, 12, 5, 0.8 if number == asked - 1 else 0.0)))
        if company:
            differs = in_company(model, alone, company)
    finally:
        alone.close()
        if ranks is not None:
            ranks.shared, ranks.unshared = None, unshared  # these belonged to this model
    held = sum(each.numel() for each in model.module.parameters())
    return {
        "said": said,
        "fingerprint": model.info.fingerprint,
        "determinism": model.info.determinism,
        "fused": model.fused is not None,
        "kv_heads": model.geometry.layers[0].kv_heads,
        "numbers": held,
        "bytes": loaded[0],
        "company": differs,
        "ranks": exchanged,
    }


def in_company(model: LoadedModel, alone: Alone, count: int) -> str:
    """Return the first difference between requests in random batches and alone; "": none. The ranks of one model draw
    the same batches, because the random choices depend on no computed numbers."""
    random = Random(1)
    prefixes = [[random.randrange(model.vocab_size) for _ in range(random.randint(20, 120))] for _ in range(3)]
    requests = [draw(random, number, prefixes, 700, model.vocab_size) for number in range(count)]
    graph_rows_max = 0 if model.device.computes_on_cores else COMPANY_ROWS
    company = Company(model, random, COMPANY_ROWS, COMPANY_TOKENS, graph_rows_max)
    try:
        requests += company.play(requests, forks=count // 4, deaths=1)
        return compare(alone, requests)
    finally:
        company.close()


def several(
    count: int,
    models: list[tuple[Path, str, str]],
    meeting: Path,
    asked: int = ASKED,
    device: str = "cpu",
    collectives: str = "auto",
    company: int = 0,
    expert_parallel: bool = False,
) -> list[list[dict[str, Any]]]:
    """Return the result of `say` for each rank and model. models: folder, dtype and weight_dtype. device: "cuda": one
    GPU for each rank."""
    command = [sys.executable, "-m", __name__]
    named = [f"{dtype}/{weight_dtype}/{folder}" for folder, dtype, weight_dtype in models]
    how = f"{device}/{collectives}/{company}/{int(expert_parallel)}"
    ranks = [
        subprocess.Popen(
            [*command, *map(str, (rank, count, meeting, asked)), how, *named],
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
    rank, count, meeting, asked, how, *models = sys.argv[1:]
    kind, collectives, company, experts = how.split("/")
    torch.set_num_threads(1)
    device = open_device(kind, 0 if kind == "cpu" else int(rank))
    ranks = Ranks(int(rank), int(count), device, collectives)
    ranks.meet(Path(meeting))
    status = 1
    try:
        for model in models:
            dtype, weight_dtype, folder = model.split("/", 2)
            told = say(Path(folder), dtype, weight_dtype, ranks, int(asked), device, int(company), experts == "1")
            print(json.dumps(told), flush=True)
        status = 0
    except Exception:  # noqa: BLE001 - printed; the process still has to exit as a worker does
        traceback.print_exc()
    ranks.close()
    leave(status)


if __name__ == "__main__":
    main()
