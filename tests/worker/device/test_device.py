"""All work of a worker runs on the device that it opens, whatever torch's default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.messages import RowStart, SamplingParams, Step, WorkerWelcome
from kvforge.worker.config import WorkerConfig
from kvforge.worker.device.device import Device, open_device
from kvforge.worker.step.engine import Engine

BLOCK_SIZE, WIDTH, ROWS = 8, 4, 3


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Patch torch to see two GPUs. The list records the devices that become current."""
    made_current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    return made_current


@pytest.mark.parametrize("index", [0, 1])
def test_the_opened_gpu_becomes_the_current_one(index: int, two_gpus: list[int]) -> None:
    device = open_device("auto", index)
    assert (device.torch_device, device.name) == (torch.device("cuda", index), f"GPU {index}")
    assert two_gpus == [index]


def test_a_gpu_too_many_is_refused_and_changes_nothing(two_gpus: list[int]) -> None:
    with pytest.raises(InvalidConfiguration, match="must be less than the number of devices, 2") as caught:
        open_device("auto", 2)
    assert caught.value.field == "device_index"
    open_device("cpu", 2)
    assert two_gpus == []


@pytest.fixture
def from_the_first_gpu() -> Iterator[None]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


@pytest.mark.gpu
@pytest.mark.usefixtures("from_the_first_gpu", "alone_on_gpu")
def test_a_worker_serves_on_the_second_gpu(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Self-tests, prefill, graphs and sampling, with the tokens of the first GPU."""
    monkeypatch.setenv("KVFORGE_CACHE_DIR", str(tmp_path))  # an empty cache: the self-tests run on both
    model = write_config("llama")
    welcome = WorkerWelcome(
        rid=0, version=1, boot="b", tables_path="", slots_max=8, blocks_per_sequence_max=WIDTH, step_tokens_max=64,
        step_rows_max=ROWS, block_size=BLOCK_SIZE,
    )  # fmt: skip
    told: list[list[list[int]]] = []
    for index in (0, 1):
        torch.cuda.set_device(0)
        config = WorkerConfig(
            name="w",
            model=str(model),
            load_format="dummy",
            dtype="float16",
            device_index=index,
            blocks=2 * ROWS * WIDTH,
        )
        engine = Engine(config, welcome, lambda phase, fraction: None)
        assert engine.device.torch_device == torch.device("cuda", index)
        assert engine.runner.graphs is not None and engine.runner.graphs.captured
        told.append(tokens_of(engine))
        engine.close()
    assert told[0] == told[1]


def tokens_of(engine: Engine) -> list[list[int]]:
    """Return the tokens of a prefill and four decodes, for a greedy, a sampled and a filtered row."""
    samplings = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=5),
    )
    begins = tuple(RowStart(slot=s, request_id=s, sampling=each, seed=s) for s, each in enumerate(samplings))
    slots = np.arange(ROWS, dtype=np.int32)
    tables = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    prompt = np.arange(3, 3 + 5 * ROWS, dtype=np.int32)
    found = []
    for number in range(5):
        first = number == 0
        step = Step(
            step_id=number,
            begins=begins if first else (),
            slots=slots,
            starts=np.full(ROWS, 0 if first else 4 + number, np.int32),
            counts=np.full(ROWS, 5 if first else 1, np.int32),
            samples=np.ones(ROWS, np.int32),
            tokens=prompt if first else np.full(ROWS, -1, np.int32),
        )
        outcome = engine.runner.run(step, tables)
        assert outcome.errors == ()
        found.append(outcome.tokens.tolist())
    return found


# behaviour: the address is that of the folder in /sys/bus/pci/devices
@pytest.mark.parametrize(
    ("properties", "address"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}, "0000:3b:00.0"),
        ({"pci_domain_id": 0x10001, "pci_bus_id": 0xC, "pci_device_id": 0x1F}, "10001:0c:1f.0"),
        ({}, ""),
    ],
)
def test_the_pci_address_of_a_gpu(
    properties: dict[str, int], address: str, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(**properties))
    assert Device("cuda", torch.device("cuda", 0), "a GPU").pci_address == address
    assert cpu.pci_address == ""
