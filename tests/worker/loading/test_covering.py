"""Covering sets have every part of every family, and follow from the parts alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvforge.worker.device.device import open_device
from kvforge.worker.loading.families import FAMILIES
from kvforge.worker.loading.load import load_model
from tests.worker.loading import covering
from tests.worker.loading.covering import EXPERTS, HYBRID, MIXER, by_parts, check_parts, recorded
from tests.worker.loading.random_models import DESCRIBED, HYBRIDS, save
from tests.worker.loading.test_expert_parallel import KINDS
from tests.worker.loading.test_hybrids import PROJECTIONS, STEPPING
from tests.worker.loading.test_mixer_prompts import PLAIN

pytestmark = pytest.mark.usefixtures("quick_loads")
# What the tests take covering sets of: families, their prefix, and the paths of the parts that count.
MECHANISMS: dict[str, tuple[Iterable[str], str, Sequence[str]]] = {
    "kernels": (DESCRIBED, "", ("",)),
    "experts of ranks": (KINDS, "", EXPERTS),
    "states in 16 bits": (HYBRIDS, HYBRID, MIXER),
    "steps of all rows": (STEPPING, HYBRID, MIXER),
    "projections of all rows": (PROJECTIONS, HYBRID, MIXER),
    "prompts in chunks": (PLAIN, HYBRID, MIXER),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_part_meets_every_mechanism(mechanism: str) -> None:
    names, prefix, within = MECHANISMS[mechanism]
    parts = {
        name: {part for part in recorded()[prefix + name] if any(path in part for path in within)} for name in names
    }
    few = covering.covering(names, prefix, within)
    assert set().union(*(parts[name] for name in few)) == set().union(*parts.values())
    assert len(few) < len(parts), "some family has no part of its own"
    for name in few:  # each is needed
        others = set().union(*(parts[other] for other in few if other != name))
        assert parts[name] - others, name
    assert few == covering.covering(names, prefix, within)


def test_every_family_is_recorded() -> None:
    assert set(recorded()) == {*DESCRIBED, *(HYBRID + name for name in HYBRIDS)}


def test_a_new_part_brings_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"a": {"norm: 1", "router"}, "b": {"norm: 1"}, "c": {"norm: 1", "router"}}

    def chosen(**others: set[str]) -> list[str]:
        known = {name: frozenset(parts) for name, parts in {**found, **others}.items()}
        monkeypatch.setattr(covering, "recorded", lambda: known)
        return covering.covering([*known])

    assert chosen() == ["a"]
    assert chosen(b={"norm: 1", "norm: 2"}) == ["a", "b"]
    assert chosen(d={"norm: 1", "router", "latent"}) == ["d"]


def test_a_family_that_is_not_recorded_is_in_each_set(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: frozenset({"norm"}) for name in "ab"}
    monkeypatch.setattr(covering, "recorded", lambda: known)
    assert covering.covering("abc") == ["a", "c"]
    assert [len(param.marks) for param in by_parts("abc")] == [0, 1, 0]


def test_names_and_sizes_are_no_parts(tmp_path: Path) -> None:
    """A limit of Q, K and V is one."""

    def parts(kind: str, **fields: Any) -> frozenset[str]:
        folder = save(tmp_path / f"{kind}{len(fields)}", kind, fields)
        return covering.parts_of(load_model(folder, device=open_device("cpu"), block_size=4, dtype="float32"))

    assert FAMILIES["olmo2.Olmo2ForCausalLM"] is FAMILIES["olmo3.Olmo3ForCausalLM"]
    assert parts("llama") == parts("llama", intermediate_size=160, vocab_size=200)
    assert parts("olmo", clip_qkv=0.8) - parts("olmo") == {"decoder.layers.clip: more"}


def test_another_part_than_the_file_has_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, fields = DESCRIBED["llama"]
    folder = save(tmp_path / "llama", model_type, fields)
    model = load_model(folder, device=open_device("cpu"), block_size=4, dtype="float32")
    check_parts("llama", model)
    known = {"llama": recorded()["llama"] - {"decoder.layers.clip: 0"} | {"decoder.layers.clip: 1"}}
    monkeypatch.setattr(covering, "recorded", lambda: known)
    with pytest.raises(
        AssertionError, match=r"llama: parts not in decoder_parts\.json: \['decoder\.layers\.clip: 0'\]"
    ):
        check_parts("llama", model)
