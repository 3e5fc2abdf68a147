"""A rank process that loads models together with the other ranks and writes each model's answers to MEETING-RANK.

    python -m tests.worker.loading.several RANK COUNT MEETING ASKED DEVICE/COLLECTIVES/COMPANY/EXPERTS MODEL ...

RANK "all", on a CPU: it imports the modules that the ranks need and then forks them.

MODEL is DTYPE/WEIGHT_DTYPE/FOLDER. Each line is JSON, for one model: its answers, or the error. A folder without
weights gets random ones. COMPANY: for each model, joined by commas, the number of requests that also run in random
batches and are compared with themselves alone. EXPERTS: 1 if ranks divide the experts among them.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvforge.process.collector import keep_all
from kvforge.process.leash import PR_SET_PDEATHSIG
from kvforge.protocol.errors import KvforgeError
from kvforge.worker.__main__ import leave
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.device.ranks import Ranks
from kvforge.worker.kernels.sharing import share_memory
from kvforge.worker.loading import find_source, load, read_config
from kvforge.worker.loading.composite import model_class
from kvforge.worker.loading.lazy_compiler import less_of_torch
from kvforge.worker.loading.model import LoadedModel
from tests.worker.kept_memory import trim_rarely
from tests.worker.step.company import Alone, Company, Request, compare, draw
from tests.worker.step.test_states import play
from tools.cluster.fork_server import Child, fork_server

ASKED = 3
COMPANY_TOKENS, COMPANY_ROWS = 256, 24  # limits of a step
LIMITS_ON_CPU, LIMITS_ON_GPU = (200, 16), (700, 40)  # tokens of a prompt behind its prefix, and of an answer
WAIT_S, END_S = 240.0, 20.0


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
    """Return a model's answers to some prompts (tokens and the bits of their log-probabilities) and its properties.

    For a model with recurrent states: one answer; its bits did not depend on what was done with the states.
    """
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
    if model.geometry.state_blocks:
        return {"said": play(model), "fused": model.fused is not None, "state": _numbers(model), "bytes": loaded[0]}
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


def _numbers(model: LoadedModel) -> int:
    """Return the numbers of a sequence's state."""
    return sum(prod(each.shape) for each in model.geometry.states)


def in_company(model: LoadedModel, alone: Alone, count: int) -> str:
    """Return the first difference between requests in random batches and alone; "": none. The ranks of one model draw
    the same batches, because the random choices depend on no computed numbers."""
    random = Random(1)
    prefixes = [[random.randrange(model.vocab_size) for _ in range(random.randint(20, 120))] for _ in range(3)]
    longest, most = LIMITS_ON_CPU if model.device.computes_on_cores else LIMITS_ON_GPU
    requests = [draw(random, number, prefixes, longest, model.vocab_size, most) for number in range(count)]
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
    company: int | Sequence[int] = 0,
    expert_parallel: bool = False,
) -> list[list[dict[str, Any]]]:
    """Return the result of `say` for each rank and model. models: folder, dtype and weight_dtype. device: "cuda": one
    GPU for each rank. company: of all models, or of each."""
    named = [f"{dtype}/{weight_dtype}/{folder}" for folder, dtype, weight_dtype in models]
    companies = ",".join(map(str, [company] * len(models) if isinstance(company, int) else company))
    how = f"{device}/{collectives}/{companies}/{int(expert_parallel)}"
    logs = [Path(f"{meeting}-{rank}.log") for rank in (["all"] if device == "cpu" else range(count))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes: list[Child | subprocess.Popen[bytes]] = []
    try:
        arguments = [str(count), str(meeting), str(asked), how, *named]
        if device == "cpu":  # a fork copies no driver's threads
            processes.append(fork_server().start(["all", *arguments], logs[0], environment, __name__))
        else:
            for rank in range(count):
                command = [sys.executable, "-m", __name__, str(rank), *arguments]
                processes.append(subprocess.Popen(command, env=environment))
        statuses = [process.wait(WAIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(END_S)
    assert not any(statuses), [log.read_text() for log in logs if log.exists()]
    texts = [Path(f"{meeting}-{rank}").read_text() for rank in range(count)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def import_models(folders: Sequence[Path], device: Device) -> None:
    """Import and compile what all ranks need, once."""
    with less_of_torch():
        import kvforge.worker.loading.split  # noqa: F401 - it imports accelerate

        for folder in folders:
            load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
            with suppress(Exception):  # the ranks meet it again
                model_class(read_config(find_source(folder, load_format)))
    with suppress(KvforgeError):
        say(folders[0], "float32", "dtype", asked=1, device=device)


def fork_ranks(count: int) -> int:
    """Fork the ranks. Return its number in each rank; this process ends after the ranks, with 1 if one has failed."""
    keep_all()  # a collection would copy the memory that ranks share
    ranks = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a test that gives up kills this process alone
            return rank
        ranks.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    return leave(int(any(statuses)))


def main() -> None:
    number, count, meeting, asked, how, *models = sys.argv[1:]
    kind, collectives, companies, experts = how.split("/")
    torch.set_num_threads(1)
    trim_rarely()
    if number == "all":
        import_models([Path(model.split("/", 2)[2]) for model in models], open_device(kind))
        rank = fork_ranks(int(count))
    else:
        rank = int(number)
    device = open_device(kind, 0 if kind == "cpu" else rank)
    group = Ranks(rank, int(count), device, collectives)
    group.meet(Path(meeting))
    status = 1
    try:
        with Path(f"{meeting}-{rank}").open("w") as file:
            for model, company in zip(models, map(int, companies.split(",")), strict=True):
                dtype, weight_dtype, folder = model.split("/", 2)
                told = say(Path(folder), dtype, weight_dtype, group, int(asked), device, company, experts == "1")
                print(json.dumps(told), file=file, flush=True)
        status = 0
    except Exception:  # noqa: BLE001 - printed; the process still has to exit as a worker does
        traceback.print_exc()
    group.close()
    leave(status)


if __name__ == "__main__":
    main()
