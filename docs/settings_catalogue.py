"""Writes docs/settings.md of the classes of the configurations: `python docs/settings_catalogue.py`.

What a setting means stands in its class's docstring, behind the first paragraph, as `name, name: meaning.`
"""

from __future__ import annotations

import inspect
import json
import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvforge.coordinator import access
from kvforge.coordinator.config import CoordinatorConfig
from kvforge.coordinator.core.limits import Quota, Range
from kvforge.coordinator.kv_events.settings import KvEventsSection
from kvforge.fleet import settings as fleet
from kvforge.gateway import config as gateway
from kvforge.worker.config import WorkerConfig

PAGE = Path(__file__).with_name("settings.md")
FILES: tuple[tuple[str, tuple[tuple[str, type[msgspec.Struct]], ...]], ...] = (
    (
        "coordinator.toml",
        (
            ("", CoordinatorConfig),
            *((name, type(getattr(CoordinatorConfig(), name))) for name in ("limits", "cache", "schedule", "journal")),
            ("quotas.TENANT", Quota),
            ("tcp", access.TcpSection),
            ("access.local", access.Rights),
            ("access.clients.NAME", access.ClientEntry),
            ("access.workers.NAME", access.WorkerEntry),
            ("kv_events", KvEventsSection),
        ),
    ),
    ("worker.toml", (("", WorkerConfig),)),
    ("gateway.toml", (("", gateway.Settings), ("replicas.NAME", gateway.Replica), ("keys.NAME", gateway.Key))),
    (
        "fleet.toml",
        (
            ("", fleet.FleetFile),
            ("replicas", fleet.Replicas),
            ("autoscale", fleet.Autoscale),
            ("gateways", fleet.Gateways),
        ),
    ),
)
UNITS = {
    "_per_minute": "a minute",
    "_per_s": "a second",
    "_us": "µs",
    "_ms": "ms",
    "_ms_max": "ms",
    "_s": "s",
    "_max_s": "s",
    "ms_per_turn_max": "ms",
    "bytes_max": "bytes",
    "_bytes": "bytes",
    "bytes_per_turn_max": "bytes",
    "tokens_max": "tokens",
    "tokens_min": "tokens",
    "block_size": "tokens",
}
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false"}
HEAD = """# Settings

Made by `python docs/settings_catalogue.py` of the program's own classes. Every file is TOML; a key that is not here is
an error that names it and the nearest known one, and so is a value that is not allowed. A setting that is left out
has its default. Settings in bytes also take a text with a unit: `"4G"`, `"512MiB"` (powers of 1024), `"4GB"` (of 1000).
A description of several settings together stands beside each. `kvforge up --config FILE` takes the options of
`kvforge up` by their names, `[worker]`, and every section of coordinator.toml.
"""


def meanings(cls: type[msgspec.Struct]) -> dict[str, str]:
    """What the docstrings of a class and of those it is made of say of each field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = " ".join(inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\n\n")[2].split())
        text = text.rpartition("Attributes: ")[2]
        names = "|".join(cls.__struct_fields__)
        parts = re.split(rf"(?:^|(?<=[.;] ))((?:{names})(?:, (?:{names}))*): ", text)
        for heads, meaning in zip(parts[1::2], parts[2::2], strict=True):
            found |= dict.fromkeys(heads.split(", "), meaning.strip(" ;."))
    return found


def _kind(hint: object) -> str:
    """A type in words, with the range that it is held to."""
    if type(None) in (either := typing.get_args(hint)):
        return _kind(either[0])
    if typing.get_origin(hint) is typing.Annotated:
        plain, *bounds = typing.get_args(hint)
        return _kind(plain) + "".join(map(_range, bounds))
    if typing.get_origin(hint) is tuple:
        return "list of texts"
    return TYPES.get(hint, "date and time") if isinstance(hint, type) else "date and time"


def _range(bound: object) -> str:
    if isinstance(bound, Range):
        least, most = _number(bound.least), _number(bound.most)
        return f", at least {least}" if bound.most == math.inf else f", {least} to {most}"
    assert isinstance(bound, msgspec.Meta)
    most = next((at for at in (bound.le, bound.lt and bound.lt - 1) if at is not None), None)
    if bound.gt is not None:
        return f", above {_number(bound.gt)}" + (f", at most {_number(most)}" if most is not None else "")
    least = _number(bound.ge or 0)
    return f", {least} to {_number(most)}" if most is not None else f", at least {least}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _unit(name: str) -> str:
    return next((UNITS[end] for end in sorted(UNITS, key=len, reverse=True) if name.endswith(end)), "")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _table(section: str, cls: type[msgspec.Struct]) -> Iterator[str]:
    hints, said = typing.get_type_hints(cls, include_extras=True), meanings(cls)
    if section:
        yield f"### [{section}]\n"
    yield "| setting | type | unit | default | what it means |\n|---|---|---|---|---|"
    for field in msgspec.structs.fields(cls):
        if isinstance(field.default, msgspec.Struct) or typing.get_origin(hints[field.name]) is dict:
            continue  # a table of its own
        either = [each for each in typing.get_args(hints[field.name]) if isinstance(each, type)]
        if any(issubclass(each, msgspec.Struct) for each in either):
            continue  # one that need not be there
        if field.default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            continue  # likewise
        kind, unit = _kind(hints[field.name]), _unit(field.name)
        yield f"| `{field.name}` | {kind} | {unit} | {_default(field)} | {said[field.name].replace('|', '&#124;')} |"
    yield ""


def catalogue() -> str:
    """The page. Raises KeyError of a setting whose class does not say what it means."""
    lines = [HEAD]
    for file, sections in FILES:
        lines.append(f"## {file}\n")
        for section, cls in sections:
            lines += _table(section, cls)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(catalogue(), encoding="utf-8")
