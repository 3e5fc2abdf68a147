"""The gate for plain words counts what it should, and finds what is above a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.prose.__main__ import long_subjects
from tools.prose.list import offences
from tools.prose.measure import count, excesses, prose_of

PLAIN = "The coordinator drops the connection. It logs the reason."


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The block is held by some" + "body.", "persons"),
        ("The client is told the reason.", "said"),
        ("Three blocks, two of which are free.", "of-which"),
        ("Who" + "ever sends it waits.", "openers"),
        ("The step ends. So does the request.", "openers"),
    ],
)
def test_each_kind_is_counted(text: str, kind: str) -> None:
    assert count(text)[kind] == 1
    assert offences(text)
    assert count(PLAIN)[kind] == 0
    assert offences(PLAIN) == []


def test_prose_is_comments_and_strings_with_a_space(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""One two."""\nx = "three"  # four five\ny = "six six"\nz = "not `this whose` code"\n')
    assert prose_of(file).split() == ["One", "two..", "four", "five", "six", "six.", "not", "code."]
    assert "whose" not in prose_of(file)
    page = tmp_path / "a.md"
    page.write_text("Words here.\n\n    " + "nobody = code\n\n```\n" + "whose code\n```\n")
    assert prose_of(page).split() == ["Words", "here."]


def test_an_f_string_is_one_string_in_every_python(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("""x = f"one {name!r} of {f'in {y}'} two" "three four"\ny = (f\'\'\'five\n six {z:>{w}}\'\'\')\n""")
    words = prose_of(file).split()
    assert words == ["one", "{name!r}", "of", "{f'in", "{y}'}", "two.", "three", "four", "five", "six", "{z:>{w}}."]


def test_a_folder_above_a_limit_is_named_with_its_rate(tmp_path: Path) -> None:
    file = tmp_path / "a.md"
    file.write_text(" ".join(["word"] * 99) + " no" + "body.")
    [excess] = excesses("docs", [file])
    assert excess == ("docs", "persons", 10.0, 0.2)
    file.write_text(PLAIN)
    assert excesses("docs", [file]) == []


def test_a_subject_may_have_72_characters() -> None:
    assert long_subjects(["x" * 72]) == []
    assert long_subjects(["x" * 73]) == ["x" * 73]
