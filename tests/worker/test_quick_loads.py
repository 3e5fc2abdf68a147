"""What a load of a tiny model leaves out, because it passed before in the same process, or in the same run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvforge.protocol.errors import UnsupportedModel
from kvforge.worker.device.device import Device
from kvforge.worker.loading import determinism
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.model import LoadedModel
from tests.worker import quick_loads
from tests.worker.loading.random_models import save
from tools.cluster.passed_checks import remember_comparisons, remember_rehearsals, remember_trials

build = import_module("kvforge.worker.loading.build")  # the package has a function of that name
Calls = list[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The checks that run, in a process that remembers none."""
    for name in ("_steady", "_rehearsed"):
        monkeypatch.setattr(quick_loads, name, set())
    monkeypatch.setattr(quick_loads, "_verified", {})
    found = Calls()

    def note(name: str) -> None:
        check: Callable[..., Any] = getattr(quick_loads, name)
        monkeypatch.setattr(quick_loads, name, lambda *given, **how: found.append(name) or check(*given, **how))  # type: ignore[func-returns-value]

    for name in ("_unsteady", "_verify", "_rehearse", "_foresee"):
        note(name)
    return found


@pytest.fixture
def load(cpu: Device, tmp_path: Path) -> Callable[..., LoadedModel]:
    """load(number, **fields) -> a Llama with equal weights, in a folder of its own."""

    def write(number: int, **fields: Any) -> LoadedModel:
        folder = save(tmp_path / str(number) / "model", "llama", fields)
        return load_model(folder, device=cpu, block_size=4, dtype="float32")

    return write


@pytest.mark.usefixtures("alike_loads")
def test_an_equal_model_in_another_folder_is_checked_once(calls: Calls, load: Callable[..., LoadedModel]) -> None:
    first = load(1)
    assert {"_unsteady", "_verify", "_rehearse", "_foresee"} <= set(calls)
    calls.clear()
    again = load(2)
    assert calls == []
    assert again.info.source != first.info.source and again.info.fingerprint == first.info.fingerprint
    assert again.info.determinism == first.info.determinism
    load(3, rope_theta=5e5)
    assert {"_unsteady", "_verify", "_rehearse", "_foresee"} <= set(calls), "another model"


@pytest.mark.usefixtures("quick_loads")
def test_only_tests_that_ask_leave_out_the_comparison(calls: Calls, load: Callable[..., LoadedModel]) -> None:
    verify = import_module("kvforge.worker.loading.load").verify
    load(1)
    assert import_module("kvforge.worker.loading.load").verify is verify is not quick_loads.verify_once
    assert "_unsteady" in calls and "_verify" not in calls


@pytest.mark.usefixtures("alike_loads")
def test_a_failure_is_found_again(
    calls: Calls, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedModel("llama", "planted")

    with monkeypatch.context() as patched:
        patched.setattr(quick_loads, "_foresee", refuse)
        patched.setattr(quick_loads, "_unsteady", lambda *_: "planted")
        for number in range(2):
            with pytest.raises(UnsupportedModel, match="planted"):
                load(number)
    with monkeypatch.context() as patched:
        patched.setattr(quick_loads, "_unsteady", lambda *_: "planted")
        assert [load(number).unsteady for number in (2, 3)] == ["planted", "planted"]
    assert load(4).unsteady == "" and calls.count("_unsteady") == 1


def test_forked_workers_try_the_rows_of_an_equal_model_once(
    load: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    result = ["planted"]
    monkeypatch.setattr(determinism, "_unsteady", lambda model, _: tried.append(model.info.source) or result[0])
    (tmp_path / "trials").mkdir()
    remember_trials(tmp_path / "trials")
    assert [load(number).unsteady for number in range(2)] == ["planted", "planted"], "a failure is found again"
    result[0] = ""
    assert [load(number).unsteady for number in (2, 3)] == ["", ""]
    assert len(tried) == 3, "the last load passes without a trial"
    load(4, rope_theta=5e5)
    assert len(tried) == 4, "another model"


def test_forked_workers_compare_an_equal_model_once(
    load: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, result = list[str](), ["planted"]
    module = import_module("kvforge.worker.loading.load")
    verify = module.verify

    def noted(model: LoadedModel, *given: Any, **how: Any) -> Any:
        compared.append(Path(model.info.source).parent.name)
        return verify(model, *given, **how)

    monkeypatch.setattr(module, "verify", noted)
    monkeypatch.setattr(determinism, "_unsteady", lambda *_: result[0])
    (tmp_path / "passed").mkdir()
    remember_trials(tmp_path / "passed")
    remember_comparisons(tmp_path / "passed")
    for number in range(2):
        load(number)
    assert set(compared) == {"0", "1"}, "a load that fails later is compared again"
    result[0] = ""
    assert [load(number).unsteady for number in (2, 3)] == ["", ""]
    assert set(compared) == {"0", "1", "2"}
    load(4, rope_theta=5e5)
    assert set(compared) == {"0", "1", "2", "4"}, "another model"


def test_forked_workers_load_names_and_shapes_once(
    load: Callable[..., LoadedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, rehearse, foresee = list[str](), build.rehearse, build.foresee
    fails = [True]

    def planted(*given: Any) -> Any:
        if fails[0]:
            raise UnsupportedModel("llama", "planted")
        return foresee(*given)

    monkeypatch.setattr(build, "rehearse", lambda *given: tried.append(given[-1]) or rehearse(*given))  # type: ignore[func-returns-value]
    monkeypatch.setattr(build, "foresee", planted)
    (tmp_path / "passed").mkdir()
    remember_rehearsals(tmp_path / "passed")
    for number in range(2):
        with pytest.raises(UnsupportedModel, match="planted"):
            load(number)
    fails[0] = False
    load(2)
    assert len(tried) == 3
    assert load(3).fused is not None
    assert len(tried) == 3, "the last load passes without"
    load(4, num_hidden_layers=1)
    assert len(tried) == 4, "other shapes"
