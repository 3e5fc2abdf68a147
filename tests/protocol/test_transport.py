"""Folders of sockets and tables: only ours, and only where it was said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.transport import prepare_runtime_dir


def test_a_runtime_folder_is_made_private(tmp_path: Path) -> None:
    prepare_runtime_dir(tmp_path / "a" / "run")
    assert (tmp_path / "a" / "run").stat().st_mode & 0o777 == 0o700
    prepare_runtime_dir(tmp_path / "a" / "run")


@pytest.mark.parametrize("there", [True, False], ids=["to a folder", "to nothing"])
def test_a_symbolic_link_is_refused_by_name(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    if there:
        target.mkdir(mode=0o700)
    link.symlink_to(target)
    with pytest.raises(InvalidConfiguration, match=f"{link} is a symbolic link, to {target}: name the folder itself"):
        prepare_runtime_dir(link)
    assert target.exists() == there


def test_a_folder_open_to_everyone_is_refused_by_name(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path} is writable by everyone"):
        prepare_runtime_dir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(InvalidConfiguration, match=f"{tmp_path} belongs to another user \\(uid 12345\\)"):
        prepare_runtime_dir(tmp_path)


def test_a_file_in_its_place_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InvalidConfiguration, match="run cannot be used: File exists"):
        prepare_runtime_dir(tmp_path / "run")
