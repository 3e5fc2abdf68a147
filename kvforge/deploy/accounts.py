"""Reads users and groups of a system, which may be an image, from its own files."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass

from .places import USER, Places

if sys.platform != "win32":
    import grp
    import pwd


@dataclass(frozen=True)
class Account:
    """The service's user: its ids, and the names and ids of its groups."""

    uid: int
    gid: int
    groups: dict[str, int]


def account(places: Places, name: str = USER) -> Account | None:
    """Return the user, or None if there is none."""
    if places.here:
        with suppress(KeyError):
            user = pwd.getpwnam(name)
            ids = os.getgrouplist(name, user.pw_gid)
            groups = {}
            for gid in ids:
                with suppress(KeyError):
                    groups[grp.getgrgid(gid).gr_name] = gid
            return Account(user.pw_uid, user.pw_gid, groups)
        return None
    users = {row[0]: row for row in _rows(places, "passwd")}
    if name not in users:
        return None
    gid = int(users[name][3])
    rows = [row for row in _rows(places, "group") if name in row[3].split(",") or int(row[2]) == gid]
    return Account(int(users[name][2]), gid, {row[0]: int(row[2]) for row in rows})


def _rows(places: Places, table: str) -> list[list[str]]:
    """Return the lines of /etc/passwd or /etc/group, split into fields."""
    with suppress(OSError):
        lines = places.of(f"/etc/{table}").read_text(encoding="utf-8").splitlines()
        return [row for line in lines if len(row := line.split(":")) >= 4]
    return []
