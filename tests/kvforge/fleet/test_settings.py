"""fleet.toml: valid settings, refusals by name, and settings that change the replicas' revision."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvforge.fleet.settings import load_fleet, parse
from kvforge.protocol.errors import InvalidConfiguration

ROOT = Path(__file__).parents[3]
UP = '[up]\nmodel = "m"\n'


def test_the_example_is_one_and_takes_what_it_says() -> None:
    file, text = load_fleet(ROOT / "deploy" / "fleet.toml")
    assert file.name == "llama" and file.count == 4 and file.ranks == 2 and parse(text) == file
    assert file.bundle == {"CPU": 10.0, "GPU": 2.0} and file.gateway_bundle == {"CPU": 1.0}
    scaled = text.replace("count = 4  ", "", 1).replace("# [autoscale]", "[autoscale]")
    for name in ("replicas_min", "replicas_max", "queue_up_s", "queue_down_s", "up_after_s", "down_after_s", "pause_s"):
        scaled = scaled.replace(f"# {name}", name)
    rule = parse(scaled.replace("                         # or [autoscale]", "")).autoscale
    assert rule is not None and (rule.replicas_min, rule.replicas_max) == (2, 8)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "up.model"),
        ('[up]\nmodel = "m"\nmodel_config = "c"', "up.model"),
        (f"replica = 1\n{UP}", "replica"),
        (f"[replicas]\ncounts = 1\n{UP}", "replicas.counts"),
        (f'name = "A b"\n{UP}', "name"),
        (f"[replicas]\ncount = 0\n{UP}", "replicas.count"),
        (f"[replicas]\ndrain_s = 0\n{UP}", "replicas.drain_s"),
        (f"[replicas]\nrank_gpus = 2\n{UP}", "replicas.rank_gpus"),
        (f"[replicas]\ncoordinator_cpus = 0\nrank_cpus = 0\n{UP}", "replicas"),
        (f"[replicas]\ncount = 1\nsurge = 0\n{UP}", "replicas.surge"),
        (f"[replicas]\nsurge = 0\n[autoscale]\nreplicas_max = 3\n{UP}", "replicas.surge"),
        (f"[replicas]\ncount = 2\n[autoscale]\nreplicas_max = 3\n{UP}", "replicas.count"),
        (f"[autoscale]\nreplicas_min = 1\n{UP}", "autoscale.replicas_max"),
        (f"[autoscale]\nreplicas_min = 4\nreplicas_max = 3\n{UP}", "autoscale.replicas_min"),
        (f"[autoscale]\nreplicas_max = 3\nqueue_down_s = 2.0\n{UP}", "autoscale.queue_down_s"),
        (f"[gateways]\nport = 70000\n{UP}", "gateways.port"),
        (f"{UP}[gateway]\nport = 1", "gateway.port"),
        (f"{UP}[gateway.replicas.a]\nendpoint = 'x'", "gateway.replicas"),
        (f"{UP}[up.tcp]\nlisten = 'x'", "up.tcp"),
        (f"{UP}[up.worker]\nruntime_dir = 'x'", "up.worker.runtime_dir"),
        (f"{UP}[up.access.clients.fleet-gateways]\nkey = 'x'", "up.access.clients.fleet-gateways"),
        ('[up]\nmodel = "m"\nworkers = 0', "up.workers"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(text: str, field: str) -> None:
    with pytest.raises(InvalidConfiguration) as error:
        parse(text)
    assert error.value.field == field


def test_only_what_makes_other_replicas_makes_another_revision() -> None:
    base = parse(UP)
    same = parse(f"[replicas]\ncount = 3\ndrain_s = 9.0\n[gateways]\nport = 9\n{UP}[gateway]\nnames = ['a']")
    assert same.revision == base.revision and same.gateway_revision != base.gateway_revision
    for text in (f"{UP}[up.limits]\nqueue_max = 9", '[up]\nmodel = "n"', f"[replicas]\nrank_cpus = 2\n{UP}"):
        assert parse(text).revision != base.revision
        assert parse(text).gateway_revision == base.gateway_revision
    assert parse(f"{UP}[gateway]\nnames = ['a']").gateway_revision == base.gateway_revision, "taken in place"


def test_what_the_page_shows_is_a_file() -> None:
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    (text,) = (block for block in page.split("```toml\n")[1:] if block.startswith("# fleet.toml"))
    file = parse(text.partition("```")[0])
    assert file.count == 4 and set(file.gateway) == {"names", "keys"}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="cannot be read"):
        load_fleet(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(InvalidConfiguration, match="is not TOML"):
        load_fleet(tmp_path / "bad.toml")
