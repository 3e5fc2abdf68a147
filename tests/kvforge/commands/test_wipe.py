"""`kvforge wipe`, against a scripted coordinator."""

from __future__ import annotations

from typing import Self

import pytest

from kvforge.commands import parsing, wipe
from kvforge.commands.cli import main
from kvforge.protocol.exits import OK, TIMED_OUT
from kvforge.protocol.messages import TenantWiped


class Played:
    """Answers with these numbers of held and pending blocks in turn, then always with the last."""

    def __init__(self, *left: tuple[int, int]) -> None:
        self.left = list(left)
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wipe_tenant(self, tenant: str) -> TenantWiped:
        self.asked.append(tenant)
        held, pending = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        removed = (2, 3, 4, 5) if len(self.asked) == 1 else (0, 0, 0, 0)
        return TenantWiped(0, *removed, held, pending)


def played(monkeypatch: pytest.MonkeyPatch, *left: tuple[int, int]) -> Played:
    """Let the command talk to a coordinator with these answers."""
    played = Played(*left)
    monkeypatch.setattr(parsing, "open_client", lambda _: played)
    monkeypatch.setattr(wipe, "POLL_S", 0.0)
    return played


def test_the_blocks_of_each_tier_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = played(monkeypatch, (0, 9))
    assert main(["wipe", "acme"]) == OK
    said = capsys.readouterr().err
    assert "removed 2 sequences, and blocks: 3 on devices, 4 in host memory, 5 on disks" in said
    assert "left: 0 blocks in use by requests or holders, 9 not overwritten yet" in said
    assert kv.asked == ["acme"]


def test_it_waits_until_nothing_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kv = played(monkeypatch, (2, 9), (0, 4), (0, 0))
    assert main(["wipe", "acme", "--wait", "60"]) == OK
    assert kv.asked == ["acme"] * 3 and "left:" not in capsys.readouterr().err


def test_what_is_left_after_the_wait_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played(monkeypatch, (2, 0))
    assert main(["wipe", "acme", "--wait", "0.000001"]) == TIMED_OUT
    assert "'acme' has 2 blocks in use and 0 not overwritten" in capsys.readouterr().err
