"""`/docs`: the OpenAPI document as one HTML page without scripts, further files or network access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; overflow-wrap: anywhere; }
h2 { border-top: 1px solid #8886; margin-top: 2rem; padding-top: 1rem; font-size: 1.15rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
b.method { text-transform: uppercase; font-weight: 600; margin-right: .5rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #8883; }
summary { cursor: pointer; }
"""


def page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document."""
    info = document["info"]
    operations = [
        _operation(path, method, one) for path, methods in document["paths"].items() for method, one in methods.items()
    ]
    schemas = [_schema(name, one) for name, one in document["components"]["schemas"].items()]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><p>{escape(info['description'])} "
        'For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(operations)}<h1>Schemas</h1>{''.join(schemas)}</body></html>"
    )


def _operation(path: str, method: str, one: Mapping[str, Any]) -> str:
    parts = [
        f'<h2 id="{escape(one["operationId"])}"><b class="method">{escape(method)}</b><code>{escape(path)}</code></h2>'
        f"<p>{escape(one['summary'])}</p>"
    ]
    if parameters := one.get("parameters"):
        rows = [(f"<code>{escape(p['name'])}</code>", escape(p["in"]), escape(p["description"])) for p in parameters]
        parts.append(_table(("parameter", "in", "what"), rows))
    if "requestBody" in one:
        (media,) = one["requestBody"]["content"].values()
        parts.append(f"<p>Body: {_type(media['schema'])}</p>")
    answers = [
        (escape(status), escape(kind), _type(content["schema"]))
        for status, answer in one["responses"].items()
        for kind, content in answer["content"].items()
    ]
    return "".join([*parts, _table(("status", "media type", "answer"), answers)])


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{' (required)' if field in required else ''}",
            _type(one),
            escape(str(one.get("description", ""))),
        )
        for field, one in schema.get("properties", {}).items()
    ]
    about = f"<p>{escape(str(schema.get('description', '')))}</p>"
    return f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>{about}{_table(("field", "type", ""), rows)}'


def _type(schema: Mapping[str, Any]) -> str:
    """Describe a schema in a few words, with a link if it has a name."""
    if reference := schema.get("$ref"):
        name = escape(str(reference).rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if either := schema.get("anyOf"):
        return " or ".join(_type(one) for one in either)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_type(schema.get('items') or {})}"
    if properties := schema.get("properties"):
        names = ", ".join(f"<code>{escape(name)}</code>" for name in properties)
        return f"object with {names}"
    bounds = [f"{words} {schema[key]}" for key, words in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return escape(" ".join([" or ".join(kind) if isinstance(kind, list) else str(kind), *bounds]))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
