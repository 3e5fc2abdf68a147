"""The model supplies sampling defaults, also for requests that arrived before any model was known."""

from __future__ import annotations

import msgspec
import pytest

from kvforge.coordinator.core.events import DropWorker
from kvforge.protocol.errors import InvalidRequest, KeyReused
from kvforge.protocol.messages import MODEL_DEFAULTS, RowStart, SamplingParams
from tests.coordinator.driver import Driver, FakeWorker, model_info

MODELS = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05)
MODEL = msgspec.structs.replace(model_info(), sampling=MODELS)


def start_of(driver: Driver, worker: FakeWorker) -> RowStart:
    """The sampling parameters of the request that starts now."""
    driver.turn()
    return [start for step in worker.steps for start in step.begins][-1]


def test_what_is_not_named_is_the_models(driver: Driver) -> None:
    worker = driver.add_worker(16, model=MODEL)
    driver.submit([1, 2], sampling=SamplingParams(temperature=0.1), model_defaults=("top_k", "repetition_penalty"))
    assert start_of(driver, worker).sampling == SamplingParams(temperature=0.1, top_k=20, repetition_penalty=1.05)


def test_who_names_nothing_gets_all_of_it_and_who_says_so_none(driver: Driver) -> None:
    worker = driver.add_worker(16, model=MODEL)
    driver.submit([1, 2], max_tokens=1, sampling=SamplingParams(), model_defaults=MODEL_DEFAULTS)
    assert start_of(driver, worker).sampling == MODELS
    driver.run_until_idle()
    driver.submit([1, 2], sampling=SamplingParams())
    assert start_of(driver, worker).sampling == SamplingParams()


def test_a_penalty_of_the_models_counts_the_prompt(driver: Driver) -> None:
    worker = driver.add_worker(16, model=MODEL)
    driver.submit([1, 2, 3], sampling=SamplingParams(), model_defaults=MODEL_DEFAULTS)
    assert start_of(driver, worker).prompt_history == 3


def test_one_that_waits_for_the_first_model_gets_its_values(driver: Driver) -> None:
    driver.submit([1, 2], sampling=SamplingParams(min_p=0.5), model_defaults=("temperature", "top_k"))
    worker = driver.add_worker(16, model=MODEL)
    assert start_of(driver, worker).sampling == SamplingParams(temperature=0.7, top_k=20, min_p=0.5)


def test_a_key_stands_for_what_was_asked_and_not_for_what_the_model_made_of_it(driver: Driver) -> None:
    driver.add_worker(16, model=MODEL)
    first = driver.submit([1], key="k", model_defaults=("top_k",))
    assert driver.submit([1], key="k", model_defaults=("top_k",)) == first
    with pytest.raises(KeyReused):
        driver.submit([1], key="k", model_defaults=())


def test_a_field_that_no_model_decides_is_refused(driver: Driver) -> None:
    with pytest.raises(InvalidRequest, match="model_defaults"):
        driver.submit([1], model_defaults=("seed",))


def test_a_worker_whose_model_wants_what_cannot_be_is_dropped(driver: Driver) -> None:
    wrong = msgspec.structs.replace(MODEL, sampling=SamplingParams(temperature=-1.0))
    worker = driver.add_worker(16, name="w", model=model_info())
    effects = driver.report(worker, driver.ready(FakeWorker(driver.machine, worker.number, "w", 16, wrong)))
    assert any(isinstance(effect, DropWorker) for effect in effects)
