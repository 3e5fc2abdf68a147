"""A real PostgreSQL server in a folder of its own, reached through a Unix socket."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_S = 60.0
USER = "kvforge"


def programs() -> Path | None:
    """Return the folder of initdb and postgres, or None."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None


def why_not() -> str:
    """Return why no server can be started, or ""."""
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'psycopg[binary]')"
    if programs() is None:
        return "PostgreSQL is not installed (apt install postgresql)"
    if os.getuid() == 0 and _unprivileged() is None:
        return "PostgreSQL does not run as root, and there is no unprivileged user"
    return ""


def _unprivileged() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


class PostgresServer:
    """A server that ends with its `with` block. Its tables are on no disk that must survive: fsync is off."""

    def __enter__(self) -> Self:
        self._bin = programs()
        assert self._bin is not None
        self.folder = Path(tempfile.mkdtemp(prefix="kvforge-postgres-"))
        self._made = 0
        self._options: dict[str, int] = {}
        if os.getuid() == 0:
            user = _unprivileged()
            assert user is not None
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._options = {"user": user.pw_uid, "group": user.pw_gid}
        data = self.folder / "data"
        # Group and locale are fixed, so that the server does not depend on the environment of the test.
        self._environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "TZ": "UTC"}
        subprocess.run(
            [self._bin / "initdb", "-D", data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8"],
            check=True,
            capture_output=True,
            cwd=self.folder,
            env=self._environment,
            timeout=START_S,
            **self._options,  # type: ignore[call-overload]
        )
        self.start()
        return self

    def start(self) -> None:
        """Start the server, and return when it accepts connections."""
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "shared_buffers": "8MB",
            "max_connections": "40",
            "autovacuum": "off",
        }
        command = [str(self._bin / "postgres"), "-D", str(self.folder / "data")]  # type: ignore[operator]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment,
                **self._options,  # type: ignore[call-overload]
            )
        import psycopg

        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline and self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server; its connections are cut."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(START_S)

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://{USER}@/{database}?host={self.folder}"

    def new_database(self) -> str:
        """Create a database and return its URL."""
        import psycopg

        self._made += 1
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE made_{self._made}")
        return self.url(f"made_{self._made}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self.stop()
        shutil.rmtree(self.folder)
