"""The counter of assertions finds statements and pytest's calls, and nothing else."""

from __future__ import annotations

from tools.assertions import count, per_folder

FILE = '''
import pytest

def test_it() -> None:
    """assert nothing here"""
    assert True, "assert"
    with pytest.raises(ValueError, match="x"), pytest.warns(UserWarning):
        raise_it()
    other.raises(ValueError)
    pytest.fail("no")
    pytest.skip("not counted")
'''


def test_statements_and_calls_of_pytest_are_counted() -> None:
    assert count(FILE) == 4
    assert count("") == 0


def test_the_files_of_a_folder_are_added() -> None:
    files = [("tests/a/test_1.py", FILE), ("tests/a/test_2.py", FILE), ("tests/test_3.py", FILE), ("tests/b/x.py", "")]
    assert per_folder(files) == {"tests/a": 8, "tests": 4}
