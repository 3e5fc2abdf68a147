"""Clients run on Linux, macOS and Windows; servers on Linux, and elsewhere they say so before anything else.

There is no other platform here: `foreign_platform` simulates it in a process of its own.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import pytest

from kvforge.protocol import keys, trust
from kvforge.protocol.errors import InvalidConfiguration
from kvforge.protocol.exits import UNAVAILABLE
from tests.forked import Scripts
from tests.kvforge.fake_coordinator import Running

FOREIGN = ("darwin", "win32")
SERVER_MODULES = ("torch", "transformers", "uvicorn", "kvforge.coordinator", "kvforge.gateway", "kvforge.worker")
# The program of a server, and the subject of its sentence.
PROGRAMS = {
    "kvforge.coordinator": "the coordinator",
    "kvforge.coordinator.replay": "`kvforge replay`",
    "kvforge.worker": "the worker",
    "kvforge.gateway": "the gateway",
    "kvforge.fleet.node": "a node of a fleet",
    "kvforge.loadtest": "the load test",
    "kvforge.loadtest.fleet": "the simulated fleet",
}
COMMANDS = {
    "up --config /nowhere": "up",
    "serve": "up",
    "demo": "demo",
    "deploy install": "deploy",
    "deploy uninstall": "deploy",
    "deploy check": "deploy",
    "fleet up /nowhere": "fleet",
    "fleet status": "fleet",
    "fleet scale 2": "fleet",
    "fleet down": "fleet",
    "loadtest": "loadtest",
    "replay": "replay",
}
IMPORT_ALL = """
import importlib, pkgutil, sys
import kvforge
for name in kvforge.__all__:
    getattr(kvforge, name)
import kvforge.client, kvforge.commands.cli, kvforge.protocol
for package in (kvforge.client, kvforge.commands, kvforge.protocol):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
kvforge.commands.cli.parser().format_help()
"""
RUN_MODULE = """
import runpy, sys
module, seen = sys.argv.pop(1), set(sys.modules)
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as ended:
    status = ended.code
print(*sorted(name for name in set(sys.modules) - seen if name.startswith("kvforge")))
sys.exit(status)
"""
GENERATE = """
import os, sys
from kvforge import AsyncClient, Client, SamplingParams
from tests.kvforge.foreign_platform import run

def shown(tokens):
    return [token.token_id for token in tokens]

with Client() as kv:
    request = kv.submit([1, 2, 3], max_tokens=4, sampling=SamplingParams(regex="a+"))
    print(shown(request), request.result().reason)

async def main():
    async with AsyncClient() as kv:
        request = await kv.submit([1, 2, 3], max_tokens=4)
        print(shown([token async for token in request]), (await request.result()).reason)

run(main())
"""
ANSWER = "[6, 7, 8, 9] length\n"
REFUSED = """
from kvforge import Client, KvforgeError, Tables
for make in (lambda: Client("ipc:///tmp/clients.sock"), Client, Tables, lambda: Tables("/tmp")):
    try:
        make()
    except KvforgeError as error:
        print(type(error).__name__, error)
"""
NO_TABLES = (
    "Unavailable shared tables are memory of the coordinator's machine, which runs Linux (this is {}): "
    "use `stats()` or `kvforge stats`\n"
)


class Run(Protocol):
    """Runs a script on a simulated platform."""

    def __call__(
        self, platform: str, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """run(platform, script, *arguments, **environment), in an environment that names no coordinator."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVFORGE_", "XDG_"))}
    with Scripts("tests.kvforge.foreign_platform") as foreign, Scripts() as linux:

        def run(platform: str, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
            prelude = f"from tests.kvforge.foreign_platform import pretend\npretend({platform!r})\n"
            if platform in FOREIGN:
                return foreign.run(prelude + script, *arguments, environment={**kept, **environment})
            return linux.run(script, *arguments, environment={**kept, **environment})

        yield run


@pytest.mark.parametrize("platform", ["linux", *FOREIGN])
def test_the_client_and_the_command_line_import_no_server(platform: str, run: Run) -> None:
    """Also no server's packages, on any platform: a client is light, and torch is not installed with it."""
    script = f"{IMPORT_ALL}\nprint([name for name in sys.modules if name.startswith({SERVER_MODULES!r})])"
    ran = run(platform, script)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("platform", FOREIGN)
def test_a_server_says_that_it_needs_linux_before_it_imports_anything_of_its_own(
    platform: str, program: str, run: Run
) -> None:
    ran = run(platform, RUN_MODULE, program, "--no-such-option")
    sentence = f"kvforge: {PROGRAMS[program]} runs on Linux only (this is {platform}); clients run everywhere\n"
    assert (ran.stderr, ran.returncode) == (sentence, UNAVAILABLE)
    packages = {program.rsplit(".", depth)[0] for depth in range(program.count(".") + 1)}
    protocol = {"kvforge.protocol", *(f"kvforge.protocol.{name}" for name in ("errors", "exits", "platforms"))}
    assert set(ran.stdout.split()) <= packages | protocol


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("platform", FOREIGN)
def test_a_command_that_starts_a_server_says_that_it_needs_linux(platform: str, command: str, run: Run) -> None:
    ran = run(platform, RUN_MODULE, "kvforge", *command.split())
    name = f"`kvforge {COMMANDS[command]}`"
    sentence = f"kvforge: {name} runs on Linux only (this is {platform}); clients run everywhere\n"
    assert (ran.stderr, ran.returncode) == (sentence, UNAVAILABLE)


@pytest.mark.parametrize("platform", FOREIGN)
def test_both_clients_generate_over_an_encrypted_connection(platform: str, folder: Path, run: Run) -> None:
    server, client = keys.make(), keys.make()
    key_file = folder / "client.key"
    keys.write(key_file, client, "client")
    if platform == "win32":
        key_file.chmod(0o666)  # the mode of every file there
    with Running(folder, secret=server.secret) as fake:
        assert fake.endpoint.startswith("tcp://127.0.0.1:")
        ran = run(
            platform,
            GENERATE,
            KVFORGE_ENDPOINT=fake.endpoint,
            KVFORGE_SERVER_KEY=server.public,
            KVFORGE_KEY_FILE=str(key_file),
        )
    assert (ran.stdout, ran.stderr, ran.returncode) == (ANSWER * 2, "", 0)


def test_both_clients_generate_over_a_unix_socket_on_macos(fake: Running, run: Run) -> None:
    ran = run("darwin", GENERATE, KVFORGE_ENDPOINT=fake.endpoint)
    assert (ran.stdout, ran.stderr, ran.returncode) == (ANSWER * 2, "", 0)


def test_what_windows_lacks_is_refused_by_name(run: Run) -> None:
    ran = run("win32", REFUSED)
    assert ran.stdout == (
        "InvalidConfiguration endpoint: ipc:// needs Unix sockets, which Windows lacks: use tcp://HOST:PORT\n"
        "InvalidConfiguration endpoint: Windows has no default: name the coordinator as tcp://HOST:PORT, here or in "
        "KVFORGE_ENDPOINT\n" + 2 * NO_TABLES.format("win32")
    )
    assert (ran.stderr, ran.returncode) == ("", 0)


def test_macos_lacks_shared_tables(run: Run) -> None:
    ran = run("darwin", REFUSED)
    assert (ran.stdout, ran.stderr, ran.returncode) == (2 * NO_TABLES.format("darwin"), "", 0)


@pytest.mark.parametrize("platform", FOREIGN)
def test_top_needs_the_shared_tables(platform: str, run: Run) -> None:
    ran = run(platform, RUN_MODULE, "kvforge", "top")
    sentence = NO_TABLES.format(platform).replace("Unavailable", "kvforge:")
    assert (ran.stderr, ran.returncode) == (sentence, UNAVAILABLE)


def test_a_runtime_folder_names_no_coordinator_on_windows(run: Run) -> None:
    ran = run("win32", RUN_MODULE, "kvforge", "--runtime-dir", "/tmp/kvf", "status")
    assert ran.stderr == "kvforge: runtime_dir: ipc:// needs Unix sockets, which Windows lacks: use tcp://HOST:PORT\n"


def test_socket_paths_are_shorter_on_macos(run: Run) -> None:
    script = """
from pathlib import Path
from kvforge.protocol import transport
for length in (89, 90):
    try:
        print(len(transport.client_endpoint(Path("/" + length * "a"))))
    except transport.InvalidConfiguration as error:
        print("longer than 103 bytes" in str(error))
"""
    assert run("darwin", script).stdout == "109\nTrue\n"


def test_a_pull_goes_on_without_a_lock_on_windows(tmp_path: Path, run: Run) -> None:
    script = """
import sys
from collections.abc import Iterator
from pathlib import Path
from kvforge.models import store
with store._locked(Path(sys.argv[1]), "model", print) as locked:
    print(locked)
"""
    ran = run("win32", script, str(tmp_path))
    assert (ran.stdout, ran.stderr) == ("False\n", "")


class MacConnection:
    """A connection of macOS to a process of user 4242."""

    family = trust.sockets.AF_UNIX

    def __init__(self, fileno: int) -> None:
        os.close(fileno)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (0, 1, 76)  # SOL_LOCAL, LOCAL_PEERCRED, sizeof(struct xucred)
        return struct.pack("=IIhxx16I", 0, 4242, 1, 20, *15 * [0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


def test_macos_names_the_user_at_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as file, monkeypatch.context() as patched:
        patched.setattr(sys, "platform", "darwin")
        patched.setattr(trust.sockets, "socket", MacConnection)
        trust.check_peer(file.fileno(), {0, 4242}, "ipc:///s")
        with pytest.raises(InvalidConfiguration, match="is of user 4242"):
            trust.check_peer(file.fileno(), {0, 501}, "ipc:///s")
