"""The Dockerfile passes its linter, and its packages exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from kvforge.commands import cli
from kvforge.deploy import environment
from kvforge.launch.settings import DRAIN_S, STOP_S

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
HADOLINT = Path(sys.executable).with_name("hadolint")

needs_hadolint = pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is built for Linux on x86_64")


def linted(text: str) -> tuple[int, str]:
    done = subprocess.run(
        [HADOLINT, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@needs_hadolint
def test_the_linter_finds_nothing_and_would_find_something() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert linted(text) == (0, "")
    status, said = linted(text.replace('-n "${TORCH}"', "-n ${TORCH}"))
    assert status == 1 and "SC2070" in said
    assert linted(text.replace("USER 10001", "USR 10001"))[0] == 1


def test_its_extras_and_its_torch_are_those_of_the_project() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r'"\$\{wheel\}\[([^\]]+)\]"', text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (torch,) = re.findall(r'ARG TORCH="([^"]+)"', text)
    assert re.findall(r"^TORCH\s+\?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE) == [torch]
    assert torch == environment.TORCH


def test_the_composition_keeps_state_stops_slowly_enough_and_asks_for_liveness() -> None:
    text = (DOCKERFILE.parent / "compose.yaml").read_text(encoding="utf-8")
    service = yaml.safe_load(text)["services"]["kvforge"]
    assert [volume.partition(":")[2] for volume in service["volumes"]] == ["/var/cache/kvforge", "/var/lib/kvforge"]
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_S + STOP_S
    dockerfile = DOCKERFILE.read_text(encoding="utf-8")
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (.*)$", dockerfile, re.MULTILINE)
    assert service["healthcheck"]["test"][1:] == json.loads(check) == ["kvforge", "health", "--live"]
    for volume in service["volumes"]:
        assert volume.partition(":")[2] in dockerfile
    options = cli.parser().parse_args(service["command"])
    assert (options.port, options.state_dir) == (8000, "/var/lib/kvforge")


def test_every_command_of_the_page_is_understood() -> None:
    page = (ROOT / "docs" / "containers.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^ +kvforge (up .*)$", page, re.MULTILINE)
    assert cli.parser().parse_args(arguments.split()).state_dir == "/var/lib/kvforge"
    (stop_s,) = re.findall(r"--stop-timeout (\d+)", page)
    assert int(stop_s) > DRAIN_S + STOP_S
