"""Covering sets of described families: each part of a decoder that any family has, in as few families as possible.

A family is a combination of parts: the place of its norms, the kind of attention, the router, the kind of state. In
`make test` each family is compared with transformers once, some hybrids by their load alone. Any other mechanism, such
as 16 bits, ranks or Triton's interpreter, meets each part once, in the families of a covering set; the other families
are soak tests.

The parts are read from decoders that were loaded, and kept in `tests/data/decoder_parts.json`. The tests that compare a
family with transformers compare its parts with those of the file too. A family that the file lacks is in each set. To
write the file again:

    python -m tests.worker.loading.covering
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvforge.worker.device.device import open_device
from kvforge.worker.kernels.layer_weights import MixtureOfExperts
from kvforge.worker.loading.families import family_of
from kvforge.worker.loading.load import load_model
from kvforge.worker.loading.mixer_steps import step_of
from kvforge.worker.loading.mixers import MIXING, mixers_of
from kvforge.worker.loading.model import LoadedModel
from tests.worker.loading.random_models import DESCRIBED, HYBRIDS, save

FILE = Path(__file__).parents[2] / "data" / "decoder_parts.json"
HYBRID = "hybrid "  # before the names of `HYBRIDS`, some of which are those of `DESCRIBED` too
# Paths of parts: of what has a state, and of experts.
MIXER = ("layers.mixer",)
EXPERTS = ("decoder.layers.feed", "decoder.layers.experts_beside", "experts in float32")
NO_PARTS = {"operations", "attention", "ranks"}
# Packed weights have shared experts as a dense block, others among the other experts.
SHARED = {"shared", "shared_up", "shared_down"}


def parts_of(model: LoadedModel) -> frozenset[str]:
    """Return the parts of a loaded model's decoder, without names and sizes.

    Args:
        model: The model. If its decoder is not described, its parts are those of what has a state.

    Returns:
        For each attribute its path and value. Sizes and factors are 0, 1 or others; of a tensor only its presence
        counts. An attribute with several values in one decoder is a part more.
    """
    found = set(_mixers(model))
    if model.fused is not None:
        found |= set(_parts(model.fused, "decoder"))
        declared = family_of(model.module)
        assert declared is not None
        wide = declared.mixture is not None and declared.mixture.wide
        found |= {
            f"projections to Q, K and V: {len(declared.projected)}",
            f"projections to gate and up: {len(declared.gate_up)}",
            f"experts in float32: {wide}",
        }
    return frozenset(found)


def _mixers(model: LoadedModel) -> Iterator[str]:
    for mixer in mixers_of(model.module):
        projections = mixer.__dict__[MIXING].projections
        yield f"{MIXER[0]}.projections: {len(projections.inputs)} and {projections.output is not None}"
        yield from _parts(step_of(mixer), f"{MIXER[0]}.step")


def _parts(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, tuple | list) and value:
        of_each = [set(_parts(each, path)) for each in value]
        yield from set.union(*of_each)
        if path == "decoder.layers":
            yield from (f"{each} (not in all)" for each in set.union(*of_each) - set.intersection(*of_each))
    elif is_dataclass(value):
        yield f"{path}: {type(value).__name__}"
        if isinstance(value, MixtureOfExperts):
            yield f"{path} with shared ones: {value.shared is not None or value.router.shared > 0}"
        for field in fields(value):
            if field.name not in NO_PARTS | SHARED:
                yield from _parts(getattr(value, field.name), f"{path}.{field.name}")
        for name in (name for name, each in vars(type(value)).items() if isinstance(each, property)):
            if isinstance(answer := getattr(value, name), bool):
                yield f"{path}.{name}: {answer}"
    else:
        yield f"{path}: {_kind(value)}"


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return str(int(value)) if value in (0, 1) else "more"
    return "Tensor" if isinstance(value, torch.Tensor) else type(value).__name__


@cache
def recorded() -> Mapping[str, frozenset[str]]:
    """Return the parts of each family in the file."""
    found: dict[str, set[str]] = {}
    for group in json.loads(FILE.read_text(encoding="utf-8")):
        for family in group["families"].split(", "):
            found.setdefault(family, set()).update(group["parts"])
    return {family: frozenset(parts) for family, parts in found.items()}


def covering(names: Iterable[str], prefix: str = "", within: Sequence[str] = ("",)) -> list[str]:
    """Return as few of some families as have all parts that any of these has.

    Args:
        names: The families.
        prefix: What precedes a name in the file: `HYBRID` for those of `HYBRIDS`.
        within: Only parts with one of these paths count.

    Returns:
        The families, in the order given; those that the file lacks among them.
    """
    found, counted = recorded(), dict[str, frozenset[str]]()
    for name in names:
        parts = found.get(prefix + name)
        own = (
            [f"of {name} alone"] if parts is None else (each for each in parts if any(path in each for path in within))
        )
        counted[name] = frozenset(own)
    return _cover(counted)


def _cover(parts: Mapping[str, frozenset[str]]) -> list[str]:
    """Take the family with most of the parts that are left, until none is; then drop those that others replace."""
    left, chosen = set[str]().union(*parts.values()), list[str]()
    while left:
        chosen.append(max(parts, key=lambda name: len(left & parts[name])))
        left -= parts[chosen[-1]]
    for name in [*chosen]:
        others = [parts[other] for other in chosen if other != name]
        if parts[name] <= frozenset[str]().union(*others):
            chosen.remove(name)
    return [name for name in parts if name in chosen]


def by_parts(names: Sequence[str], prefix: str = "", within: Sequence[str] = ("",)) -> list[Any]:
    """Return families as parameters of a test: those outside of the covering set are soak tests."""
    few = covering(names, prefix, within)
    return [pytest.param(name, marks=[] if name in few else pytest.mark.soak, id=name) for name in names]


def check_parts(name: str, model: LoadedModel) -> None:
    """Fail if a family's parts are not those of the file.

    Args:
        name: The family, with `HYBRID` before that of a hybrid.
        model: The model, which runs without kernels.
    """
    found, kept = parts_of(model), recorded().get(name, frozenset())
    assert found == kept, (
        f"{name}: parts not in {FILE.name}: {sorted(found - kept)}, and only there: {sorted(kept - found)}; "
        f"write it again: python -m tests.worker.loading.covering"
    )


def write() -> None:
    """Load each family and write the file: the families of each part, and parts of the same families together."""
    torch.set_num_threads(1)
    owners: dict[str, list[str]] = {}
    cases = {**DESCRIBED, **{HYBRID + name: case for name, case in HYBRIDS.items()}}
    device = replace(open_device("cpu"), kernels=False)
    with tempfile.TemporaryDirectory() as root:
        for number, (name, case) in enumerate(cases.items()):
            folder = save(Path(root) / str(number), *case)
            for part in parts_of(load_model(folder, device=device, block_size=16, dtype="float32")):
                owners.setdefault(part, []).append(name)
    groups: dict[tuple[str, ...], list[str]] = {}
    for part in sorted(owners):
        groups.setdefault(tuple(owners[part]), []).append(part)
    found = [{"families": ", ".join(families), "parts": parts} for families, parts in groups.items()]
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
