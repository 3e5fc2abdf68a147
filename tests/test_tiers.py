"""Every folder of tests has one tier, every entry of the table exists, and `make test` leaves out only soak."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import amount, fresh
from tests.amount import LEFT_OUT, examples
from tests.fresh import DAY, SEEDS_A_DAY, headline, of_the_day, seeds_of
from tests.tiers import COLLECTED, EXCEPTIONS, FOLDERS, LONG, TIERS, tier_of

REPOSITORY = Path(__file__).parents[1]
FILES = [path.relative_to(REPOSITORY).as_posix() for path in sorted(REPOSITORY.glob("tests/**/test_*.py"))]


def test_every_folder_has_one_tier() -> None:
    assert [file for file in FILES if tier_of(f"{file}::test") is None] == []
    listed = [folder for folders in FOLDERS.values() for folder in folders]
    assert sorted(listed) == sorted({file.rpartition("/")[0] for file in FILES}), "one entry for each folder with tests"
    assert tier_of("tests/nowhere/test_new.py::test_something") is None


def test_long_files_exist_and_come_first(request: pytest.FixtureRequest) -> None:
    assert set(FILES) > LONG
    files = [item.nodeid.partition("::")[0] in LONG for item in request.session.items]
    assert files == sorted(files, reverse=True)


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_an_exception_is_there_and_differs_from_its_folder(name: str) -> None:
    file, _, test = name.partition("::")
    assert EXCEPTIONS[name] in TIERS and file in FILES
    assert EXCEPTIONS[name] != tier_of(f"{file.rpartition('/')[0]}/test_other.py::test")
    assert tier_of(f"{name}[sm_90]" if test else f"{file}::test_of_it") == EXCEPTIONS[name]
    if test:
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_tiers_are_markers() -> None:
    options = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    assert {line.partition(":")[0] for line in options["ini_options"]["markers"]} >= set(TIERS)


def is_soak_case(item: pytest.Item) -> bool:
    """Whether a case has the mark of its own, beside other cases of its test."""
    return "soak" in {mark.name for mark in getattr(getattr(item, "callspec", None), "marks", ())}


def test_this_run_marks_each_test_once(request: pytest.FixtureRequest) -> None:
    for item in request.config.stash[COLLECTED]:
        marks = [mark.name for mark in item.iter_markers() if mark.name in TIERS]
        assert marks == ["soak" if is_soak_case(item) else tier_of(item.nodeid)], item.nodeid


def test_a_test_with_cases_in_soak_has_others(request: pytest.FixtureRequest) -> None:
    """A test with soak cases alone belongs into EXCEPTIONS."""
    cases: dict[str, set[bool]] = {}
    for item in request.config.stash[COLLECTED]:
        cases.setdefault(item.nodeid.partition("[")[0], set()).add(is_soak_case(item))
    assert [test for test, found in cases.items() if found == {True}] == []


def test_make_test_leaves_out_soak_alone_and_ci_runs_all() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    assert recipes["run-tests"] == '\t$(PYTEST) $(if $(SELECTED),-m "$(SELECTED)") $(PYTEST_ARGS)\n'
    assert recipes["test"].endswith(f' run-tests SELECTED="{LEFT_OUT}"\n') and recipes["test-all"].endswith(
        " run-tests\n"
    )
    checks = set(re.findall(r"check-\w+", recipes["check"]))
    assert len(checks) == 4 and all(
        set(re.findall(r"check-\w+", recipes[each])) == checks for each in ("test", "test-all")
    )
    assert (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8").endswith("make test-all\n")


@pytest.mark.parametrize(
    ("selected", "counts"), [(LEFT_OUT, [1, 1, 10, 150]), ("", [1, 5, 40, 600]), ("soak", [1, 5, 40, 600])]
)
def test_only_make_test_takes_fewer_examples(selected: str, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amount, "_share", [0.0])
    config: Any = SimpleNamespace(getoption={"markexpr": selected}.__getitem__)
    amount.choose(config)
    assert [examples(count) for count in (1, 5, 40, 600)] == counts
    assert amount.thinned(3) == (3 if selected == LEFT_OUT else 1)


def test_a_day_has_its_own_seeds_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    days = [seeds_of(day) for day in ("2026-02-28", "2026-03-01", "2026-03-02")]
    assert len(set().union(*days)) == 3 * SEEDS_A_DAY
    monkeypatch.setenv(DAY, "2026-03-01")
    monkeypatch.setattr(fresh, "_all_tests", [True])
    line = re.fullmatch(
        r"fresh seeds: (\d+) to (\d+); the cases of this day \(repeat with KVFORGE_DAY=(.+)\)", headline()
    )
    assert line is not None
    assert (range(int(line[1]), int(line[2]) + 1), line[3]) == (days[1], "2026-03-01")


@pytest.mark.parametrize("days", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 6, 19])
def test_a_rotation_takes_each_case_once(count: int, days: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_all_tests", [True])
    found: list[int] = []
    for day in range(days):
        monkeypatch.setenv(DAY, f"2026-03-{day + 1:02}")
        cases = of_the_day(range(count), days)
        assert cases == of_the_day(range(count), days) and count // days <= len(cases) <= -(-count // days)
        found += cases
    assert sorted(found) == [*range(count)]


@pytest.mark.parametrize(
    ("files", "keyword", "rotates"),
    [([], "", True), (["tests/test_tiers.py"], "", False), ([], "tiers", False)],
)
def test_chosen_tests_have_all_cases(
    files: list[str], keyword: str, rotates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh, "_all_tests", [not rotates])
    monkeypatch.setenv(DAY, "2026-03-01")
    config: Any = SimpleNamespace(getoption={"file_or_dir": files, "keyword": keyword}.__getitem__)
    fresh.choose_day(config)
    assert len(of_the_day(range(10), 5)) == (2 if rotates else 10)
