"""The progress line of a run."""

from __future__ import annotations

import io

from kvforge.loadtest.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, *, quiet: bool = False) -> str:
    progress = Progress(100, out=out, quiet=quiet)
    for tenth in range(250):
        progress.show(tenth / 10, sent=tenth, running=2, finished=tenth, bad=tenth // 200, tokens=5 * tenth)
    progress.done()
    return out.getvalue()


def test_elsewhere_a_line_every_ten_seconds() -> None:
    lines = shown(io.StringIO()).splitlines()
    assert [line.split(" s ")[0].strip() for line in lines] == ["0.0", "10.0", "20.0"]
    assert lines[-1].endswith("sent 200/100, running 2, finished 200, unsuccessful 1, 50.0 tokens/s")


def test_at_a_terminal_one_line_that_is_taken_away() -> None:
    said = shown(Terminal())
    assert "\n" not in said and said.endswith("\r\x1b[K") and said.count("\r") > 50


def test_quiet_says_nothing() -> None:
    assert shown(Terminal(), quiet=True) == "" == shown(io.StringIO(), quiet=True)
